"""The compare view: two or more links of one prompt side by side, with one cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pictool.trace.diff import diff_traces
from pictool.trace.labels import part_at, short, visible
from pictool.tui.base import SearchInput
from pictool.tui.compare_rows import (
    POLICY_COLUMNS,
    answer_columns,
    answer_rows,
    first_columns,
    first_rows,
    jaccard_rows,
    policy_rows,
)
from pictool.tui.flow import Shown
from pictool.tui.opened import Opened
from pictool.tui.overlap_shade import overlap_counts, overlap_legend, overlap_steps
from pictool.tui.shades import Choice, Shade, shade_of
from pictool.tui.text_screen import TextScreen
from pictool.tui.trace_text import legend
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.table import Column, RowTable
from pictool.tui.widgets.tokens import TokensView

_NARROWEST = 36  # of a text beside another one
_ONE_LINE = 104  # for sliders and legend
MODES = ("computed", "overlap")  # at how many layers; by which of the links


class CompareScreen(TextScreen):
    """Every other trace is compared with the first."""

    DEFAULT_CSS = """
    CompareScreen #texts { layout: horizontal; height: 1fr; }
    CompareScreen #texts.-narrow { layout: vertical; }
    CompareScreen #texts > Vertical { width: 1fr; height: 1fr; border: round $panel-lighten-2; }
    CompareScreen #texts > Vertical { border-title-color: $text; border-subtitle-color: $text; }
    CompareScreen #texts > Vertical:focus-within { border: round $primary; }
    CompareScreen .answer { height: 1; }
    CompareScreen #top { layout: horizontal; height: 1; }
    CompareScreen #top.-narrow { layout: vertical; height: 2; }
    CompareScreen #pickers { width: 46; height: 1; }
    CompareScreen .-narrow #pickers { width: 1fr; }
    CompareScreen #legend { width: 1fr; height: 1; padding: 0 1; }
    CompareScreen TabbedContent { height: 10; max-height: 35%; }
    CompareScreen TabPane { padding: 0; }
    CompareScreen HeatMap { height: 1fr; }
    CompareScreen #status { height: 1; padding: 0 1; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "difference(1)", "next difference"),
        Binding("D", "difference(-1)", "difference before", show=False),
        Binding("m", "mode", "show"),
        Binding("l", "layer(1)", "layer"),
        Binding("L", "layer(-1)", "layer before", show=False),
        Binding("t", "next_tab", "next tab", show=False),
    ]
    export_name = "compare"

    def __init__(self, traces: Sequence[Opened]) -> None:
        """Raises TraceError: traces of different prompts or models."""
        super().__init__()
        self.opened = tuple(traces)
        first = traces[0]
        self.diffs = tuple(diff_traces(first.trace, one.trace, (first.name, one.name)) for one in traces[1:])
        self.shown_layer: int | None = None
        self.mode = MODES[0]
        self.shades: tuple[Shade, ...] = ()

    def compose(self) -> ComposeResult:
        with Container(id="top"):
            with Horizontal(id="pickers"):
                yield Picker("show", none=None, id="mode")
                yield Picker("layer", none="all", id="layer")
            yield Static(id="legend")
        with Container(id="texts"):
            for one in self.opened:
                # Generated tokens differ from link to link, so that the texts end with the prompt.
                shown = Shown.of_prompt(one.trace)
                with Vertical() as column:
                    column.border_title = Text(visible(one.trace.label))
                    yield Static(Text(visible(one.trace.answer)), classes="answer")
                    yield TokensView(shown)
        with TabbedContent():
            with TabPane("policies", id="tab-policies"):
                yield RowTable(POLICY_COLUMNS, id="policies")
            with TabPane("map", id="tab-map"):
                yield HeatMap(self.opened[0].trace.layout.starts)
            with TabPane("layers", id="tab-layers"):
                names = ["layer", *(short(one.trace.label, 16) for one in self.opened[1:])]
                yield RowTable([Column(one, max(6, len(one)), True) for one in names], id="layers")
            with TabPane("first token", id="tab-first"):
                yield RowTable(first_columns(self.opened), id="first")
            with TabPane("answers", id="tab-answers"):
                yield RowTable(answer_columns(self.opened), id="answers")
        yield Static(id="status")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer()

    def on_mount(self) -> None:
        layers = len(self.opened[0].trace.rows)
        self.query_one("#layer", Picker).choose_from([str(one) for one in range(layers)], None)
        _fill(self.query_one("#policies", RowTable), policy_rows(self.opened, self.diffs))
        _fill(self.query_one("#layers", RowTable), jaccard_rows(self.diffs))
        _fill(self.query_one("#first", RowTable), first_rows(self.opened, self.diffs))
        _fill(self.query_one("#answers", RowTable), answer_rows(self.opened))
        self.query_one("#mode", Picker).choose_from(MODES, 0)
        self.views[0].focus()
        self.show_layer()

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.query_one("#texts").set_class(event.size.width < _NARROWEST * len(self.opened), "-narrow")
        self.query_one("#top").set_class(event.size.width < _ONE_LINE, "-narrow")

    def show_layer(self) -> None:
        choice = Choice(layer=self.shown_layer)
        self.shades = tuple(shade_of(one.trace, None, choice) for one in self.opened)
        num_prompt = self.opened[0].trace.layout.num_tokens
        is_overlap = self.mode == "overlap"
        marks = overlap_steps([one.trace for one in self.opened], self.shown_layer)
        for view, shade, mark in zip(self.views, self.shades, marks, strict=True):
            view.set_steps(mark if is_overlap else shade.steps[:num_prompt])
            assert isinstance(view.parent, Vertical)
            view.parent.border_subtitle = overlap_counts(mark) if is_overlap else ""
        values = np.stack([shade.values[:num_prompt] for shade in self.shades])
        labels = [one.trace.label for one in self.opened]
        self.query_one(HeatMap).show(values, labels, 0.0, self.shades[0].most)
        self.query_one("#legend", Static).update(
            overlap_legend(not self.app.no_color) if is_overlap else legend(self.shades[0], not self.app.no_color)
        )
        self.show_token()

    def show_token(self) -> None:
        token, trace = self.views[0].cursor, self.opened[0].trace
        counts = ", ".join(f"{short(one.trace.label, 16)} {int(one.trace.rows[:, token].sum())}" for one in self.opened)
        words = f"computed at layers (of {len(trace.rows)}): {counts}"
        where = (f"{part_at(trace, token)} «{short(trace.pieces[token], 24)}»", "bold")
        self.query_one("#status", Static).update(Text.assemble(where, "  ", words), layout=False)

    def on_tokens_view_moved(self, event: TokensView.Moved) -> None:
        if event.view.cursor == event.token:  # else it has moved on meanwhile
            self._follow(event.token)

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        self._follow(event.column)

    def _follow(self, token: int) -> None:
        self.go_to(token)
        self.query_one(HeatMap).column = token
        self.show_token()

    def on_picker_picked(self, event: Picker.Picked) -> None:
        if event.picker.id == "mode":
            self.mode = MODES[event.value or 0]
        else:
            self.shown_layer = event.value
        self.show_layer()

    def action_mode(self) -> None:
        picker = self.query_one("#mode", Picker)
        picker.pick((MODES.index(self.mode) + 1) % len(MODES))

    def action_layer(self, by: int) -> None:
        self.query_one("#layer", Picker).action_step(by)

    def action_difference(self, by: int) -> None:
        """The next token that not all links computed at the same layers."""
        differs = np.zeros(self.opened[0].trace.layout.num_tokens, dtype=bool)
        for one in self.opened[1:]:
            differs |= (one.trace.rows != self.opened[0].trace.rows).any(0)
        found, at = differs.nonzero()[0], self.views[0].cursor
        behind = found[found > at] if by > 0 else found[found < at][::-1]
        if len(behind):
            self.go_to(int(behind[0]))
        else:
            self.pic.tell("no further difference")

    def action_next_tab(self) -> None:
        tabs = self.query_one(TabbedContent)
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def export_data(self) -> Sequence[Mapping[str, Any]]:
        first, to_json = self.opened[0], self.pic.services.exports.diff
        return [to_json((first.name, one.name), first.trace, one.trace) for one in self.opened[1:]]


def _fill(table: RowTable, rows: Sequence[tuple[str, ...]]) -> None:
    table.show(len(rows), rows.__getitem__)
