"""The object screen: header, text and attention sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pictool.escapes import visible
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.trace.labels import short
from pictool.tui.base import SearchInput
from pictool.tui.listing import SHORT, counted
from pictool.tui.text_screen import TextScreen
from pictool.tui.widgets.table import RowTable
from pictool.tui.widgets.token_text import TokensView, TokenText

if TYPE_CHECKING:
    from pictool.trace.attention_sinks import AttentionSinks

_NO_SINKS = "a asks the model what share of its attention the first tokens draw, when the chunk is read alone"
_FINGERPRINT = 18  # characters of a fingerprint that are shown
_NUM_OFFSETS = 12  # first tokens of a chunk that have a column
_BAR_WIDTH = 10


class ObjectScreen(TextScreen):
    """One object of the store. It is opened again for everything that is read, since the store may change meanwhile."""

    DEFAULT_CSS = """
    ObjectScreen TabbedContent { height: 1fr; }
    ObjectScreen TabPane { padding: 0; }
    ObjectScreen #facts { height: auto; max-height: 11; padding: 0 1; }
    ObjectScreen.-folded #facts { display: none; }
    ObjectScreen #sinks-note { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("a", "attention_sinks", "sinks")]

    def __init__(self, store: Store, key: str, title: str = "") -> None:
        """Open the object. `title` is its name for people.

        Raises:
            PicError: it was removed, or is damaged.
        """
        super().__init__()
        self.key, self._title = key, title or key[:SHORT]
        with store.peek(key) as file:
            self._facts, self._text = facts_of(file), file.text()

    def compose(self) -> ComposeResult:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(style="dim", no_wrap=True, min_width=10)
        table.add_column(overflow="fold")  # a fingerprint is one word
        for name, value in self._facts.items():
            table.add_row(name, Text(visible(value)))
        yield self.title_line(f"Object {self._title}")
        yield Static(table, id="facts")
        with TabbedContent():
            with TabPane("text", id="tab-text"):
                yield TokensView(TokenText.of_text(self._text, "source text"))
            with TabPane("attention sinks", id="tab-sinks"):
                yield Static(_NO_SINKS, id="sinks-note")
                offsets = (f">t{offset}" for offset in range(_NUM_OFFSETS))
                yield RowTable(">layer", ">head", ">first", "", ">dummies", *offsets, id="sinks")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        if (sinks := self.pic.attention_sinks.get(self.key)) is not None:
            self._show_sinks(sinks)
        self.views[0].focus()

    def action_search(self) -> None:
        self.query_one(TabbedContent).active = "tab-text"
        super().action_search()

    def action_attention_sinks(self) -> None:
        """Show the object's attention sinks; the model measures them once."""
        self.query_one(TabbedContent).active = "tab-sinks"
        if self.key not in self.pic.attention_sinks:
            job, note = self.pic.job, self.query_one("#sinks-note", Static)
            self.ask_model(lambda listener: job.attention_sinks(self.key, listener), self._show_sinks, note)

    def _show_sinks(self, sinks: AttentionSinks) -> None:
        self.pic.attention_sinks[self.key] = sinks
        from pictool.trace.attention_sinks import NUM_INITIAL

        drawn = f"the first {NUM_INITIAL} tokens draw {100 * sinks.initial_share.mean():.1f} % of the attention"
        note = f"{drawn} of the {sinks.num_rows} behind ({100 * sinks.uniform_share:.1f} if all drew alike)"
        self.query_one("#sinks-note", Static).update(note)
        self.query_one("#sinks", RowTable).show_rows(sink_rows(sinks))


def facts_of(file: ObjectFile) -> dict[str, str]:
    """Return the fields of the header."""
    meta, target = file.meta, file.meta.target
    geometry = target.geometry
    heads = f"{counted(geometry.kv_heads, 'KV head')} of {geometry.head_dim}"
    heads = ", ".join(map(str, geometry.others)) or heads
    shape = f"{counted(geometry.layers, 'layer')}, {heads}, {target.dtype}"
    return {
        "key": meta.key, "tokens": f"{meta.num_tokens} (compiled after {counted(meta.num_before, 'token')})",
        "geometry": shape, "model": f"{target.architecture} {short(target.model, _FINGERPRINT)}",
        "tokenizer": short(target.tokenizer, _FINGERPRINT),
        "size": f"{file.num_bytes:,d} bytes, {file.layer_bytes:,d} a layer, codec {meta.codec}",
        "file": str(file.path),
    }  # fmt: skip


def sink_rows(sinks: AttentionSinks) -> list[tuple[str, ...]]:
    """Return the mean of all, then every layer and head: initial tokens together, dummies, each first token."""
    initial, dummies, by_offset = sinks.initial_share, sinks.dummy_share, sinks.share_by_offset
    num_layers, num_heads = initial.shape
    rows = [("all", "", *_sink_cells(initial.mean(), dummies.mean(), by_offset.mean((0, 1))))]
    for layer in range(num_layers):
        for head in range(num_heads):
            cells = _sink_cells(initial[layer, head], dummies[layer, head], by_offset[layer, head])
            rows.append((str(layer), str(head), *cells))
    return rows


def _sink_cells(initial: float, dummies: float, by_offset: NDArray[np.float64]) -> tuple[str, ...]:
    offsets = [f"{100 * share:.1f}" for share in by_offset[:_NUM_OFFSETS]]
    bar = "█" * round(initial * _BAR_WIDTH)
    return f"{100 * initial:.1f}", bar, f"{100 * dummies:.1f}", *offsets, *[""] * (_NUM_OFFSETS - len(offsets))
