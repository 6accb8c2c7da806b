"""The demo of `make demo`: compile the sample corpus, link some of it under several policies, compare.

Questions and right answers come from fixtures/queries.jsonl; times are medians of five links each, after a warm-up.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import pictool
from pictool.commands.common import quiet_libraries

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "fixtures"
STORE = ROOT / ".pic"
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}), ("naive", {}), ("legolink", {"k": 4}), ("legolink", {"k": 16}), ("legolink-0", {}),
)  # fmt: skip
REPEATS = 5


def compile_corpus() -> None:
    """Run `pic compile` on every document, as a user would."""
    files = sorted(str(path.relative_to(ROOT)) for path in (FIXTURES / "docs").glob("*.txt"))
    print("$ pic compile fixtures/docs/*.txt", flush=True)
    pic = [str(Path(sys.executable).parent / "pic"), "compile", "--store", str(STORE), "-m", "embedded", *files]
    shown = subprocess.run(pic, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    print("\n".join([*shown[:3], f"... {len(shown) - 3} more"]), flush=True)


def ask(model: pictool.Model, store: pictool.Store, query: dict[str, Any], policy: pictool.Policy) -> pictool.Answer:
    documents = [FIXTURES / name for name in query["documents"]]
    return pictool.answer(model, store, pictool.Request(query["query"], documents, policy, max_new_tokens=16))


def show(console: Console, model: pictool.Model, store: pictool.Store, query: dict[str, Any]) -> None:
    """One question under every policy."""
    right = query["answers"][0]
    about = f"({len(query['documents'])} documents, {query['kind']}; right: {right})"
    console.print(f"\n[bold]{query['query']}[/bold]  {about}", highlight=False)
    table = Table("policy", "answer", "rows recomputed", "TTFT ms", "speedup")
    full_ttft = 0.0
    for name, fields in POLICIES:
        answers = [ask(model, store, query, pictool.make_policy(name, fields)) for _ in range(REPEATS + 1)][1:]
        linked = answers[0].linked
        ttft = statistics.median(one.linked.timing.ttft_s for one in answers)
        full_ttft = full_ttft or ttft
        label = name + "".join(f" {field}={value}" for field, value in fields.items())
        shown = answers[0].text + ("" if answers[0].text in query["answers"] else "  (wrong)")
        rows = f"{linked.recomputed:.0f} of {linked.image.layout.num_context}"
        table.add_row(label, shown, rows, f"{ttft * 1e3:.1f}", f"{full_ttft / ttft:.1f}x")
    console.print(table)


def main() -> None:
    compile_corpus()
    quiet_libraries()
    model, store = pictool.load_model("embedded"), pictool.Store(STORE)
    queries = [json.loads(line) for line in (FIXTURES / "queries.jsonl").read_text().splitlines()]
    console = Console(width=100)
    for kind in ("local", "carried", "two-hop"):
        show(console, model, store, next(q for q in queries if q["kind"] == kind and len(q["documents"]) > 6))
    right = {}
    for name in ("full", "naive"):
        policy = pictool.make_policy(name, {})
        right[name] = sum(ask(model, store, query, policy).text in query["answers"] for query in queries)
    print(f"\nAll {len(queries)} sample queries: full answers {right['full']} right, naive {right['naive']}.")


if __name__ == "__main__":
    main()
