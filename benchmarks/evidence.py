"""The reports of `pic evidence` that the page of results lists, and the rehearsal on a random model (`make evidence`).

    python -m benchmarks.evidence rehearse --shape qwen2.5-0.5b --minutes 10 --out .evidence
    python -m benchmarks.evidence add .evidence/report/report.json NAME
    python -m benchmarks.evidence table

`add` copies a report to benchmarks/results/evidence_NAME.json; `table` writes the rows of docs/studies/results.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def rehearse(shape: str, minutes: float, out: Path, dtype: str) -> int:
    """Save a random model of a shape, and report on it; returns the exit code of `pic evidence`."""
    model = out / f"random-{shape}"
    if not (model / "config.json").exists():
        random_module(shape_of(shape).make_config(), "cpu", dtype, 0).save_pretrained(out / "saving")
        load_model("embedded").tokenizer.save_pretrained(out / "saving")
        (out / "saving").rename(model)
    command = ["evidence", "-m", str(model), "--minutes", str(minutes), "-o", str(out / "report"), "--store"]
    return subprocess.run([sys.executable, "-m", "pictool", *command, str(out / "store")]).returncode


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
    rehearsal = commands.add_parser("rehearse")
    rehearsal.add_argument("--shape", default="qwen2.5-0.5b")
    rehearsal.add_argument("--dtype", default="float32")
    rehearsal.add_argument("--minutes", type=float, default=10)
    rehearsal.add_argument("--out", type=Path, default=ROOT / ".evidence")
    adding = commands.add_parser("add")
    adding.add_argument("report", type=Path)
    adding.add_argument("name")
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "rehearse":
        sys.exit(rehearse(options.shape, options.minutes, options.out, options.dtype))
    if options.command == "add":
        shutil.copyfile(options.report, RESULTS / f"evidence_{options.name}.json")
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
