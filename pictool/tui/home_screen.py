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
from pictool.store.store import Store
from pictool.trace.labels import short, visible
from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.listing import SORTS, Listing, Row, ago, links_of
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
    """Lists; the store is read in a thread, and read again when it changes."""

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
        self.rows: list[Row] = []
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
        self.show_rows()
        self.refresh_store()
        self.set_interval(REFRESH_S, self.refresh_store)

    def refresh_store(self) -> None:
        """Read what is new, unless that goes on already."""
        if not self._is_reading:
            self._is_reading = True
            self.run_worker(self._read, thread=True, group="listing")

    def _read(self) -> None:
        worker, problem = get_current_worker(), ""
        try:
            if self.listing.refresh():
                self.app.call_from_thread(self.show_rows)
            self.listing.read_headers(
                lambda: self.app.call_from_thread(self.show_rows),
                lambda: worker.is_cancelled or not self.app.is_running,
                self.app.call_from_thread(self.seen_keys),
            )
        except (PicError, OSError) as error:
            problem = str(error)
        self.app.call_from_thread(self._read_done, problem)

    def _read_done(self, problem: str) -> None:
        self._is_reading = False
        if problem:
            self.pic.tell(problem, is_error=True)

    def _table(self) -> RowTable | None:
        """The objects' table; None while the program ends, when a thread may still ask."""
        return next(iter(self.query("#objects").results(RowTable)), None) if self.is_attached else None

    def seen_keys(self) -> list[str]:
        """Keys of the rows that are on the screen."""
        if (table := self._table()) is None:
            return []
        top = int(table.scroll_offset.y)
        return [row.key for row in self.rows[top : top + table.size.height]]

    def show_rows(self) -> None:
        """The objects as they are filtered and sorted now; the cursor stays on its object."""
        table, links = self._table(), self._links()
        if table is None:
            return
        at = self.rows[table.cursor].key if table.cursor < len(self.rows) else None
        self.rows = self.listing.rows(self.query_one(SearchInput).value, self.sort, self.is_reversed, links)
        self.marked &= self.listing.described.keys()
        table.show(len(self.rows), self._object)
        found = next((i for i, row in enumerate(self.rows) if row.key == at), None)
        if found is not None:
            table.cursor = found
        self._show_title()

    def _links(self) -> dict[str, int]:
        return links_of([[chunk.key for chunk in one.trace.chunks] for one in self.pic.traces])

    def _show_title(self) -> None:
        known = [row.found for row in self.rows if row.found is not None]
        size, waiting = sum(one.num_bytes for one in known), len(self.rows) - len(known)
        total = len(self.listing.described)
        counts = f"{len(self.rows)} of {total} objects" if len(self.rows) < total else f"{total} objects"
        more = f", {waiting} being read" if waiting else ""
        sort = f"by {self.sort}{' (reversed)' if self.is_reversed else ''}"
        title = f"{counts}, {size:,d} bytes{more}; {sort}; store {visible(str(self.listing.store.root))}"
        self.query_one("#store", Static).update(Text(title, no_wrap=True, overflow="ellipsis"))

    def _object(self, index: int) -> tuple[str, ...]:
        row = self.rows[index]
        mark = "✓" if row.key in self.marked else ""
        hits, links = "?" if row.hits is None else str(row.hits), str(row.links) if row.links else ""
        one = row.found
        if one is None:
            return (mark, row.key[:12], "…", "", "", hits, "", "", links)
        use = f"{one.num_bytes:,d}", hits, ago(one.used_ns, time_ns())
        if one.meta is None:
            return (mark, row.key[:12], "", f"DAMAGED: {visible(one.problem or '')}", *use, "", links)
        text = visible(" ".join(one.text[:400].split()))
        return (mark, row.key[:12], str(one.meta.num_tokens), text, *use, str(one.meta.sinks), links)

    def show_traces(self) -> None:
        traces = self.pic.traces
        table = self.query_one("#traces", RowTable)
        table.show(len(traces), self._trace)
        table.styles.height = min(len(traces), 8) + 1
        table.display = bool(traces)
        words = f"{len(traces)} open traces" if traces else "no open trace: o opens one, l links"
        self.query_one("#traces-title", Static).update(words)

    def _trace(self, index: int) -> tuple[str, ...]:
        one = self.pic.traces[index]
        tokens = one.trace.report["tokens"]
        return (
            "✓" if one.name in self.marked_traces else "", short(one.trace.label, 18), f"{tokens['recomputed']:.1f}",
            str(tokens["prompt"]), visible(one.trace.answer), visible(one.name),
        )  # fmt: skip

    def on_row_table_opened(self, event: RowTable.Opened) -> None:
        if event.table.id == "traces":
            self.pic.show_trace(self.pic.traces[event.row])
            return
        from pictool.tui.object_screen import ObjectScreen

        try:
            screen = ObjectScreen(self.listing.store, self.rows[event.row].key)
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
            self.show_rows()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.show_rows()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.query_one("#objects").focus()

    def action_filter(self) -> None:
        self.query_one(SearchInput).open()

    def action_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.show_rows()

    def action_reverse(self) -> None:
        self.is_reversed = not self.is_reversed
        self.show_rows()

    def action_mark(self) -> None:
        """Mark or unmark what the cursor stands on, and go on."""
        objects, traces = self.query_one("#objects", RowTable), self.query_one("#traces", RowTable)
        if traces.has_focus and traces.count:
            self.marked_traces ^= {self.pic.traces[traces.cursor].name}
            traces.action_move(1)
        elif objects.count:
            self.marked ^= {self.rows[objects.cursor].key}
            objects.action_move(1)
        objects.refresh()
        traces.refresh()

    def action_link(self) -> None:
        self.pic.show_link([row.key for row in self.rows if row.key in self.marked])

    def action_compare(self) -> None:
        """The marked traces, or all."""
        marked = [one for one in self.pic.traces if one.name in self.marked_traces]
        self.pic.show_compare(marked or self.pic.traces)

    def action_open_path(self) -> None:
        from pictool.tui.dialogs import PathDialog

        self.app.push_screen(PathDialog("open a trace"), self.pic.open_path)

    def export_data(self) -> Sequence[Mapping[str, Any]]:
        return self.pic.services.exports.listing([row.found for row in self.rows if row.found is not None])
