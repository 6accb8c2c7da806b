"""The first screen: the store's objects and the open traces."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar

from rich.filesize import decimal
from rich.markup import escape
from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Footer, Input, Static

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.store.eviction import pinned
from pictool.store.store import Store, StoredObject
from pictool.tui.base import PicScreen, SearchInput
from pictool.tui.listing import SHORT, Listing, counted, short_keys
from pictool.tui.services import is_run_path
from pictool.tui.widgets.table import RowTable

REFRESH_S = 2.0
_MOST_ROWS = 500  # of a table, which is drawn as a whole; the filter finds the others
_MOST_NAMED = 6  # objects that a question names
_TITLES = ("", "key", ">tokens", "text", ">size", ">hits", ">used", ">before", ">links")
_TEXT = _TITLES.index("text")
_OTHERS = 70  # width of the other columns and a scroll bar
_MIN_TEXT = 36  # width of the texts; where they leave too little, the columns on the right are scrolled to
_SORTS = [title.removeprefix(">") for title in _TITLES[1:]]
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
    HomeScreen #empty { height: 1fr; padding: 0 1; }
    HomeScreen #traces-title { height: 1; padding: 0 1; background: $boost; }
    HomeScreen #traces { height: auto; max-height: 30%; }
    HomeScreen #preview { height: 4; padding: 0 1; border-top: solid $foreground 30%; }
    HomeScreen.-tall #preview { height: 7; }
    HomeScreen.-folded #preview, HomeScreen.-low #preview { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("space", "mark", "mark"),
        Binding("l", "link", "link"),
        Binding("c", "compare", "compare"),
        Binding("x,delete", "delete", "delete", show=False),
        Binding("p", "pin", "pin", show=False),
        Binding("o", "open_path", "open trace"),
        Binding("s", "sort", "sort", show=False),
        Binding("f", "fold", "fold", show=False),
        Binding("q", "app.quit", "quit"),
        Binding("escape", "cancel", "unmark all", show=False),
    ]

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.listing = store, Listing()
        self.listed: list[StoredObject] = []
        self.sort = "key"
        self.marked: set[str] = set()
        self.marked_traces: set[str] = set()
        self._stamp: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield self.title_line("reading the store …")
        yield SearchInput(placeholder="filter by key, file or text; enter: keep, escape: leave")
        yield RowTable(*_TITLES, id="objects")
        yield Static(id="empty")
        yield Static(id="preview")
        yield Static(id="traces-title")
        yield RowTable("", "policy", ">computed", ">tokens", "answer", "file", id="traces")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.objects, self.traces = self.query_one("#objects", RowTable), self.query_one("#traces", RowTable)
        self.objects.focus()
        self.show_traces()
        self.refresh_store()
        self.set_interval(REFRESH_S, self.refresh_store)

    @work(thread=True, exclusive=True, group="listing")
    def refresh_store(self) -> None:
        """Read the store again if it was changed or used."""
        store = self.store
        try:
            stamp = (store.stamp(), store.use_stamp(), pinned(store.root))
            if stamp != self._stamp:
                self.show_later(self._show_listing, Listing.read(store), stamp)
        except (PicError, OSError) as error:
            self.show_later(self.pic.show_note, str(error))

    def _show_listing(self, listing: Listing, stamp: tuple[object, ...]) -> None:
        self.listing, self._stamp = listing, stamp
        self.marked &= listing.objects.keys()
        self.show_objects()

    def show_objects(self) -> None:
        """Filter and sort the objects and show them; the cursor stays on its object."""
        under = [stored.key for stored in self._under_cursor()]
        links = Counter(key for one in self.pic.traces for key in {chunk.key for chunk in one.trace.chunks})
        self.listed = self.listing.find(self.query_one(SearchInput).value, self.sort, links)
        rows = [
            self.listing.cells(stored, links[stored.key], stored.key in self.marked)
            for stored in islice(self.listed, _MOST_ROWS)
        ]
        self.objects.show_rows(rows, lambda row: "red" if self.listed[row].problem else "")
        keys = [stored.key for stored in self.listed[:_MOST_ROWS]]
        if under and under[0] in keys:
            self.objects.move_cursor(row=keys.index(under[0]))
        self.objects.styles.height, self.query_one("#empty").display = "1fr" if rows else 1, not rows
        empty = EMPTY.format(store=visible(shlex.quote(str(self.store.root))))
        if self.listing.objects:
            empty = f"No key, file or text contains {visible(self.query_one(SearchInput).value)!r}."
        self.query_one("#empty", Static).update(Text(empty))
        total, size = len(self.listing.objects), decimal(sum(stored.num_bytes for stored in self.listed))
        counts = counted(total, "object") if len(self.listed) == total else f"{len(self.listed)} of {total} objects"
        shown = f", the first {_MOST_ROWS} shown" if len(self.listed) > _MOST_ROWS else ""
        marked = f", {len(self.marked)} marked" if self.marked else ""
        title = f"Store {self.store.root}: {counts}, {size}{shown}{marked}; sorted by {self.sort}"
        self.query_one("#title", Static).update(Text(visible(title), no_wrap=True, overflow="ellipsis"))
        self._show_preview()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height >= 2 * _MIN_FOR_PREVIEW, "-tall")
        self.set_class(event.size.height < _MIN_FOR_PREVIEW, "-low")
        self.objects.set_width(_TEXT, max(_MIN_TEXT, event.size.width - _OTHERS))
        self.show_objects()

    def on_data_table_row_highlighted(self, event: RowTable.RowHighlighted) -> None:
        if event.data_table is self.objects:
            self._show_preview()

    def _show_preview(self) -> None:
        """Show what the object under the cursor is, and the beginning of its text or its problem."""
        text = Text()
        for stored in self.listed[self.objects.cursor_row :][:1]:
            key, meta, known = stored.key, stored.meta, self.listing.sources.get(stored.key)
            facts = [key[:SHORT], self.source_of(key) or ""]
            if meta is not None:
                facts += [known.model if known else meta.target.architecture, meta.target.dtype]
                facts += [f"codec {meta.codec}"] if meta.codec != "none" else []
                facts.append("pinned" if key in self.listing.pins else "")
            words = stored.problem or " ".join(stored.text.split())
            text = Text.assemble((visible("  ".join(filter(None, facts))), "dim"), "\n", visible(words))
        self.query_one("#preview", Static).update(text, layout=False)

    def show_traces(self) -> None:
        traces, rows = self.pic.traces, []
        for loaded in traces:
            trace, tokens = loaded.trace, loaded.trace.report["tokens"]
            mark = "✓" if loaded.name in self.marked_traces else ""
            rows.append((mark, trace.label, f"{tokens['recomputed']:.1f}", tokens["prompt"], trace.answer, loaded.name))
        self.traces.show_rows(rows)
        self.traces.display = bool(traces)
        title = counted(len(traces), "open trace") if traces else "no open trace: o opens one, l links"
        self.query_one("#traces-title", Static).update(title)

    def source_of(self, key: str) -> str | None:
        """The document that an object came from, as far as the store or an open trace tells."""
        if key in self.listing.sources:
            return self.listing.sources[key].source
        chunks = (chunk for loaded in self.pic.traces for chunk in loaded.trace.chunks)
        return next((chunk.source for chunk in chunks if chunk.key == key), None)

    def on_data_table_row_selected(self, event: RowTable.RowSelected) -> None:
        if event.data_table is self.traces:
            self.pic.show_traces([self.pic.traces[event.cursor_row]])
            return
        from pictool.tui.object_screen import ObjectScreen

        key = self.listed[event.cursor_row].key
        name = self.listing.name(key, self.source_of(key))
        self.pic.try_to_show(lambda: ObjectScreen(self.store, key, name))
        self.refresh_store()

    def on_data_table_header_selected(self, event: RowTable.HeaderSelected) -> None:
        if event.data_table is self.objects and event.column_index:
            self.sort = _SORTS[event.column_index - 1]
            self.show_objects()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.show_objects()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.objects.focus()

    def action_filter(self) -> None:
        self.query_one(SearchInput).open()

    def action_sort(self) -> None:
        self.sort = _SORTS[(_SORTS.index(self.sort) + 1) % len(_SORTS)]
        self.show_objects()

    def action_mark(self) -> None:
        """Mark or unmark the object or trace under the cursor, and move to the next one."""
        if self.traces.has_focus:
            self.marked_traces ^= {self.pic.traces[self.traces.cursor_row].name}
            self.show_traces()
            self.traces.action_cursor_down()
        else:
            self.marked ^= {stored.key for stored in self._under_cursor()}
            self.show_objects()
            self.objects.action_cursor_down()

    def _chosen(self) -> list[str]:
        """The marked objects that are listed; else the one under the cursor."""
        listed = [stored.key for stored in self.listed]
        return [key for key in listed if key in self.marked] or [stored.key for stored in self._under_cursor()]

    def _under_cursor(self) -> list[StoredObject]:
        """The object under the cursor; none while the traces have the focus."""
        return [] if self.traces.has_focus else self.listed[self.objects.cursor_row :][:1]

    def action_link(self) -> None:
        from pictool.tui.link_screen import LinkScreen

        self.app.push_screen(LinkScreen(short_keys(self._chosen(), list(self.listing.objects))))

    def action_delete(self) -> None:
        """Ask, then remove the chosen objects; pinned ones stay."""
        from pictool.store.upkeep import expire

        keys = [key for key in self._chosen() if key not in self.listing.pins]
        if not keys:
            self.pic.show_note("no object to delete; pinned ones stay")
            return
        size = decimal(sum(self.listing.objects[key].num_bytes for key in keys))
        names = [f"{key[:SHORT]}  {self.listing.name(key, self.source_of(key))}" for key in keys[:_MOST_NAMED]]
        names += [f"and {len(keys) - _MOST_NAMED} more"] * (len(keys) > _MOST_NAMED)

        def delete() -> str:
            return f"deleted {counted(expire(self.store, keys).count, 'object')}; what is used meanwhile stays"

        question = f"Delete {counted(len(keys), 'object')}, {size}? Links compile their texts again."
        self.ask(question, "delete", partial(self._run, delete), names)

    def action_pin(self) -> None:
        """Pin the chosen objects, so that they are neither evicted nor deleted; unpin them if all are pinned."""
        from pictool.store.upkeep import pin, unpin

        keys = self._chosen()
        change, verb = (unpin, "unpinned") if self.listing.pins.issuperset(keys) else (pin, "pinned")

        def change_all() -> str:
            for key in keys:
                change(self.store, key)
            return f"{verb} {counted(len(keys), 'object')}"

        self._run(change_all)

    @work(thread=True, exclusive=True, group="upkeep")
    def _run(self, task: Callable[[], str]) -> None:
        """Run a task in a thread, in place of the one before; it returns what is said then."""
        try:
            said = task()
        except PicError as error:
            said = str(error)
        self._stamp = ()
        self.show_later(self.pic.show_note, said)
        self.show_later(self.refresh_store)

    def action_cancel(self) -> None:
        """Close the help, and unmark everything."""
        self.action_back()
        self.marked.clear()
        self.marked_traces.clear()
        self.show_traces()
        self.show_objects()

    def action_fold(self) -> None:
        self.toggle_class("-folded")

    def action_compare(self) -> None:
        """Compare the marked traces, or all."""
        traces = [loaded for loaded in self.pic.traces if loaded.name in self.marked_traces] or self.pic.traces
        if len(traces) < 2:
            self.pic.show_note("open two traces of one prompt to compare them (o)")
        else:
            self.pic.show_traces(traces)

    def action_open_path(self) -> None:
        """Choose from the traces and runs of queries in the working directory, the newest first."""
        paths = [path for path in Path().iterdir() if path.suffix == ".trace" or is_run_path(path)]
        paths.sort(key=lambda path: -path.stat().st_mtime_ns)
        self.app.search_commands(
            [(escape(visible(str(path))), partial(self.pic.open_paths, path)) for path in paths], "open a trace or run"
        )
