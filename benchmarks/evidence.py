"""What a model does on this machine, measured by other commands, in one report to hand on; and the table of reports.

    python -m benchmarks.evidence run -m ~/models/llama --data musique.json --minutes 60 --out report
    python -m benchmarks.evidence rehearse --shape qwen2.5-0.5b --minutes 10
    python -m benchmarks.evidence add report/report.json NAME
    python -m benchmarks.evidence table

`run` runs doctor, bench, tune and eval, one after another, each for at most its share of the minutes that are left; a
part of an earlier run that ended is not run again. `rehearse` does so on a random model (`make evidence`). `add` copies
a report to benchmarks/results/evidence_NAME.json; `table` writes the rows of docs/studies/results.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.questions import write_questions
from benchmarks.questions.picbench import Picbench
from pictool.bench.shapes import random_module, shape_of
from pictool.runtime.model import load_model

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "studies" / "results.md", ROOT / "benchmarks" / "results"
HEAD = (
    "| model | device | exact | speedup of legolink-16 | policy that tune certifies, or that its means name | report |"
)
LINKED = "legolink-16"
# What nobody has run; a report replaces the row whose words its model and device have.
OPEN = (
    ("8B, trained", "CPU"), ("8B, trained", "NVIDIA H100 or H200"), ("8B, trained", "NVIDIA A100"),
    ("8B, trained", "NVIDIA RTX 4090"), ("8B, trained", "AMD MI300X (ROCm)"), ("8B, trained", "Intel (XPU)"),
    ("8B, trained", "Apple (MPS)"), ("70B, trained", "any GPU that holds it"),
    ("mixture of experts, trained", "any GPU"),
)  # fmt: skip


GRACE_S = 20.0  # for an interrupted command to print what it knows
POLICIES = ("full", "naive", "legolink", "cacheblend")  # if the examination names none


def parts_of(doctor: Any, model: str, data: Sequence[str], folder: Path) -> dict[str, tuple[str, ...]]:
    """The commands after the examination, by the names of their parts."""
    chosen = ("-m", model, "--json")
    facts: Mapping[str, Any] = model_facts(doctor)
    room = (facts.get("positions", 1 << 20) - 48) // 8
    algos = [word for name in facts.get("policies", POLICIES) for word in ("--algo", name)]
    parts = {
        "bench-sync": ("bench", *chosen, "--chunk-tokens", str(max(1, min(512, room))), "--repeats", "3"),
        "tune": ("tune", "--questions", data[0], "--limit", "128", *chosen, "--dry-run"),
    }
    for number, name in enumerate(data, 1):
        part = f"answers-{number}"
        more = ("--limit", "128", *algos, *chosen, "-o", str(folder / f"{part}.jsonl"))
        parts[part] = ("eval", name, *more)
    return parts


def model_facts(doctor: Any) -> dict[str, Any]:
    """What the examination says of the model; empty if it could not be loaded, or there was no time."""
    verdicts = doctor["verdicts"] if doctor else []
    return next((verdict["values"] for verdict in verdicts if verdict["check"] == "model"), {})


def run(model: str, data: Sequence[str], minutes: float, folder: Path) -> int:
    """Run every part and write the report; returns 1 if a check or a part failed."""
    folder.mkdir(parents=True, exist_ok=True)
    if not data:
        data = [str(folder / "picbench.jsonl")]
        write_questions(Picbench(), Path(data[0]))
    ends = time.monotonic() + 60 * minutes
    left_parts = len(data) + 3
    doctor = run_part("doctor", ("doctor", "-m", model, "--json"), ends, left_parts, folder)
    parts = [doctor]
    for name, arguments in parts_of(result_of(doctor), model, data, folder).items():
        parts.append(run_part(name, arguments, ends, left_parts - len(parts), folder))
    verdicts = (result_of(doctor) or {"verdicts": []})["verdicts"]
    report = {
        "is_good": all(part["status"] != "failed" for part in parts),
        "machine": next((verdict["values"] for verdict in verdicts if verdict["check"] == "versions"), {}),
        "model": model_facts(result_of(doctor)),
        "parts": parts,
    }
    write(folder / "report.json", report)
    return 0 if report["is_good"] else 1


def result_of(part: Mapping[str, Any]) -> Any:
    return part["rounds"][-1]["result"] if part["rounds"] else None


def run_part(name: str, arguments: Sequence[str], ends: float, parts: int, folder: Path) -> dict[str, Any]:
    """Run a command within its share of the time that is left for so many parts; or read what an earlier run made."""
    path = folder / f"{name}.json"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["status"] == "done" and kept["rounds"][-1]["arguments"] == list(arguments):
            return kept
    started, limit_s = time.monotonic(), (ends - time.monotonic()) / parts
    print(f"{name}: {limit_s:.0f} s at most", file=sys.stderr)
    process = subprocess.Popen([sys.executable, "-m", "pictool", *arguments], stdout=subprocess.PIPE)
    try:
        (printed, _), status = process.communicate(timeout=max(0.0, limit_s)), "done"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        (printed, _), status = stopped(process), "partial"
    result = json.loads(printed) if printed.strip() else None
    if result is None:
        status = "left out" if status == "partial" else "failed"
    rounds = [{"arguments": arguments, "code": process.returncode, "result": result}] if result else []
    part = {"name": name, "status": status, "seconds": time.monotonic() - started, "rounds": rounds}
    write(path, part)
    return part


def stopped(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What an interrupted process prints before it ends, or is killed."""
    try:
        return process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def rehearse(shape: str, minutes: float, out: Path) -> int:
    """Save a random model of a shape, and report on it."""
    model = out / f"random-{shape}"
    if not (model / "config.json").exists():
        random_module(shape_of(shape).make_config(), "cpu", "float32", 0).save_pretrained(out / "saving")
        load_model("embedded").tokenizer.save_pretrained(out / "saving")
        (out / "saving").rename(model)
    return run(str(model), [], minutes, out / "report")


def row(name: str, report: dict[str, Any]) -> str:
    """A report's row of the table."""
    parts = {part["name"]: part["rounds"][-1]["result"] for part in report["parts"] if part["rounds"]}
    model, machine = report["model"], report["machine"]
    device = machine.get("cpu" if model.get("device") == "cpu" else "gpu", "not examined")
    exact = "not examined" if "doctor" not in parts else "yes" if parts["doctor"]["is_good"] else "no"
    cells = [f"{model.get('name', name)}, {model.get('dtype')}", f"{device}, {machine.get('threads')} threads", exact]
    speed = parts.get("bench-sync")
    if speed is None:
        cells.append("")
    else:
        linked = next(each for each in speed["results"]["methods"] if each["label"] == LINKED)
        cells.append(f"{linked['speedup']:.1f}× at {speed['results']['prompt_tokens']:,} tokens")
    tuned = parts.get("tune")
    cells.append("" if tuned is None else tuned["chosen"] or f"none; by means {tuned['by_mean'] or 'full'}")
    return f"| {' | '.join(cells)} | `evidence_{name}.json` |"


def rows() -> str:
    """The whole table: reports, then what nobody has run."""
    reports = [(path.stem.removeprefix("evidence_"), path) for path in sorted(RESULTS.glob("evidence_*.json"))]
    lines = [row(name, json.loads(path.read_text(encoding="utf-8"))) for name, path in reports]
    empty = [f"| {model} | {device} | | | | |" for model, device in OPEN]
    return "\n".join([HEAD, "|" + "---|" * HEAD.count(" | ") + "---|", *lines, *empty]) + "\n"


def with_rows(page: str) -> str:
    """The page with the table that the reports give."""
    return re.sub(rf"{re.escape(HEAD)}\n(\|.*\n)*", lambda _: rows(), page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("-m", "--model", default="embedded")
    running.add_argument("--data", action="append", default=[], help="a file of questions (picbench)")
    running.add_argument("--minutes", type=float, default=60)
    running.add_argument("--out", type=Path, default=Path("report"))
    rehearsal = commands.add_parser("rehearse")
    rehearsal.add_argument("--shape", default="qwen2.5-0.5b")
    rehearsal.add_argument("--minutes", type=float, default=10)
    rehearsal.add_argument("--out", type=Path, default=ROOT / ".evidence")
    adding = commands.add_parser("add")
    adding.add_argument("report", type=Path)
    adding.add_argument("name")
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "run":
        sys.exit(run(options.model, options.data, options.minutes, options.out))
    if options.command == "rehearse":
        sys.exit(rehearse(options.shape, options.minutes, options.out))
    if options.command == "add":
        shutil.copyfile(options.report, RESULTS / f"evidence_{options.name}.json")
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
