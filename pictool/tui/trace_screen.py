"""The trace view: the prompt as coloured text, a map below it, and what the model shows behind them when asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Footer, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from pictool.tui.asking import Asking
from pictool.tui.base import SearchInput
from pictool.tui.flow import Shown
from pictool.tui.shades import Choice, Shade, modes_of, shade_of
from pictool.tui.text_screen import TextScreen
from pictool.tui.trace_text import PART_COLUMNS, answer_rows, facts, layer_rows, legend, part_rows, token_line
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.table import Column, RowTable
from pictool.tui.widgets.tokens import TokensView

if TYPE_CHECKING:
    from pictool.trace.analysis import Look
    from pictool.tui.opened import Opened

_WIDTHS = (5, 6, 6, 8, 8, 7, 7, 0)


class TraceScreen(TextScreen):
    """One trace."""

    DEFAULT_CSS = """
    TraceScreen #facts { height: 2; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    TraceScreen #pickers { height: 1; }
    TraceScreen #legend { height: 1; padding: 0 1; }
    TraceScreen TokensView { padding: 0 1; }
    TraceScreen TabbedContent { height: 13; max-height: 45%; }
    TraceScreen TabPane { padding: 0; }
    TraceScreen HeatMap { height: 1fr; }
    TraceScreen #status { height: 2; padding: 0 1; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "pick('mode',1)", "show"),
        Binding("l", "pick('layer',1)", "layer"),
        Binding("L", "pick('layer',-1)", "layer before", show=False),
        Binding("h", "pick('head',1)", "head"),
        Binding("H", "pick('head',-1)", "head before", show=False),
        Binding("r", "pick('row',1)", "row", show=False),
        Binding("R", "pick('row',-1)", "row before", show=False),
        Binding("a", "ask", "ask the model"),
        Binding("A", "ask_layer", "ask the model, attention of this layer only", show=False),
        Binding("t", "next_tab", "next tab", show=False),
    ]
    export_name = "trace"

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self.opened = opened
        self.look: Look | None = None
        self.choice = Choice()
        self.shade: Shade = shade_of(opened.trace, None, self.choice)
        self.asking: Asking[Look] = Asking(self, self._note, self.set_look, self.recompute)

    def compose(self) -> ComposeResult:
        shown = Shown.of(self.opened.trace)
        yield Static(facts(self.opened.trace, self.opened.name), id="facts")
        with Horizontal(id="pickers"):
            yield Picker("show", none=None, id="mode")
            yield Picker("layer", none="all", id="layer")
            yield Picker("head", none="all", id="head")
            yield Picker("row", none="all", id="row")
        yield Static(id="legend")
        yield TokensView(shown)
        with TabbedContent():
            with TabPane("map", id="tab-map"):
                yield HeatMap(shown.starts)
            with TabPane("parts", id="tab-parts"):
                titles = zip(PART_COLUMNS, _WIDTHS, strict=True)
                yield RowTable(
                    [Column(title, width, title not in ("part", "source")) for title, width in titles], id="parts"
                )
            with TabPane("layers", id="tab-layers"):
                names = ("layer", "computed", "%", "|d(K,V)|", "|d attention|")
                yield RowTable([Column(one, max(7, len(one)), True) for one in names], id="layers")
            with TabPane("answer", id="tab-answer"):
                yield RowTable([Column("", 12), Column("", 24), Column("", 12, True)], id="answers")
        yield Static(id="status")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer()

    def on_mount(self) -> None:
        self.views[0].focus()
        self.show_all()

    def show_all(self) -> None:
        """Everything, after something was picked or the model has answered."""
        self._show_pickers()
        self.recompute()

    def _show_pickers(self) -> None:
        trace, modes = self.opened.trace, modes_of(self.opened.trace, self.look)
        is_attention = self.choice.mode in ("attention", "minmax")
        layers = range(0 if self.choice.mode == "score" else len(trace.rows))
        heads = rows = 0
        if is_attention and self.look is not None and self.look.attention is not None:
            _, heads, rows, _ = self.look.attention.scores.shape
        self.query_one("#mode", Picker).choose_from(modes, modes.index(self.choice.mode))
        self.query_one("#layer", Picker).choose_from([str(one) for one in layers], self.choice.layer)
        self.query_one("#head", Picker).choose_from([str(one) for one in range(heads)], self.choice.head)
        self.query_one("#row", Picker).choose_from([str(one) for one in range(rows)], self.choice.row)

    def recompute(self) -> None:
        """The numbers of the choice, in a thread: an average over a large map takes its time."""
        work = partial(self._compute, self.choice, self.look)
        self.run_worker(work, thread=True, exclusive=True, group="shade", exit_on_error=True)

    def _compute(self, choice: Choice, look: Look | None) -> None:
        trace = self.opened.trace
        shade = shade_of(trace, look, choice)
        parts = part_rows(trace, self.opened.view, look, choice)
        if not get_current_worker().is_cancelled:
            self.app.call_from_thread(self._show, choice, look, shade, parts)

    def _show(self, choice: Choice, look: Look | None, shade: Shade, parts: list[tuple[str, ...]]) -> None:
        if choice != self.choice or look is not self.look or not self.is_attached:
            return
        self.shade = shade
        self.views[0].set_steps(shade.steps)
        heat = self.query_one(HeatMap)
        heat.show(shade.map, shade.labels, shade.least, self._most(shade))
        heat.row = shade.row
        self.query_one("#legend", Static).update(legend(shade, not self.app.no_color))
        _fill(self.query_one("#parts", RowTable), parts)
        _fill(self.query_one("#layers", RowTable), layer_rows(self.opened.trace, self.opened.view, look))
        _fill(self.query_one("#answers", RowTable), answer_rows(self.opened.trace, self.opened.view))
        self.show_token()

    def _most(self, shade: Shade) -> float:
        """The heaviest number of the map, which may be more than that of the row or the mean that colours the text."""
        known = shade.map[np.isfinite(shade.map)]
        return float(known.max()) if len(known) and self.choice.mode != "minmax" else 1.0

    def show_token(self) -> None:
        line = token_line(self.opened.trace, self.look, self.shade, self.views[0].cursor)
        self.query_one("#status", Static).update(line, layout=False)

    def on_tokens_view_moved(self, event: TokensView.Moved) -> None:
        self.query_one(HeatMap).column = event.token
        self.show_token()

    def on_heat_map_moved(self, event: HeatMap.Moved) -> None:
        self.views[0].cursor = event.column
        if self.choice.mode in ("attention", "minmax"):
            self.set_choice(replace(self.choice, row=event.row))
        elif self.choice.mode != "score":
            self.set_choice(replace(self.choice, layer=event.row))

    def on_picker_picked(self, event: Picker.Picked) -> None:
        name = event.picker.id
        if name == "mode":
            mode = modes_of(self.opened.trace, self.look)[event.value or 0]
            self.set_choice(self._fitting(Choice(mode, self.choice.layer)))
        else:
            picked = {"layer": self.choice.layer, "head": self.choice.head, "row": self.choice.row, name: event.value}
            self.set_choice(Choice(self.choice.mode, picked["layer"], picked["head"], picked["row"]))

    def _fitting(self, choice: Choice) -> Choice:
        """Without a layer that the map of a mode does not have."""
        seen = None if self.look is None else self.look.attention
        is_missing = choice.mode in ("attention", "minmax") and seen is not None and choice.layer not in seen.layers
        return replace(choice, layer=None) if is_missing or choice.mode == "score" else choice

    def set_choice(self, choice: Choice) -> None:
        if choice != self._fitting(choice):
            self.pic.tell("the attention of this layer was not asked for; press A on it in another mode")
            choice = self._fitting(choice)
            self.call_later(self._show_pickers)
        if choice != self.choice:
            self.choice = choice
            self.show_all()

    def action_pick(self, name: str, by: int) -> None:
        picker = self.query_one(f"#{name}", Picker)
        if picker.has_class("-empty"):
            self.pic.tell(f"no {name} to choose here")
        elif name == "mode" and picker.value == len(modes_of(self.opened.trace, self.look)) - 1:
            picker.pick(0)
        else:
            picker.action_step(by)

    def action_next_tab(self) -> None:
        tabs = self.query_one(TabbedContent)
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def action_ask(self) -> None:
        self._ask(None)

    def action_ask_layer(self) -> None:
        self._ask(self.choice.layer or 0)

    def _ask(self, layer: int | None) -> None:
        trace, name, job = self.opened.trace, self.opened.name, self.pic.services.job
        self.asking.start(lambda listener: job.look(trace, name, layer, listener))

    def _note(self, text: str) -> None:
        self.query_one("#legend", Static).update(Text(text))

    def action_back(self) -> None:
        if not self.asking.cancel():
            super().action_back()

    def set_look(self, look: Look) -> None:
        """Show what the model has answered."""
        self.look = look
        layer = self.choice.layer if look.attention is None or len(look.attention.layers) > 1 else None
        self.choice = Choice("attention", layer)
        self.show_all()

    def export_data(self) -> Mapping[str, Any]:
        opened = self.opened
        return self.pic.services.exports.trace(opened.path, opened.trace, opened.view, self.look)


def _fill(table: RowTable, rows: list[tuple[str, ...]]) -> None:
    table.show(len(rows), rows.__getitem__)
