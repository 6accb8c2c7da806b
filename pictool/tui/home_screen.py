"""The first screen: the store's objects and the open traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time_ns
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static
from textual.worker import get_current_worker

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.store.store import Store
from pictool.trace.labels import short
from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.listing import SORTS, ListedObject, Listing, ago, count_links
from pictool.tui.widgets.table import Column, RowTable

REFRESH_S = 2.0
_OBJECTS = (
    Column("", 1), Column("key", 12), Column("tokens", 6, True), Column("text", 0), Column("bytes", 13, True),
    Column("hits", 5, True), Column("used", 6, True), Column("sinks", 5, True), Column("links", 5, True),
)  # fmt: skip
_SORT_OF = ("key", "key", "tokens", "text", "bytes", "hits", "used", "sinks", "links")  # by column
_TRACES = (
    Column("", 1), Column("policy", 18), Column("computed", 9, True), Column("tokens", 7, True), Column("answer", 0),
    Column("file", 24),
)  # fmt: skip


class HomeScreen(PicScreen):
    """Two tables. The store is read in a thread, and read again when it changes."""

    DEFAULT_CSS = """
    HomeScreen #store { height: 1; padding: 0 1; background: $boost; }
    HomeScreen #traces-title { height: 1; padding: 0 1; background: $boost; }
    HomeScreen #traces { height: auto; max-height: 40%; min-height: 3; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse", show=False),
        Binding("space", "mark", "mark"),
        Binding("l", "link", "link"),
        Binding("c", "compare", "compare"),
        Binding("o", "open_path", "open a trace"),
        Binding("q", "app.quit", "quit"),
    ]
    export_name = "store"

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.listing = Listing(store)
        self.listed: list[ListedObject] = []
        self.sort, self.is_reversed, self._is_reading = "key", False, False
        self.marked: set[str] = set()
        self.marked_traces: set[str] = set()

    def compose(self) -> ComposeResult:
        yield Static(id="store")
        yield SearchInput(placeholder="filter by key or text; enter: keep, escape: leave")
        yield RowTable(_OBJECTS, id="objects")
        yield Static(id="traces-title")
        yield RowTable(_TRACES, id="traces")
        yield Footer()

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
        table.show(len(self.listed), self._object_cells)
        index = next((i for i, entry in enumerate(self.listed) if entry.key == key), None)
        if index is not None:
            table.cursor = index
        self._show_title()

    def _links(self) -> dict[str, int]:
        return count_links([[chunk.key for chunk in loaded.trace.chunks] for loaded in self.pic.traces])

    def _show_title(self) -> None:
        known = [entry.stored for entry in self.listed if entry.stored is not None]
        size, num_missing = sum(stored.num_bytes for stored in known), len(self.listed) - len(known)
        total = len(self.listing.described)
        counts = f"{len(self.listed)} of {total} objects" if len(self.listed) < total else f"{total} objects"
        more = f", {num_missing} being read" if num_missing else ""
        sort = f"by {self.sort}{' (reversed)' if self.is_reversed else ''}"
        title = f"{counts}, {size:,d} bytes{more}; {sort}; store {visible(str(self.listing.store.root))}"
        self.query_one("#store", Static).update(Text(title, no_wrap=True, overflow="ellipsis"))

    def _object_cells(self, index: int) -> tuple[str, ...]:
        entry = self.listed[index]
        mark, key = "✓" if entry.key in self.marked else "", entry.key[:12]
        hits, links = "?" if entry.hits is None else str(entry.hits), str(entry.links) if entry.links else ""
        stored = entry.stored
        if stored is None:
            return (mark, key, "…", "", "", hits, "", "", links)
        use = f"{stored.num_bytes:,d}", hits, ago(stored.used_ns, time_ns())
        if stored.meta is None:
            return (mark, key, "", f"DAMAGED: {visible(stored.problem or '')}", *use, "", links)
        text = visible(" ".join(stored.text[:400].split()))
        return (mark, key, str(stored.meta.num_tokens), text, *use, str(stored.meta.sinks), links)

    def show_traces(self) -> None:
        traces = self.pic.traces
        table = self.query_one("#traces", RowTable)
        table.show(len(traces), self._trace_cells)
        table.styles.height = min(len(traces), 8) + 1
        table.display = bool(traces)
        title = f"{len(traces)} open traces" if traces else "no open trace: o opens one, l links"
        self.query_one("#traces-title", Static).update(title)

    def _trace_cells(self, index: int) -> tuple[str, ...]:
        name, trace = self.pic.traces[index].name, self.pic.traces[index].trace
        tokens = trace.report["tokens"]
        return (
            "✓" if name in self.marked_traces else "", short(trace.label, 18), f"{tokens['recomputed']:.1f}",
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
        traces.refresh()

    def action_link(self) -> None:
        self.pic.show_link([entry.key for entry in self.listed if entry.key in self.marked])

    def action_compare(self) -> None:
        """Compare the marked traces, or all."""
        marked = [loaded for loaded in self.pic.traces if loaded.name in self.marked_traces]
        self.pic.show_compare(marked or self.pic.traces)

    def action_open_path(self) -> None:
        from pictool.tui.dialogs import PathDialog

        self.app.push_screen(PathDialog("open a trace"), self.pic.open_path)

    def export_data(self) -> Sequence[Mapping[str, Any]]:
        return self.pic.services.exports.listing([entry.stored for entry in self.listed if entry.stored is not None])
