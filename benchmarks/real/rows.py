"""The table of docs/studies/results.md: rows that were handed in, and rows of earlier results files.

A row file is what a run of `python -m benchmarks.real` leaves to hand in: model, machine, date, command, and a line for
each length and policy. Lines of earlier files are read from these, whose `command` and `machine` they have; of those
the date is that of the commit that wrote them.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.output import write_results
from benchmarks.real.report import PLANTED, Prompts, row
from pictool import Model
from pictool.runtime.model import api_name

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "studies" / "results.md"
RESULTS = ROOT / "benchmarks" / "results"
ROWS = RESULTS / "rows"
START, END = "<!-- python -m benchmarks.real --add -->", "<!-- end -->"
SHOWN = ("legolink-16", "auto", "prophet-20")
LEAST = 5  # prompts of an interval: a bootstrap of fewer says little
HEAD = (
    "model", "device", "tokens", "prompts", "policy", "TTFT, s: full → linked", "KL left", "worst prompt",
    "answers kept", "results, date, version",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A policy at a length. Random weights have seconds alone.

    Fields:
        tokens: of the prompts, their mean. prompts: what they are, and how many of each.
        full_s, linked_s: median TTFT.
        left: the share of naive's KL, with its interval `low` to `high`; worst_nats: KL of the worst prompt's answer.
        same: answers that are full's token by token, of how many; right: of full's right ones, those that stay right.
    """

    tokens: float
    policy: str
    full_s: float
    linked_s: float
    prompts: str = ""
    left: float | None = None
    low: float | None = None
    high: float | None = None
    worst_nats: float | None = None
    same: Sequence[int] = ()
    right: Sequence[int] = ()


def lines_of(answers: Prompts) -> Iterator[Line]:
    """Of prompts whose lengths have the same power of two below them; planted tasks apart."""
    ordered = sorted(answers, key=_group)
    for _, group in groupby(ordered, _group):
        own = list(group)
        for policy, found in own[0]["policies"].items():
            if found["ttft_s"] is not None:  # another exact computation has none
                yield _line(own, policy)


def _group(each: Mapping[str, Any]) -> tuple[bool, int]:
    is_planted = each["kind"] == PLANTED
    return is_planted, 0 if is_planted else int(each["tokens"]).bit_length()


def _line(own: Prompts, policy: str) -> Line:
    found, kinds = row(own, policy), [each["kind"] for each in own]
    answers = [each["policies"][policy] for each in own]
    has_interval = len(own) >= LEAST
    return Line(
        tokens=mean(each["tokens"] for each in own),
        policy=policy,
        full_s=median(each["full_ttft_s"] for each in own),
        linked_s=median(each["ttft_s"] for each in answers),
        prompts=", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted({*kinds})),
        left=found["left"],
        low=found["low"] if has_interval else None,
        high=found["high"] if has_interval else None,
        worst_nats=found["worst_nats"],
        same=(sum(each["same"] for each in answers), len(own)),
        right=found["right"],
    )


def write_row(path: Path, model: Model, device: str, results: Mapping[str, Any]) -> None:
    """Write what a run hands in: nothing of the questions and answers themselves."""
    facts = {"name": api_name(model.name), "type": model.config.model_type, "fingerprint": model.fingerprint}
    settings = {name: value for name, value in results["settings"].items() if name != "model"}
    write_results(path, {
        "model": facts, "device": device, "settings": settings, "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(), "lines": [asdict(line) for line in lines_of(results["answers"])],
    })  # fmt: skip


def _commit() -> str | None:
    shown = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, check=False)
    return shown.stdout.decode().strip() or None


def add(path: Path, note: str = "") -> Path:
    """Copy a row file to the others, with a note; one of the same model, machine and dtype gives way."""
    try:
        handed_in = json.loads(path.read_text(encoding="utf-8"))
        names = (handed_in["model"]["name"], _processor(handed_in), handed_in["settings"]["dtype"])
        _ = [Line(**line) for line in handed_in["lines"]]
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{path}: not a row that python -m benchmarks.real wrote ({error!r})") from error
    target = ROWS / f"{re.sub(r'[^a-z0-9.]+', '_', '_'.join(names).lower())}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"note": note, **handed_in}, indent=1) + "\n", encoding="utf-8")
    return target


def _processor(results: Mapping[str, Any]) -> str:
    """The name of what computed: of files that do not say, the GPU if there was one."""
    machine = results["machine"]
    return str(machine["cpu"] if results.get("device") == "cpu" or not machine["gpu"] else machine["gpu"])


# Earlier results files


def _of_answers(results: Mapping[str, Any]) -> Iterator[Line]:
    return lines_of(results["answers"])


def _of_lengths(results: Mapping[str, Any]) -> Iterator[Line]:
    for line in results["lines"]:
        for policy, seconds in line["cpu_s"].items():
            yield Line(line["tokens"], policy, line["cpu_s"]["full"], seconds, "random tokens; CPU seconds")


def _of_bench(results: Mapping[str, Any]) -> Iterator[Line]:
    own = results["results"]
    seconds = {method["label"]: method["ttft"]["median"] for method in own["methods"]}
    for policy, linked_s in seconds.items():
        yield Line(own["prompt_tokens"], policy, seconds["full"], linked_s)


def _of_tiers(results: Mapping[str, Any]) -> Iterator[Line]:
    full = {point["tokens"]: point["ttft"]["median"] for point in results["points"] if point["policy"] == "full"}
    for point in results["points"]:
        tokens, where = point["tokens"], f"objects: {point['tier']}"
        yield Line(tokens, point["policy"], full[tokens], point["ttft"]["median"], where)


def _of_shapes(results: Mapping[str, Any]) -> Iterator[Line]:
    for shape in results["kinds"]:
        seconds = median(shape["full_ttft_s"]), median(shape["linked_ttft_s"])
        yield Line(shape["prompt_tokens"], results["policy"], *seconds, f"{shape['shape']}, objects: page cache")


def _of_vllm(results: Mapping[str, Any]) -> Iterator[Line]:
    seconds = results["medians_s"]
    for policy in results["speedup"]:
        yield Line(results["documents"] * results["tokens"], policy, seconds["full prefill"], seconds[policy])


@dataclass(frozen=True)
class Earlier:
    """A results file from before there were rows: its model, what else ran it, and the commit that wrote it."""

    model: str
    read: Callable[[Mapping[str, Any]], Iterator[Line]]
    date: str
    commit: str
    how: str = ""


_SMOLLM2, _GEMMA3 = "SmolLM2-135M-Instruct, real", "Gemma 3 270M, real"
_LLAMACPP = "llama.cpp, KV in float16"
EARLIER = {
    "real_smollm2.json": Earlier(_SMOLLM2, _of_answers, "2026-11-29", "24ac6adb", "float32, busy"),
    "real_smollm2_gguf.json": Earlier(_SMOLLM2, _of_answers, "2026-11-29", "24ac6adb", f"{_LLAMACPP}, busy"),
    "link_lengths_smollm2.json": Earlier(_SMOLLM2, _of_lengths, "2026-11-29", "24ac6adb", "float32"),
    "real_gemma3.json": Earlier(_GEMMA3, _of_answers, "2026-11-29", "24ac6adb", "float32, busy"),
    "real_gemma3_gguf.json": Earlier(_GEMMA3, _of_answers, "2026-11-29", "24ac6adb", _LLAMACPP),
    "bench_sync.json": Earlier("Qwen2.5-0.5B's shape, random", _of_bench, "2026-11-26", "52c06d16", "float32"),
    "bench_sync_bfloat16.json": Earlier(
        "Qwen2.5-0.5B's shape, random", _of_bench, "2026-11-26", "52c06d16", "bfloat16"
    ),
    "vllm_ttft.json": Earlier(
        "Qwen2.5-0.5B's shape, random", _of_vllm, "2026-11-21", "c6909c01", "float32, in vLLM's CPU build"
    ),
    "gpu_sync.json": Earlier("Llama 3.1 8B's shape, random", _of_bench, "2026-11-26", "ff1856c1", "bfloat16"),
    "gpu_context.json": Earlier("Llama 3.1 8B's shape, random", _of_tiers, "2026-11-26", "ff1856c1", "bfloat16"),
    "gpu_kinds.json": Earlier("shapes of four models, random", _of_shapes, "2026-11-27", "48ddca64", "bfloat16"),
}


# The page


def table() -> list[str]:
    """All rows as lines of Markdown; what is as in the row above is left blank."""
    rows = [_cells(["", *HEAD, ""]), "|" + "---|" * len(HEAD)]
    for path in sorted(ROWS.glob("*.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        model, dtype = results["model"], results["settings"]["dtype"]
        how = f"llama.cpp, KV in {dtype}" if model["type"].startswith("gguf.") else dtype
        how += f", {results['note']}" if results["note"] else ""
        lines = [Line(**line) for line in results["lines"]]
        version = _version(results, results["commit"])
        rows += _rows(path, f"{model['name']}, real", _device(results, how), lines, results["date"], version)
    for name, earlier in EARLIER.items():
        results = json.loads((RESULTS / name).read_text(encoding="utf-8"))
        rows += _rows(
            RESULTS / name, earlier.model, _device(results, earlier.how), earlier.read(results), earlier.date,
            _version(results, results.get("commit", earlier.commit)),
        )  # fmt: skip
    return rows


def _rows(
    path: Path, model: str, device: str, lines: Iterator[Line] | Sequence[Line], date: str, version: str
) -> Iterator[str]:  # fmt: skip
    source = f"[`{path.name}`](../../{path.relative_to(ROOT).as_posix()}), {date}, {version}"
    before: list[str] = []
    for line in lines:
        if line.policy not in SHOWN:
            continue
        heads = [model, device, f"{line.tokens:,.0f}", line.prompts]
        new = ["" if heads[: at + 1] == before[: at + 1] else cell for at, cell in enumerate(heads)]
        yield _cells(["", *new, line.policy, *_figures(line), "" if before else source, ""])
        before = heads


def _figures(line: Line) -> list[str]:
    times = f"{_short(line.full_s)} → {_short(line.linked_s)} ({_short(line.full_s / line.linked_s, 2)}×)"
    if line.left is None:
        return [times, "", "", ""]
    bounds = "" if line.low is None else f" [{line.low:.2f}, {line.high:.2f}]"
    kept = f"{line.same[0]} of {line.same[1]}" + (f"; {line.right[0]} of {line.right[1]}" if line.right[1] else "")
    return [times, f"{line.left:.2f}{bounds}", f"{line.worst_nats:.1f} nats", kept]


def _short(value: float, digits: int = 3) -> str:
    """To so many digits, never with an exponent: `1.2e+03` is 1200."""
    return f"{float(f'{value:.{digits}g}'):g}"


def _device(results: Mapping[str, Any], how: str) -> str:
    machine, processor = results["machine"], _processor(results)
    cores = f" ({machine['threads']} of {machine['cores']} cores)" if processor == machine["cpu"] else ""
    return f"{processor}{cores}, {how}"


def _version(results: Mapping[str, Any], commit: str | None) -> str:
    return " at ".join(filter(None, (results["machine"]["pictool"], commit)))


def _cells(cells: Sequence[str]) -> str:
    return " | ".join(cells).strip()


def with_table(page: str) -> str:
    """The page with the table of the files that are there."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    assert rest and after, f"no {START} … {END}"
    return "\n".join([before + START, "", *table(), "", END + after])


def write_page() -> None:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
