"""The diff screen: two objects of the store, by their headers, their texts, and the distance of their KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static, TabbedContent, TabPane

from pictool.errors import PicError
from pictool.escapes import visible, visible_lines
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.trace.object_diff import (
    LayerDistance,
    TextPiece,
    TokenOverlap,
    diff_texts,
    layer_distances,
    token_overlap,
    why_not_comparable,
)
from pictool.tui.base import PicScreen
from pictool.tui.listing import SHORT
from pictool.tui.widgets.key_footer import KeyFooter
from pictool.tui.widgets.table import Column, RowTable

_FACT_COLUMNS = (Column("", 15), Column("", 1), Column("first", 20), Column("second", 0))
_LAYER_COLUMNS = (Column("layer", 5, True), Column("keys", 9, True), Column("values", 9, True))


class ObjectDiffScreen(PicScreen):
    """Compares the second object with the first. Both are opened again for what is read later."""

    DEFAULT_CSS = """
    ObjectDiffScreen #title { height: 2; padding: 0 1; background: $boost; }
    ObjectDiffScreen TabbedContent { height: 1fr; }
    ObjectDiffScreen TabPane { padding: 0; }
    ObjectDiffScreen #text { padding: 0 1; }
    ObjectDiffScreen #layers-note { height: auto; padding: 0 1; }
    ObjectDiffScreen .removed { color: $text-error; }
    ObjectDiffScreen .added { color: $text-success; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("t", "next_tab", "tab")]
    export_name = "object-diff"

    def __init__(self, store: Store, first: str, second: str) -> None:
        """Open the objects.

        Raises:
            PicError: one was removed, or is damaged.
        """
        super().__init__()
        self._store, self.keys = store, (first, second)
        with store.peek(first) as a, store.peek(second) as b:
            self.facts = (facts_of(a), facts_of(b))
            self._texts, self.overlap = (a.text(), b.text()), token_overlap(a, b)
            self._why_not = why_not_comparable(a, b)
        self.pieces: list[TextPiece] = []
        self.distances: tuple[LayerDistance, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with TabbedContent():
            with TabPane("header", id="tab-header"):
                yield RowTable(_FACT_COLUMNS, id="header")
            with TabPane("text", id="tab-text"), VerticalScroll():
                yield Static(id="text")
            with TabPane("layers", id="tab-layers"):
                yield Static(id="layers-note")
                yield RowTable(_LAYER_COLUMNS, id="layers")
        yield KeyFooter()

    def on_mount(self) -> None:
        names = [f"{key[:12]}  {visible(self.pic.name_of(key))}" for key in self.keys]
        self.query_one("#title", Static).update(Text("\n".join(names), no_wrap=True, overflow="ellipsis"))
        rows = fact_rows(*self.facts, self.overlap)
        self.query_one("#header", RowTable).show_rows(rows, lambda index: bool(rows[index][1]))
        self.query_one("#header").focus()
        self._note_layers(self._why_not or "reading all layers …")
        self.run_worker(self._read, thread=True, group="diff")

    def _read(self) -> None:
        """Compare texts and layers in a thread: both may be large."""
        pieces, distances, problem = diff_texts(*self._texts), tuple[LayerDistance, ...](), self._why_not
        try:
            if not problem:
                with self._store.peek(self.keys[0]) as a, self._store.peek(self.keys[1]) as b:
                    distances = layer_distances(a, b)
        except PicError as error:
            problem = str(error)
        self.app.call_from_thread(self._show, pieces, distances, problem)

    def _show(self, pieces: list[TextPiece], distances: tuple[LayerDistance, ...], problem: str) -> None:
        if not self.is_attached:
            return
        self.pieces, self.distances = pieces, distances
        self.query_one("#text", Static).update(self._marked_text(pieces))
        rows = [(str(layer), f"{one.key:.4g}", f"{one.value:.4g}") for layer, one in enumerate(distances)]
        self.query_one("#layers", RowTable).show_rows(rows)
        self._note_layers(problem or "distance of the second from the first, ‖a − b‖ / ‖a‖")

    def _note_layers(self, text: str) -> None:
        self.query_one("#layers-note", Static).update(Text(visible(text)))

    def _marked_text(self, pieces: Sequence[TextPiece]) -> Text:
        """Return both texts as one: [-only in the first-], {+only in the second+}."""
        variables = self.app.theme_variables
        styles = {"-": f"strike {variables['text-error']}", "+": f"underline {variables['text-success']}", "=": ""}
        if self.app.no_color:
            styles = {"-": "strike", "+": "underline", "=": ""}
        forms = {"-": "[-{}-]", "+": "{{+{}+}}", "=": "{}"}
        text = Text()
        for piece in pieces:
            text.append(forms[piece.where].format(visible_lines(piece.text)), style=styles[piece.where])
        return text if len(pieces) > 1 else Text("the texts are the same\n\n", style="dim").append(text)

    def action_next_tab(self) -> None:
        tabs = self.query_one(TabbedContent)
        names = [str(pane.id) for pane in tabs.query(TabPane)]
        tabs.active = names[(names.index(tabs.active) + 1) % len(names)]

    def export_data(self) -> Mapping[str, Any]:
        return {
            "keys": list(self.keys), "header": [dict(facts) for facts in self.facts],
            "tokens": {"at_start": self.overlap.at_start, "at_end": self.overlap.at_end},
            "text": [{"where": piece.where, "text": piece.text} for piece in self.pieces],
            "layers": [{"key": layer.key, "value": layer.value} for layer in self.distances],
        }  # fmt: skip


def facts_of(file: ObjectFile) -> dict[str, str]:
    """Return what a header says, by field."""
    meta, target = file.meta, file.meta.target
    geometry = target.geometry
    shape = [geometry.layers, *(geometry.others or (geometry.kv_heads, geometry.head_dim))]
    return {
        "tokens": str(meta.num_tokens), "model": f"{target.architecture} {target.model[:SHORT]}",
        "tokenizer": target.tokenizer[:SHORT],
        "geometry": " × ".join(map(str, shape)), "dtype": target.dtype,
        "codec": meta.codec, "dummy tokens": str(meta.sinks), "fixups": meta.fixups or "none",
        "salted": "no" if meta.salted is None else "yes", "size": f"{file.num_bytes:,d} bytes",
        "text's checksum": file.checksums["text"][:SHORT],
    }  # fmt: skip


def fact_rows(first: Mapping[str, str], second: Mapping[str, str], overlap: TokenOverlap) -> list[tuple[str, ...]]:
    """Return the fields of both headers, ≠ where they differ; and the tokens that they have in common."""
    rows = [(name, "" if first[name] == second[name] else "≠", first[name], second[name]) for name in first]
    common = f"{overlap.at_start} at the beginning, {overlap.at_end} at the end"
    alike = ("same ids", "" if overlap.are_equal else "≠", "all" if overlap.are_equal else common, "")
    return [tuple(visible(cell) for cell in row) for row in (rows[0], alike, *rows[1:])]
