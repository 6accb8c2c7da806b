"""`pic evidence`: what a model does on this machine, measured by the other commands, in one report to hand on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json, write_json
from pictool.commands.console.verbosity import note
from pictool.commands.evidence_report.parts import EvidencePart, PartRecord, PartStatus, read_record, run_part
from pictool.commands.settings.options import DATASET, OUTPUT, JsonOption, argument, command, make_app, option
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError

FORMAT, VERSION = "pictool-evidence", 1
CHUNKS, TAIL, NEW = 8, 32, 16  # of the prompts of `pic bench`, in tokens but the first
CHUNK_TOKENS = (64, 128, 256, 512, 1024)  # round by round
QUESTIONS = (8, 32, 128, 512)
POLICIES = ("full", "naive", "legolink", "cacheblend")  # if the examination names none

app = make_app()


@dataclass(frozen=True)
class EvidenceOptions:
    """The options of `pic evidence`."""

    documents: Annotated[
        Optional[list[str]], argument("DOCUMENT", "Text files to tune on, with questions of the model's own.")
    ] = None
    data: Annotated[
        Optional[list[str]],
        option("--data", "FILE", "Questions, as pic eval reads them; repeatable (picbench).", DATASET),
    ] = None
    minutes: Annotated[
        float, option("--minutes", "N", "Time for all parts; what does not fit is left out, and named.")
    ] = 60.0
    output: Annotated[
        str, option("-o, --output", "DIR", "Write report.html and report.json here; it continues.", OUTPUT)
    ] = "report"
    as_json: JsonOption = False


@command(app, "evidence", "model", "device", "dtype", "store")
def run_evidence(options: EvidenceOptions, settings: Settings) -> None:
    """Measure a model on this machine, and write a report to hand on.

    Runs doctor, bench, tune and eval under every policy. A run that was killed goes on; more --minutes add to it. The
    report has no text of yours.

    \b
      pic evidence -m ~/models/llama --data musique.json --minutes 60 -o report
    """
    documents, data, output = options.documents or [], options.data or [], options.output
    check_options(options.minutes, documents, data, output)
    from pictool.engines.answer_file import lock_output

    folder = Path(output, "parts")
    folder.mkdir(parents=True, exist_ok=True)
    with Path(output, "lock").open("ab") as file:
        lock_output(Path(output), file)
        records = run_parts(settings, documents, data or [default_data(settings)], folder, 60 * options.minutes)
        report = shareable(make_report(records, options.minutes), settings, output)
        write_report(report, Path(output))
    note(f"wrote {output}/report.html and {output}/report.json")
    if options.as_json:
        print_json(report)
    else:
        for record in records:
            print(f"{record.status:<8} {record.title}, {record.seconds:.0f} s" + f": {record.why}" * bool(record.why))
    if not report["is_good"]:
        sys.exit(1)


def default_data(settings: Settings) -> str:
    """Generated questions, which no model has read; the embedded models know no other world than their own."""
    from pictool.runtime.model import EMBEDDED

    return "world" if (settings.model or "embedded") in EMBEDDED else "picbench"


def check_options(minutes: float, documents: Sequence[str], data: Sequence[str], output: str) -> None:
    """Refuse what cannot be run or written before the long run."""
    from pictool.eval import require_extra
    from pictool.eval.datasets import datasets

    require_extra()
    if not 0 < minutes < 1e6:
        raise UsageError(f"--minutes {minutes:g}: must be above 0")
    for name in [*documents, *(name for name in data if name not in datasets())]:
        if not Path(name).is_file():
            raise InputError(f"{name}: no such file")
    if Path(output).exists() and not Path(output).is_dir():
        raise InputError(f"-o {output}: is not a directory; name another")


def run_parts(
    settings: Settings, documents: Sequence[str], data: Sequence[str], folder: Path, seconds: float
) -> list[PartRecord]:
    """Run what is missing. The time of earlier runs counts; each part gets its share of what is left."""
    chosen = ["-m", settings.model or "embedded", "--device", settings.device, "--dtype", settings.dtype]
    chosen += [] if settings.store is None else ["--store", settings.store]
    first = EvidencePart("doctor", "Exactness and answers", 6, (("doctor", *chosen, "--json"),))
    others = list(parts_of({}, chosen, documents, data, folder))
    records = [run_first([first, *others], seconds, folder)]
    others = list(parts_of(model_facts(records[0]), chosen, documents, data, folder))
    while others:
        records.append(run_first(others, seconds - sum(record.seconds for record in records), folder))
        del others[0]
    return records


def run_first(parts: Sequence[EvidencePart], seconds: float, folder: Path) -> PartRecord:
    """Run the first of some parts, within its share of the seconds that earlier runs of them left."""
    held = [read_record(part, folder) for part in parts]
    missing = sum(part.weight for part, record in zip(parts, held, strict=True) if record.status != PartStatus.DONE)
    left = seconds - sum(record.seconds for record in held)
    return run_part(parts[0], held[0], folder, left * parts[0].weight / max(parts[0].weight, missing), note)


def model_facts(doctor: PartRecord) -> dict[str, Any]:
    """What the examination says of the model; empty if it could not be loaded, or there was no time."""
    verdicts = doctor.result["verdicts"] if doctor.result else []
    return next((verdict["values"] for verdict in verdicts if verdict["check"] == "model"), {})


def parts_of(
    facts: dict[str, Any], chosen: Sequence[str], documents: Sequence[str], data: Sequence[str], folder: Path
) -> Iterator[EvidencePart]:
    """The parts after the examination, sized for the model."""
    room = (facts.get("positions", 1 << 20) - TAIL - NEW) // CHUNKS
    sizes = [tokens for tokens in CHUNK_TOKENS if tokens <= room] or [max(1, room)]
    for name, title, weight in (("sync", "Speed", 4), ("breakdown", "Where the time goes", 2)):
        rounds = (
            ("bench", name, *chosen, "--chunks", str(CHUNKS), "--chunk-tokens", str(tokens), "--repeats", "3", "--json")
            for tokens in sizes
        )
        yield EvidencePart(f"bench-{name}", title, weight, tuple(rounds))
    asked, plots = documents or ["--questions", data[0]], find_spec("matplotlib") is not None
    more = (*chosen, "--skip-long", "--dry-run", *(("--plot", str(folder / "tune.svg")) if plots else ()), "--json")
    rounds = (("tune", *asked, "--limit", str(limit), *more) for limit in QUESTIONS[1:])
    yield EvidencePart("tune", "The cheapest policy", 4, tuple(rounds))
    algos = [word for name in facts.get("policies", POLICIES) for word in ("--algo", name)]
    for number, name in enumerate(data, 1):
        path = folder / f"answers-{number}"
        plot = ("--plot", f"{path}.svg") if plots else ()
        more = (*chosen, *algos, "--skip-long", "-o", f"{path}.jsonl", *plot, "--json")
        rounds = (("eval", name, "--limit", str(limit), *more) for limit in QUESTIONS)
        yield EvidencePart(path.name, f"Answers: {Path(name).name}", 4, tuple(rounds))


def make_report(records: Sequence[PartRecord], minutes: float) -> dict[str, Any]:
    """The JSON of the report: machine, model, and all parts.

    Raises:
        InputError: parts are of different weights.
    """
    doctor, model = records[0].result or {"is_good": False, "verdicts": []}, model_facts(records[0])
    machine = [verdict["values"] for verdict in doctor["verdicts"] if verdict["check"] == "versions"]
    parts = [asdict(record) for record in records]
    heads = list[dict[str, Any]]()  # of the parts' results: the model and the machine, which doctor may not have told
    for each in (each for part in parts for each in part["rounds"]):
        each["result"] = with_header(each["result"])
        heads.append(each["result"].get("header", each["result"]))
    models, machines = ([head[name] for head in heads if head.get(name)] for name in ("model", "machine"))
    model, machine = model or next(iter(models), {}), [*machine, *machines, {}]
    if len({each.get("fingerprint") for each in (model, *models)} - {None}) > 1:
        raise InputError("the parts are of different weights; name another directory with -o")
    return {
        "format": FORMAT, "version": VERSION, "written": time.strftime("%Y-%m-%d", time.gmtime()),
        "is_good": doctor["is_good"] and all(record.status is not PartStatus.FAILED for record in records),
        "minutes": minutes, "seconds": sum(record.seconds for record in records),
        "machine": machine[0], "model": model, "parts": parts,
    }  # fmt: skip


def with_header(result: dict[str, Any]) -> dict[str, Any]:
    """A result with the header of its results file, which has the hash of its questions and the model's fingerprint."""
    path = result.get("results")
    if isinstance(path, str) and "header" not in result and Path(path).is_file():
        with Path(path).open(encoding="utf-8") as file:
            return {**result, "header": json.loads(file.readline())}
    return result


def shareable(report: dict[str, Any], settings: Settings, output: str) -> dict[str, Any]:
    """The report without paths that name a user or a machine."""
    text = json.dumps(report)
    for path in (settings.model, settings.store, output, str(Path.cwd())):
        if path is not None and Path(path).is_absolute():
            text = text.replace(json.dumps(path)[1:-1], Path(path).name)
    cleaned: dict[str, Any] = json.loads(text.replace(json.dumps(str(Path.home()))[1:-1], "~"))
    return cleaned


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write both forms, each whole or not at all."""
    from pictool.commands.evidence_report.page import evidence_page
    from pictool.store.store import atomic_write

    paths = {part["name"]: folder / "parts" / f"{part['name']}.svg" for part in report["parts"]}
    pictures = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
    write_json(folder / "report.json", report)
    with atomic_write(folder / "report.html") as file:
        file.write(evidence_page(report, pictures).encode())
