"""`pic inspect` of a query's run: its tree, and for each call what was reused and recomputed, and its trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.escapes import visible
from pictool.trace.labels import short

if TYPE_CHECKING:
    from pictool.commands.traces.options import InspectOptions
    from pictool.spans.optimise import TreeLine
    from pictool.spans.runs import CallRun, QueryRun

_COLUMNS = ("context", "computed", "reused", "TTFT ms", "answer", "trace")
_ANSWER, _MIN_NODE = 12, 20


def inspect_run(names: Sequence[str], options: InspectOptions) -> None:
    """Show a run.

    Raises:
        UsageError: beside others, or with options of what else is inspected.
        InputError: a file that is no run's.
    """
    from pictool.spans.runs import read_run

    if len(names) > 1:
        raise UsageError(f"{names[0]}: a query run must be inspected alone; specify one")
    if replace(options, as_json=False) != type(options)():
        raise UsageError(f"{names[0]}: is a query run, which supports only --json; inspect one of its traces")
    run = read_run(Path(names[0]))
    if options.as_json:
        print_json(dict(run.data))
    else:
        print_run(run)


def print_run(run: QueryRun) -> None:
    from rich.text import Text

    from pictool.commands.console.terminal import heading, open_screen, table

    screen = open_screen()
    ran = [call for call in run.calls.values() if not call.is_shared]
    context, reused = sum(call.context for call in ran), sum(call.reused for call in ran)
    is_told = all(call.is_exact is not None for call in ran)
    facts = {
        "run": str(run.path),
        "answer": run.answer if run.error is None else f"none: {run.error}",
        "calls": f"{run.num_run} were run, {len(run.calls) - run.num_run} had the answer of an equal one",
        "reused": f"{reused:,.0f} of {context:,} tokens of context ({reused / (context or 1):.0%})",
        "exact": f"{sum(call.is_exact is True for call in ran)} of {len(ran)} calls read what full recompute gives"
        if is_told else "not in the file, which is from an earlier release",
    }  # fmt: skip
    for name, value in facts.items():
        screen.print(Text(f"{name:<12} {visible(str(value))}"), overflow="fold")
    heading(screen, "the tree that ran; computed: rows of the context, mean of the layers")
    cells = [_cells(run.calls.get(node.path)) for node in run.nodes]
    others = [max(len(name), *(len(row[index]) for row in cells)) for index, name in enumerate(_COLUMNS)]
    room = max(_MIN_NODE, screen.table_width - sum(others) - 2 * len(others) - 1)
    rows = [[_node(node, room), *own] for node, own in zip(run.nodes, cells, strict=True)]
    screen.print(table(["node", *_COLUMNS], rows, left=(0, 5)))


def _node(node: TreeLine, room: int) -> str:
    """A line of the tree, whose label is cut in its middle."""
    lead, label = visible(node.lead), visible(node.label)
    left = max(6, room - len(lead))
    return lead + (
        label if len(label) <= left else f"{label[: left // 2]}..{label[len(label) - (left - 1) // 2 + 2 :]}"
    )


def _cells(call: CallRun | None) -> list[str]:
    if call is None:
        return [""] * 6
    trace = "-" if call.trace is None else call.trace.stem
    answer = short(visible(" ".join(call.answer.split())), _ANSWER)
    if call.is_shared:
        return ["", "", "shared", "", answer, trace]
    return [str(call.context), f"{call.recomputed:.1f}", f"{call.share:.0%}", f"{1e3 * call.ttft_s:.1f}", answer, trace]
