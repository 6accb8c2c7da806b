"""The tables of docs/studies/span-queries.md, from the raw results: prints them, or with --write puts them in.

    python -m benchmarks.query_tables --write

A table is found by its first line. Lines below it are replaced; the text around it is not, so read that again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "docs" / "studies" / "span-queries.md"
RESULTS = Path(__file__).parent / "results"
Points = Sequence[Mapping[str, Any]]
Rows = list[list[str]]


def documents(points: Points) -> Rows:
    """Fig. 13b."""
    stock, *others = (own["label"] for own in points[0]["measured"])
    rows = [
        [
            str(point["documents"]), f"{point['prompt_tokens']:,}", f"{first['ttft']['median'] * 1e3:,.0f}",
            *(f"{own['speedup']:.1f}×" for own in rest),
        ]
        for point in points
        for first, *rest in [point["measured"]]
    ]  # fmt: skip
    return [["documents", "tokens", f"{stock}, ms", *others], *rows]


def pages(points: Points) -> Rows:
    """Quality beside fig. 13b."""
    full, *others = (own["label"] for own in points[0]["quality"])
    first, *rest = others
    rows = [
        [
            str(point["documents"]), *(f"{100 * own['right']:.0f}" for own in point["quality"]),
            *(f"{own['kl_mean']:.2f}" for own in point["quality"][1:]),
        ]
        for point in points
    ]  # fmt: skip
    return [["pages", f"right: {full}", *others, f"KL: {first}", *rest], *rows]


def judge(points: Points) -> Rows:
    """Figs. 14 and 15."""
    labels = ["naive", "legolink-16"]
    head = ["temperature", "fan-out", "tokens", "stock", *labels, *(f"{label}, speedup" for label in labels)]
    rows = [
        [
            f"{point['temperature']:g}", str(point["fan_out"]), f"{point['prompt_tokens']:,.0f}",
            *(f"{own['p50'] * 1e3:,.0f} / {own['p99'] * 1e3:,.0f}" for own in point["ttft"].values()),
            *(f"{own['p50']:.1f}× / {own['p1']:.1f}×" for label, own in point["speedup"].items() if label != "stock"),
        ]
        for point in points
    ]  # fmt: skip
    return [head, *rows]


def moves(points: Points) -> Rows:
    """Fig. 13a."""
    batches = sorted({point["batch"] for point in points if point["batch"]})
    head = ["moves", "tokens", *(f"batches of {batch}" for batch in batches), "a link's copy", "duplicates",
            "scratch, blocks"]  # fmt: skip
    rows = []
    sizes = [point["tokens"] for point in points if not point["batch"]]

    def place(point: Mapping[str, Any]) -> tuple[str, int]:  # what went over scratch is among its tokens
        return point["kind"], min(sizes, key=lambda size: abs(size - point["tokens"]))

    for kind, tokens in dict.fromkeys(place(point) for point in points if point["batch"]):
        own = [point for point in points if point["batch"] and place(point) == (kind, tokens)]
        rates = {point["batch"]: point["tokens_per_ms"]["median"] for point in own}
        (copy,) = (p["tokens_per_ms"]["median"] for p in points if (p["kind"], p["tokens"]) == ("link", tokens))
        scratch = [str(point["batch"]) for point in own if point["scratch"]]
        rows.append([
            kind, f"{tokens:,}", *(f"{rates[batch]:,.0f}" for batch in batches), f"{copy:,.0f}",
            str(own[0]["duplicates"]), f"1 with batches of {', '.join(scratch)}" if scratch else "0",
        ])  # fmt: skip
    return [head, *rows]


def pool(points: Points) -> Rows:
    """§5.5."""
    head = ["policy", "requests", "files", "memory", "pool", "speedup over memory", "MB from the host, memory", "pool",
            "resident", "in place", "tokens a ms", "scratch, tokens"]  # fmt: skip
    rows = [
        [
            point["label"], point["stream"], *(f"{own['median'] * 1e3:,.0f}" for own in point["ttft"].values()),
            f"{point['speedup']:.2f}×", *(f"{point['copied'][place] / 1e6:.1f}" for place in ("memory", "pool")),
            f"{point['resident']:.0%}", f"{point['stayed']:.0%}",
            "–" if point["tokens_per_ms"] is None else f"{point['tokens_per_ms']['median']:,.0f}",
            f"{point['scratch']:,}",
        ]
        for point in points
    ]  # fmt: skip
    return [head, *rows]


def tree(points: Points, model: str) -> Rows:
    """Figs. 16 and 17, under both policies."""
    labels = list(dict.fromkeys(point["label"] for point in points))
    queries = {"flat": "flat", "tree": "the optimizer's tree", "extract": "extract, then judge"}
    head = [f"hay, tokens ({model})", "prompt"]
    head += [f"{name}, {label}" for label in labels for name in queries.values()]
    rows = []
    for hay in dict.fromkeys(point["hay"] for point in points):
        own = {point["label"]: point for point in points if point["hay"] == hay}
        shares = [f"{100 * own[label]['right'][query]:.0f}" for label in labels for query in queries]
        rows.append([str(hay), f"{own[labels[0]]['tokens']:,.0f}", *shares])
    return [head, *rows]


@dataclass(frozen=True)
class Table:
    """A table of the study: its results file, the list in it, and what makes rows of that."""

    file: str
    rows: Callable[[Points], Rows]
    key: str = "points"


TABLES = {
    "documents": Table("query_documents.json", documents),
    "pages": Table("query_documents.json", pages),
    "judge": Table("query_judge.json", judge),
    "moves": Table("query_moves.json", moves),
    "pool": Table("query_pool.json", pool),
    "tree": Table("query_tree.json", lambda points: tree(points, "base")),
    "tree of the judge": Table("query_tree_judge.json", lambda points: tree(points, "judge")),
}


def table_of(name: str) -> list[str]:
    """The lines of a table."""
    table = TABLES[name]
    report = json.loads((RESULTS / table.file).read_text(encoding="utf-8"))
    head, *rows = table.rows(report["results"].get(table.key, []))  # results from before there were waves have none
    return [_line(head), _line(["---"] * len(head)).replace(" ", ""), *map(_line, rows)]


def replaced(text: str, table: Sequence[str]) -> str:
    """A text with the lines of its table of this head. It has to have one."""
    lines = text.splitlines()
    start = lines.index(table[0])
    end = next((at for at in range(start, len(lines)) if not lines[at].startswith("|")), len(lines))
    return "\n".join([*lines[:start], *table, *lines[end:]]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the study")
    arguments = parser.parse_args()
    text = STUDY.read_text(encoding="utf-8")
    for name in TABLES:
        table = table_of(name)
        print(name, *table, "", sep="\n")
        text = replaced(text, table) if arguments.write else text
    if arguments.write:
        STUDY.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
