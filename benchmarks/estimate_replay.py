"""Whether a `pic serve` reuses what `pic estimate --replay` predicts: documents in messages, and given as such.

    python -m benchmarks.estimate_replay --out benchmarks/results/estimate_replay.json

Text is of the synthetic world, in requests of three of its pages: between numbered headings (on lines of their own, or
not), in tags, and as parts of type document. The server is a process of its own with the embedded model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.agent_loop import serving
from benchmarks.output import write_results
from pictool.world.generate import write_prompt

QUESTION = "Which of these towns is the oldest?"
FORMS: dict[str, Callable[[Sequence[str]], Any]] = {
    "numbered headings": lambda texts: _pasted(
        [f"Document {i}:\n{text}" for i, text in enumerate(texts, 1)], "\n---\n"
    ),
    "headings on the same line": lambda texts: _pasted(
        [f"Document {i}: {text}" for i, text in enumerate(texts, 1)], "\n---\n"
    ),
    "tags": lambda texts: _pasted([f"<document>{text}</document>" for text in texts], "\n"),
    "parts": lambda texts: [
        *({"type": "document", "text": text} for text in texts),
        {"type": "text", "text": QUESTION},
    ],
}


def _pasted(documents: Sequence[str], end: str) -> str:
    return "Read this.\n" + "\n".join(documents) + end + QUESTION


def records(form: str, count: int) -> list[dict[str, Any]]:
    """Requests over eight pages, three in each, in any order."""
    draw = random.Random(0)
    pages = [write_prompt(draw, 1).pages[0].strip() for _ in range(8)]
    return [{"messages": [{"role": "user", "content": FORMS[form](draw.sample(pages, 3))}]} for _ in range(count)]


def measure(form: str, count: int, model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        log = Path(root) / "log.jsonl"
        log.write_text("".join(json.dumps(record) + "\n" for record in records(form, count)))
        with serving(model, root, Path(root) / "requests.jsonl") as client:
            command = [sys.executable, "-m", "pictool", "estimate", str(log), "-m", model, "--sample", str(count)]
            url = str(client.base_url)
            done = subprocess.run([*command, "--replay", url, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    sums = {name: sum(row[name] for row in report["requests"]) for name in report["requests"][0] if name != "number"}
    counts = {"requests": len(report["requests"]), "equal": report["equal"], "within_edges": report["within_edges"]}
    return counts | {"tokens": sums, "rows": report["requests"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = {form: measure(form, options.requests, options.model) for form in FORMS}
    write_results(options.out, {"model": options.model, "runs": runs})


if __name__ == "__main__":
    main()
