"""The query screen: the tree of a query's run; for each call what was reused and recomputed. Enter opens its trace."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static

from pictool.escapes import visible
from pictool.spans.optimise import TreeLine
from pictool.spans.query import path_text
from pictool.spans.runs import CallRun, QueryRun
from pictool.trace.labels import short
from pictool.tui.base import PicScreen
from pictool.tui.widgets.table import RowTable

_NODE_WIDTH = 24  # characters; the whole line is below the table


class QueryScreen(PicScreen):
    """A run. The cursor begins at the first line; below the table is what the line under it did."""

    DEFAULT_CSS = """
    QueryScreen #facts { height: 2; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    QueryScreen #node { height: 3; padding: 0 1; background: $boost; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "next_call(1)", "next call"),
        Binding("N", "next_call(-1)", "call before", show=False),
    ]

    def __init__(self, run: QueryRun) -> None:
        super().__init__()
        self.run = run

    def compose(self) -> ComposeResult:
        yield self.title_line(f"Run of a query: {self.run.path}")
        yield Static(_facts(self.run), id="facts")
        yield RowTable("node", ">context", ">computed", ">reused", ">TTFT ms", "answer", id="tree")
        yield Static(id="node")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        table = self.query_one("#tree", RowTable)
        table.show_rows(map(self._cells, range(len(self.run.nodes))))
        table.focus()

    def _call(self, index: int) -> CallRun | None:
        return self.run.calls.get(self.run.nodes[index].path)

    def _cells(self, index: int) -> tuple[object, ...]:
        node, call = self.run.nodes[index], self._call(index)
        line = short(node.lead + node.label, _NODE_WIDTH)
        if call is None:
            return (line, "", "", "", "", "")
        answer = " ".join(call.answer.split())
        if call.is_shared:
            return (line, "", "shared", "", "", answer)
        return (line, call.context, f"{call.recomputed:.1f}", f"{call.share:.0%}", f"{1e3 * call.ttft_s:.1f}", answer)

    def on_data_table_row_highlighted(self, event: RowTable.RowHighlighted) -> None:
        node = _node_text(self.run.nodes[event.cursor_row], self._call(event.cursor_row))
        self.query_one("#node", Static).update(node)

    def on_data_table_row_selected(self, event: RowTable.RowSelected) -> None:
        call = self._call(event.cursor_row)
        if call is None:
            self.pic.show_note("this node is no call; n goes to the next one")
        elif call.trace is None:
            self.pic.show_note("this call has no trace")
        else:
            self.pic.open_paths(call.trace)

    def action_next_call(self, by: int) -> None:
        """Move the cursor to the next call, or to the one before."""
        table, last = self.query_one("#tree", RowTable), len(self.run.nodes)
        ahead = range(table.cursor_row + 1, last) if by > 0 else range(table.cursor_row - 1, -1, -1)
        table.move_cursor(row=next((index for index in ahead if self._call(index) is not None), table.cursor_row))


def _facts(run: QueryRun) -> Text:
    ran = [call for call in run.calls.values() if not call.is_shared]
    context, reused = sum(call.context for call in ran), sum(call.reused for call in ran)
    answer = run.answer if run.error is None else f"none: {run.error}"
    lines = [
        f"answer {' '.join(str(answer).split())}",
        f"{len(ran)} calls, {len(run.calls) - len(ran)} shared; {reused:,.0f} of {context:,} tokens of context reused "
        f"({reused / (context or 1):.0%})",
    ]
    return Text("\n".join(map(visible, lines)))


def _node_text(node: TreeLine, call: CallRun | None) -> Text:
    """The line under the cursor, as long as it is."""
    lines = [node.label, path_text(node.path), "no call"]
    if call is not None:
        trace = "no trace" if call.trace is None else f"enter opens {call.trace.name}"
        shared = "; as an equal call before" if call.is_shared else ""
        lines[2] = f"{call.algo}: prompt of {call.prompt} tokens, {call.generated} generated{shared}; {trace}"
    return Text("\n".join(map(visible, lines)))
