"""The diff screen: two objects of the store, by their headers, their texts, and the distance of their KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static, TabbedContent, TabPane

from pictool.errors import PicError
from pictool.escapes import visible, visible_lines
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.trace.labels import short
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
from pictool.tui.object_screen import facts_of
from pictool.tui.widgets.table import RowTable


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

    def __init__(self, store: Store, first: str, second: str) -> None:
        """Open the objects.

        Raises:
            PicError: one was removed, or is damaged.
        """
        super().__init__()
        self._store, self.keys = store, (first, second)
        with store.peek(first) as a, store.peek(second) as b:
            self.facts = (all_facts_of(a), all_facts_of(b))
            self._texts, self.overlap = (a.text(), b.text()), token_overlap(a, b)
            self._why_not = why_not_comparable(a, b)

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with TabbedContent():
            with TabPane("header", id="tab-header"):
                yield RowTable("", "", "first", "second", id="header")
            with TabPane("text", id="tab-text"), VerticalScroll():
                yield Static(id="text")
            with TabPane("layers", id="tab-layers"):
                yield Static(id="layers-note")
                yield RowTable(">layer", ">keys", ">values", id="layers")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        names = [f"{key[:12]}  {visible(self.pic.home.name_of(key))}" for key in self.keys]
        self.query_one("#title", Static).update(Text("\n".join(names), no_wrap=True, overflow="ellipsis"))
        rows = fact_rows(*self.facts, self.overlap)
        self.query_one("#header", RowTable).show_rows(rows, lambda index: "bold" if rows[index][1] else "")
        self.query_one("#header").focus()
        self._read()

    @work(thread=True)
    def _read(self) -> None:
        """Compare texts and layers in a thread: both may be large."""
        pieces, distances, note = diff_texts(*self._texts), tuple[LayerDistance, ...](), self._why_not
        try:
            if not note:
                with self._store.peek(self.keys[0]) as a, self._store.peek(self.keys[1]) as b:
                    distances, note = layer_distances(a, b), "distance of the second from the first, ‖a − b‖ / ‖a‖"
        except PicError as error:
            note = str(error)
        rows = [(layer, f"{one.key:.4g}", f"{one.value:.4g}") for layer, one in enumerate(distances)]
        self.show_later(self._show, pieces, rows, note)

    def _show(self, pieces: list[TextPiece], rows: list[tuple[object, ...]], note: str) -> None:
        self.query_one("#text", Static).update(self._marked_text(pieces))
        self.query_one("#layers", RowTable).show_rows(rows)
        self.query_one("#layers-note", Static).update(Text(visible(note)))

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


def all_facts_of(file: ObjectFile) -> dict[str, str]:
    """Return what a header says, by field."""
    salted = "no" if file.meta.salted is None else "yes"
    return facts_of(file) | {
        "fixups": file.meta.fixups or "none", "salted": salted, "text's checksum": short(file.checksums["text"], SHORT)
    }  # fmt: skip


def fact_rows(first: Mapping[str, str], second: Mapping[str, str], overlap: TokenOverlap) -> list[tuple[str, ...]]:
    """Return the fields of both headers, ≠ where they differ; and the tokens that they have in common."""
    rows = [(name, "" if first[name] == second[name] else "≠", first[name], second[name]) for name in first]
    common = f"{overlap.at_start} at the beginning, {overlap.at_end} at the end"
    alike = ("same ids", "" if overlap.are_equal else "≠", "all" if overlap.are_equal else common, "")
    return [rows[0], alike, *rows[1:]]
