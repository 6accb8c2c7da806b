"""CPU seconds of a first and a second `pic ask` over the same files, of one after a file changed, and of a dry sync.

    OMP_NUM_THREADS=1 python -m benchmarks.asked_again --out benchmarks/results/asked_again.json

The files are made of paragraphs of this repository's documentation, each with a name that no other file has. Every
question is a process of its own; its CPU time has what it starts, and what importing torch and the classes of a model
takes is beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.output import write_results

QUESTION = "How long does a lease of {name} last?"
_SETTLED_S = "2.1"  # until a file's times tell another change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory of a model; default: the embedded one")
    parser.add_argument("--files", nargs="+", default=["300x40", "10000x2"], help="NUMBERxKB, of each file")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    more = [] if options.model is None else ["-m", options.model]
    model, lines = "embedded" if options.model is None else Path(options.model).name, list[dict[str, Any]]()
    imports = [sys.executable, "-c", "import torch, transformers.models.llama.modeling_llama"]
    for sizes in options.files:
        number, kilobytes = map(int, sizes.split("x"))
        with tempfile.TemporaryDirectory() as directory:
            lines.append(measure(Path(directory), number, kilobytes << 10, more) | {"imports_cpu_s": run(imports)[0]})
        print(lines[-1], flush=True)
        write_results(options.out, {"model": model, "lines": lines})


def measure(directory: Path, number: int, size: int, more: Sequence[str]) -> dict[str, Any]:
    """The CPU seconds of each step."""
    folder, store = directory / "docs", directory / "store"
    written = write_files(folder, number, size)
    subprocess.run(["sleep", _SETTLED_S], check=True)
    ask = [*pic("ask", folder, store), "-q", QUESTION.format(name=name_of(7)), "--max-new-tokens", "8", *more]
    seconds = {"first": run(ask)[0]}
    seconds["second"], said = run(ask)
    (folder / file_name(7)).write_text((folder / file_name(8)).read_text() + f"\n{name_of(7)}\n")
    seconds["one file changed"] = run(ask)[0]
    seconds["dry sync"] = run([*pic("sync", folder, store), "--dry-run", *more])[0]
    counts = next(line for line in said.splitlines() if "passages of" in line)
    kept = sum(path.stat().st_size for path in store.glob("store.sqlite3"))
    return {"files": number, "text_bytes": written, "said": counts, "kept_bytes": kept, "cpu_s": seconds}


def pic(command: str, folder: Path, store: Path) -> list[str]:
    return [sys.executable, "-m", "pictool", command, str(folder), "--store", str(store)]


def run(command: Sequence[str]) -> tuple[float, str]:
    """The CPU seconds of a command and all that it starts, and what it says on stderr."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2), done.stderr


def write_files(folder: Path, number: int, size: int) -> int:
    """Write files of about this size; returns the bytes of all."""
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    paragraphs = [text for page in pages for text in re.split(r"\n{2,}", page.read_text()) if len(text) > 40]
    draw, total = random.Random(1), 0
    for at in range(number):
        parts, length = [f"Notes on {name_of(at)}"], 0
        while length < size:
            parts.append(draw.choice(paragraphs))
            length += len(parts[-1])
        path = folder / file_name(at)
        path.parent.mkdir(parents=True, exist_ok=True)
        total += path.write_bytes("\n\n".join([*parts, f"A lease of {name_of(at)} lasts {at} days."]).encode())
    return total


def file_name(at: int) -> str:
    return f"{at % 40}/{name_of(at)}.txt"


def name_of(at: int) -> str:
    """A word that no other file has."""
    return "".join(chr(ord("a") + at // 26**place % 26) for place in range(4)) + "ium"


if __name__ == "__main__":
    main()
