"""The first screen: the store's objects and the open traces."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.store.store import Store
from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.listing import (
    SHORT,
    SORTS,
    ListedObject,
    Listing,
    ago,
    count_links,
    counted,
    readable,
    short_keys,
)
from pictool.tui.object_upkeep import ObjectUpkeep
from pictool.tui.widgets.key_footer import KeyFooter
from pictool.tui.widgets.table import Column, RowTable

REFRESH_S = 2.0
_OBJECTS = (
    Column("", 2), Column("key", SHORT), Column("tokens", 6, True), Column("text", 0), Column("size", 7, True),
    Column("hits", 4, True), Column("used", 6, True), Column("dummy", 5, True), Column("links", 5, True),
)  # fmt: skip
_SORT_OF = ("key", "key", "tokens", "text", "size", "hits", "used", "dummy", "links")  # by column
_TRACES = (
    Column("", 1), Column("policy", 18), Column("computed", 8, True), Column("tokens", 6, True), Column("answer", 0),
    Column("file", 16),
)  # fmt: skip
EMPTY = """\
There is no object here yet.

  pic compile FILE… --store {store}
      compiles documents, on a command line; they appear here
  l   links documents: what is not compiled is compiled first
  o   opens a trace, the file that pic link --trace writes
  ?   lists all keys"""
_MIN_FOR_PREVIEW = 18  # lines of a terminal


class HomeScreen(PicScreen):
    """Two tables. The store is read in a thread, and read again when it changes."""

    DEFAULT_CSS = """
    HomeScreen #store { height: 1; padding: 0 1; background: $boost; }
    HomeScreen #traces-title { height: 1; padding: 0 1; background: $boost; }
    HomeScreen #traces { height: auto; max-height: 30%; min-height: 3; }
    HomeScreen #preview { height: 4; padding: 0 1; border-top: solid $panel-lighten-2; }
    HomeScreen.-tall #preview { height: 7; }
    HomeScreen.-folded #preview, HomeScreen.-bare #preview { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("space", "mark", "mark"),
        Binding("l", "link", "link"),
        Binding("c", "compare", "compare"),
        Binding("x,delete", "delete", "delete"),
        Binding("p", "pin", "pin"),
        Binding("v", "verify(False)", "verify"),
        Binding("d", "diff", "diff"),
        Binding("o", "open_path", "open a trace"),
        Binding("s", "sort", "sort"),
        Binding("f", "fold", "fold"),
        Binding("V", "verify(True)", "verify all", show=False),
        Binding("S", "reverse", "reverse", show=False),
        Binding("q", "app.quit", "quit"),
        Binding("escape", "cancel", "end verifying; else unmark all", show=False),
    ]
    export_name = "store"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.listing = Listing(store)
        self.listed: list[ListedObject] = []
        self.sort, self.is_reversed, self._is_reading = "key", False, False
        self.marked: set[str] = set()
        self.marked_traces: set[str] = set()
        self._note = ""
        self.upkeep = ObjectUpkeep(
            self, store, lambda entry: self.pic.object_name(entry.key, entry.stored), self._set_note,
            self.refresh_store, self._set_verified,
        )  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Static(id="store")
        yield SearchInput(placeholder="filter by key, file or text; enter: keep, escape: leave")
        yield RowTable(_OBJECTS, can_open=True, id="objects")
        yield Static(id="preview")
        yield Static(id="traces-title")
        yield RowTable(_TRACES, can_open=True, id="traces")
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#objects").focus()
        self.show_traces()
        self.show_objects()
        self.refresh_store()
        self.set_interval(REFRESH_S, self.refresh_store)

    def refresh_store(self) -> None:
        """Read what is new in the store, unless a thread is reading already."""
        if not self._is_reading:
            self._is_reading = True
            self.run_worker(self._read, thread=True, group="listing")

    def _read(self) -> None:
        worker, problem = get_current_worker(), ""
        try:
            if self.listing.refresh():
                self.app.call_from_thread(self.show_objects)
            self.listing.read_headers(
                lambda: self.app.call_from_thread(self.show_objects),
                lambda: worker.is_cancelled or not self.app.is_running,
                self.app.call_from_thread(self.visible_keys),
            )
        except (PicError, OSError) as error:
            problem = str(error)
        self.app.call_from_thread(self._read_done, problem)

    def _read_done(self, problem: str) -> None:
        self._is_reading = False
        if problem:
            self.pic.tell(problem, is_error=True)

    def _table(self) -> RowTable | None:
        """The objects' table; None while the program ends, when a thread may still call this."""
        return next(iter(self.query("#objects").results(RowTable)), None) if self.is_attached else None

    def visible_keys(self) -> list[str]:
        """Return the keys of the objects that are on the screen."""
        if (table := self._table()) is None:
            return []
        top = int(table.scroll_offset.y)
        return [entry.key for entry in self.listed[top : top + table.size.height]]

    def show_objects(self) -> None:
        """Filter and sort the objects and show them; the cursor stays on its object."""
        table, links = self._table(), self._links()
        if table is None:
            return
        key = self.listed[table.cursor].key if table.cursor < len(self.listed) else None
        self.listed = self.listing.objects(self.query_one(SearchInput).value, self.sort, self.is_reversed, links)
        self.marked &= self.listing.described.keys()
        table.show(len(self.listed), self._object_cells, lambda index: bool(self.listed[index].problem), self._empty())
        index = next((i for i, entry in enumerate(self.listed) if entry.key == key), None)
        if index is not None:
            table.cursor = index
        self._show_title()
        self._show_preview()

    def _empty(self) -> str:
        """What to do where no object is listed."""
        if self.listing.described and (text := self.query_one(SearchInput).value):
            return f"No key, file or text contains {visible(text)!r}. Escape leaves the filter: / and escape."
        return EMPTY.format(store=visible(shlex.quote(str(self.listing.store.root))))

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height >= 2 * _MIN_FOR_PREVIEW, "-tall")
        self._show_preview()

    def on_row_table_moved(self, event: RowTable.Moved) -> None:
        if event.table.id == "objects":
            self._show_preview()

    def _show_preview(self) -> None:
        """Show what the object under the cursor is, and the beginning of its text."""
        index, pane = self.query_one("#objects", RowTable).cursor, self.query_one("#preview", Static)
        has_room = index < len(self.listed) and self.size.height >= _MIN_FOR_PREVIEW
        self.set_class(not has_room, "-bare")
        if has_room:
            entry = self.listed[index]
            known = self.listing.sources.get(entry.key)
            model = None if known is None else known.model
            pane.update(preview(entry, self.pic.source_of(entry.key), model), layout=False)

    def _set_note(self, text: str) -> None:
        self._note = text
        if self.is_attached:
            self._show_title()

    def _set_verified(self, found: Mapping[str, str]) -> None:
        self.listing.set_verified(found)
        self.show_objects()

    def _links(self) -> dict[str, int]:
        return count_links([[chunk.key for chunk in loaded.trace.chunks if chunk.key] for loaded in self.pic.traces])

    def _show_title(self) -> None:
        known = [entry.stored for entry in self.listed if entry.stored is not None]
        size, num_missing = sum(stored.num_bytes for stored in known), len(self.listed) - len(known)
        total = self.listing.num_objects
        counts = f"{len(self.listed)} of {total} objects" if len(self.listed) < total else counted(total, "object")
        more = f", {num_missing} being read" if num_missing else ""
        marked = f", {len(self.marked)} marked" if self.marked else ""
        sort = f"by {self.sort}{' (reversed)' if self.is_reversed else ''}"
        where = visible(str(self.listing.store.root))
        title = self._note or f"{counts}, {readable(size)}{more}{marked}; {sort}; store {where}"
        self.query_one("#store", Static).update(Text(title, no_wrap=True, overflow="ellipsis"))

    def _object_cells(self, index: int) -> tuple[str, ...]:
        entry = self.listed[index]
        mark = f"{'✓' if entry.key in self.marked else ' '}{'P' if entry.is_pinned else ' '}"
        key, hits, links = entry.key[:SHORT], "?" if entry.hits is None else str(entry.hits), str(entry.links or "")
        stored = entry.stored
        if stored is None:
            return (mark, key, "…", "", "", hits, "", "", links)
        use = readable(stored.num_bytes), hits, ago(stored.used_ns, time_ns())
        if entry.problem or stored.meta is None:
            why = entry.problem.removeprefix(f"{stored.path}: ")
            return (mark, key, "", f"DAMAGED: {visible(why)}", *use, "", links)
        source = self.listing.sources.get(entry.key)
        named = "" if source is None else f"{Path(source.source).name}: "
        text = visible(named + " ".join(stored.text[:400].split()))
        return (mark, key, str(stored.meta.num_tokens), text, *use, str(stored.meta.sinks), links)

    def show_traces(self) -> None:
        traces = self.pic.traces
        table = self.query_one("#traces", RowTable)
        table.show_rows([self._trace_cells(index) for index in range(len(traces))])
        table.styles.height = min(len(traces), 8) + 1
        table.display = bool(traces)
        title = f"{counted(len(traces), 'open trace')}" if traces else "no open trace: o opens one, l links"
        self.query_one("#traces-title", Static).update(title)

    def _trace_cells(self, index: int) -> tuple[str, ...]:
        name, trace = self.pic.traces[index].name, self.pic.traces[index].trace
        tokens = trace.report["tokens"]
        return (
            "✓" if name in self.marked_traces else "", visible(trace.label), f"{tokens['recomputed']:.1f}",
            str(tokens["prompt"]), visible(trace.answer), visible(name),
        )  # fmt: skip

    def on_row_table_selected(self, event: RowTable.Selected) -> None:
        if event.table.id == "traces":
            self.pic.show_trace(self.pic.traces[event.row])
            return
        from pictool.tui.object_screen import ObjectScreen

        try:
            screen = ObjectScreen(self.listing.store, self.listed[event.row].key)
        except PicError as error:
            self.pic.tell_error(error)
            self.refresh_store()
        else:
            self.app.push_screen(screen)

    def on_row_table_header_clicked(self, event: RowTable.HeaderClicked) -> None:
        if event.table.id == "objects":
            sort = _SORT_OF[event.column]
            self.is_reversed = sort == self.sort and not self.is_reversed
            self.sort = sort
            self.show_objects()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.show_objects()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.query_one("#objects").focus()

    def action_filter(self) -> None:
        self.query_one(SearchInput).open()

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.show_objects()

    def action_reverse(self) -> None:
        self.is_reversed = not self.is_reversed
        self.show_objects()

    def action_mark(self) -> None:
        """Mark or unmark the object or trace under the cursor, and move to the next one."""
        objects, traces = self.query_one("#objects", RowTable), self.query_one("#traces", RowTable)
        if traces.has_focus and traces.count:
            self.marked_traces ^= {self.pic.traces[traces.cursor].name}
            traces.action_move(1)
        elif objects.count:
            self.marked ^= {self.listed[objects.cursor].key}
            objects.action_move(1)
        objects.refresh()
        self.show_traces()
        self._show_title()

    def _chosen(self) -> list[ListedObject]:
        """The marked objects that are listed; else the one under the cursor."""
        marked = [entry for entry in self.listed if entry.key in self.marked]
        return marked or self._under_cursor()

    def _under_cursor(self) -> list[ListedObject]:
        """The object under the cursor; none while the traces have the focus."""
        if self.query_one("#traces").has_focus:
            return []
        return self.listed[self.query_one("#objects", RowTable).cursor :][:1]

    def action_link(self) -> None:
        keys = [entry.key for entry in self._chosen()]
        self.pic.show_link(short_keys(keys, list(self.listing.described)))

    def action_delete(self) -> None:
        self.upkeep.delete(self._chosen())

    def action_pin(self) -> None:
        self.upkeep.toggle_pins(self._chosen())

    def action_verify(self, is_all: bool) -> None:
        self.upkeep.verify(self.listed if is_all else self._chosen())

    def action_cancel(self) -> None:
        """End what runs; if nothing does, unmark everything."""
        if not self.upkeep.cancel():
            self.marked.clear()
            self.marked_traces.clear()
            self.show_traces()
            self.show_objects()

    def action_fold(self) -> None:
        self.toggle_class("-folded")

    def action_diff(self) -> None:
        """Compare the two marked objects, or the marked one with the one under the cursor."""
        marked = [entry.key for entry in self.listed if entry.key in self.marked]
        under = [entry.key for entry in self._under_cursor()]
        keys = list(dict.fromkeys(marked if len(marked) > 1 else marked + under))
        if len(keys) != 2:
            self.pic.tell("mark two objects (space) to compare them")
            return
        self.pic.show_object_diff(self.listing.store, *keys)

    def action_compare(self) -> None:
        """Compare the marked traces, or all."""
        marked = [loaded for loaded in self.pic.traces if loaded.name in self.marked_traces]
        self.pic.show_compare(marked or self.pic.traces)

    def action_open_path(self) -> None:
        from pictool.tui.dialogs import PathDialog

        self.app.push_screen(PathDialog("open a trace", choices=self.pic.trace_files()), self.pic.open_path)

    def export_data(self) -> Sequence[Mapping[str, Any]]:
        stored = [entry.stored for entry in self.listed if entry.stored is not None]
        return self.pic.services.exports.listing(self.listing.store, stored)


def preview(entry: ListedObject, source: str | None, model: str | None) -> Text:
    """Return what an object is and came from, on a line, and the beginning of its text or its problem below."""
    facts = [entry.key[:SHORT]] + ([] if source is None else [visible(source)])
    if entry.stored is not None and entry.stored.meta is not None:
        meta = entry.stored.meta
        facts += [visible(model or meta.target.architecture), meta.target.dtype, f"codec {meta.codec}"]
        facts += ["table of fixups"] if meta.fixups else []
    facts += ["pinned"] if entry.is_pinned else []
    words = entry.problem or ("" if entry.stored is None else " ".join(entry.stored.text.split()))
    return Text.assemble(("  ".join(facts), "dim"), "\n", visible(words))
