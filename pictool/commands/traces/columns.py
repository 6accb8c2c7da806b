"""Print several traces side by side: a column each, so that a line compares them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pictool.commands.console.terminal import LabelledTable, heading, open_screen
from pictool.commands.traces.text_form import TIMES, facts_of
from pictool.escapes import visible
from pictool.trace.counts import TraceCounts
from pictool.trace.format import Trace
from pictool.trace.labels import short

_LABEL, _CELL = 16, 30
_NAMED = ("trace", "policy")  # which stand above the columns
_NUM_CANDIDATES = 5


def show_columns(
    paths: Sequence[Path], traces: Sequence[Trace], counts: Sequence[TraceCounts], sections: Sequence[str]
) -> None:
    """Show the sections header, candidates, times, parts and layers of traces, as far as they are asked for."""
    screen = open_screen()
    for number, path in enumerate(paths, 1):
        screen.print(f"{number}  {visible(str(path))}: {visible(traces[number - 1].policy)}", overflow="fold")
    tables = {
        "header": ("", _header(paths, traces)),
        "candidates": ("first token of the answer: the likeliest", _candidates(counts)),
        "times": ("times, ms", _times(traces)),
        "parts": ("computed tokens by part (mean of the layers)", _parts(counts)),
        "layers": ("computed context tokens by layer", _layers(traces, counts)),
    }
    for section in sections:
        if section in tables:
            title, rows = tables[section]
            heading(screen, title) if title else screen.print()
            grid = LabelledTable(["", *map(str, range(1, len(traces) + 1))])
            for label, *cells in rows:
                grid.add_row(label, *cells)
            screen.print(grid)


def _header(paths: Sequence[Path], traces: Sequence[Trace]) -> list[list[str]]:
    facts = [facts_of(path, trace) for path, trace in zip(paths, traces, strict=True)]
    return [[name, *(short(visible(of[name]), _CELL) for of in facts)] for name in facts[0] if name not in _NAMED]


def _candidates(counts: Sequence[TraceCounts]) -> list[list[str]]:
    return [
        [str(rank + 1), *(_candidate(of, rank) for of in counts)] for rank in range(_NUM_CANDIDATES)
    ]  # fmt: skip


def _candidate(counts: TraceCounts, rank: int) -> str:
    if rank >= len(counts.candidates):
        return ""
    token = counts.candidates[rank]
    return f"{visible(short(token.text, 12))} {token.probability:.4f}"


def _times(traces: Sequence[Trace]) -> list[list[str]]:
    fields = (("first token", "ttft_s"), *TIMES)
    return [[label, *(f"{1e3 * t.report['timing'][field]:.1f}" for t in traces)] for label, field in fields]


def _parts(counts: Sequence[TraceCounts]) -> list[list[str]]:
    """By place in the prompt, named as in the trace that has most; what is no part of a trace is blank."""
    most = max(counts, key=lambda of: len(of.parts)).parts
    rows = []
    for index, part in enumerate(most):
        name = "head" if index == 0 else "tail" if index == len(most) - 1 else f"{index} {visible(part.source)}"
        cells = (of.parts[index] if index < len(of.parts) else None for of in counts)
        rows.append([short(name, _LABEL), *(f"{c.computed:.1f} of {c.num_tokens}" if c else "" for c in cells)])
    return rows


def _layers(traces: Sequence[Trace], counts: Sequence[TraceCounts]) -> list[list[str]]:
    deepest = max(len(of.rows_per_layer) for of in counts)
    return [
        [f"layer {layer}", *_by_layer(layer, zip(traces, counts, strict=True))] for layer in range(deepest)
    ]  # fmt: skip


def _by_layer(layer: int, pairs: Iterable[tuple[Trace, TraceCounts]]) -> list[str]:
    return [
        f"{of.rows_per_layer[layer]} of {trace.layout.num_context}" if layer < len(of.rows_per_layer) else ""
        for trace, of in pairs
    ]
