"""The object view: header, checksums, text, the norms of every layer (each read and checked), and its sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pictool.errors import PicError
from pictool.store.format import ObjectFile
from pictool.store.store import Store
from pictool.trace.labels import visible
from pictool.trace.objects import LayerView, layers_of
from pictool.tui.asking import Asking
from pictool.tui.base import SearchInput
from pictool.tui.flow import Shown
from pictool.tui.sink_table import sink_columns, sink_rows, sinks_line
from pictool.tui.text_screen import TextScreen
from pictool.tui.widgets.table import Column, RowTable
from pictool.tui.widgets.tokens import TokensView

if TYPE_CHECKING:
    from pictool.trace.sinks import SinkProfile


class ObjectScreen(TextScreen):
    """One object of the store. It is opened anew for everything that is read: the store may change meanwhile."""

    DEFAULT_CSS = """
    ObjectScreen TabbedContent { height: 1fr; }
    ObjectScreen TabPane { padding: 0; }
    ObjectScreen #facts { height: auto; max-height: 11; padding: 0 1; }
    ObjectScreen #sinks-note { height: auto; padding: 0 1; }
    ObjectScreen #problem { height: auto; padding: 0 1; color: $text-error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "next_tab", "next tab"),
        Binding("a", "ask", "sinks"),
    ]
    export_name = "object"

    def __init__(self, store: Store, key: str) -> None:
        """Raises PicError: gone, or damaged."""
        super().__init__()
        self._store, self.key = store, key
        with store.peek(key) as file:
            self._facts, self._text, self._checksums = facts_of(file), file.text(), file.checksums
            self._has_dummies = file.meta.sinks > 0
        self.is_read = False
        self.asking: Asking[SinkProfile] = Asking(self, self._note, self._keep_profile, self.show_sinks)

    def compose(self) -> ComposeResult:
        yield Static(facts_table(self._facts), id="facts")
        with TabbedContent():
            with TabPane("text", id="tab-text"):
                yield TokensView(Shown.of_text(self._text, "source text"))
            with TabPane("layers", id="tab-layers"):
                yield Static(id="problem")
                yield RowTable(_LAYERS, id="layers")
            with TabPane("checksums", id="tab-checksums"):
                yield RowTable([Column("part", 10), Column("BLAKE3", 0)], id="checksums")
            with TabPane("sinks", id="tab-sinks"):
                yield Static(id="sinks-note")
                yield RowTable(sink_columns(self._has_dummies), id="sinks")
        yield SearchInput(placeholder="search; enter: next, escape: leave")
        yield Footer()

    def on_mount(self) -> None:
        rows = checksum_rows(self._checksums)
        self.query_one("#checksums", RowTable).show(len(rows), rows.__getitem__)
        self.query_one("#problem", Static).display = False
        self.show_sinks()
        self.views[0].focus()

    def action_next_tab(self) -> None:
        tabs = self.query_one(TabbedContent)
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        if event.pane.id == "tab-layers" and not self.is_read:
            self.is_read = True
            self.run_worker(partial(self._read), thread=True, group="layers")

    def _read(self) -> None:
        """In a thread: an object may be large."""
        layers: tuple[LayerView, ...] = ()
        problem = ""
        try:
            with self._store.peek(self.key) as file:
                layers = layers_of(file)
        except PicError as error:
            problem = str(error)
        self.app.call_from_thread(self._show_layers, layers, problem)

    def _show_layers(self, layers: tuple[LayerView, ...], problem: str) -> None:
        if not self.is_attached:
            return
        rows = layer_rows(layers)
        self.query_one("#layers", RowTable).show(len(rows), rows.__getitem__)
        shown = self.query_one("#problem", Static)
        shown.display = bool(problem)
        shown.update(visible(problem))

    def action_ask(self) -> None:
        """What its first tokens draw: asked of the model once."""
        self.query_one(TabbedContent).active = "tab-sinks"
        if self.key not in self.pic.profiles:
            self.asking.start(lambda listener: self.pic.services.job.sinks(self.key, listener))

    def action_back(self) -> None:
        if not self.asking.cancel():
            super().action_back()

    def _note(self, text: str) -> None:
        self.query_one("#sinks-note", Static).update(Text(text))

    def _keep_profile(self, profile: SinkProfile) -> None:
        self.pic.profiles[self.key] = profile
        self.show_sinks()

    def show_sinks(self) -> None:
        """What is known of them."""
        profile = self.pic.profiles.get(self.key)
        self._note(_ASK if profile is None else sinks_line(profile))
        rows = [] if profile is None else sink_rows(profile)
        self.query_one("#sinks", RowTable).show(len(rows), rows.__getitem__)

    def export_data(self) -> Mapping[str, Any]:
        with self._store.peek(self.key) as file:
            return self.pic.services.exports.object(file, self.pic.profiles.get(self.key))


_ASK = "a asks the model what share of its attention the first tokens draw, when the chunk is read alone"
_LAYERS = (
    Column("layer", 5, True), Column("", 1), Column("norm", 9, True), Column("first", 9, True), Column("min", 9, True),
    Column("max", 9, True),
)  # fmt: skip


def facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    """Names, and values that are broken where the line ends: a fingerprint is one word."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=10)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, Text(value))
    return table


def facts_of(file: ObjectFile) -> list[tuple[str, str]]:
    """What the header says."""
    meta, target = file.meta, file.meta.target
    geometry = target.geometry
    shape = f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, {target.dtype}"
    return [
        ("key", meta.key), ("tokens", f"{meta.num_tokens} (compiled behind {meta.sinks} dummy tokens)"),
        ("geometry", shape), ("model", f"{target.architecture} {target.model}"), ("tokenizer", target.tokenizer),
        ("size", f"{file.num_bytes:,d} bytes, {file.layer_bytes:,d} a layer, codec {meta.codec}"),
        ("file", visible(str(file.path))),
    ]  # fmt: skip


def layer_rows(layers: tuple[LayerView, ...]) -> list[tuple[str, ...]]:
    """K and V of every layer: mean norm, that of the first token, range."""
    rows: list[tuple[str, ...]] = []
    for index, layer in enumerate(layers):
        for name, part in (("K", layer.key), ("V", layer.value)):
            numbers = (part.mean_norm, part.first_norm, part.least, part.most)
            rows.append((str(index), name, *(f"{number:.4g}" for number in numbers)))
    return rows


def checksum_rows(checksums: Mapping[str, Any]) -> list[tuple[str, ...]]:
    layers = [(f"layer {index}", one) for index, one in enumerate(checksums["layers"])]
    return [*((name, str(one)) for name, one in checksums.items() if name != "layers"), *layers]
