"""A table of any number of rows, of which only the visible ones are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from pictool.tui.widgets.styles import BOLD, CURSOR, DIM, cell_width

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column; `is_right` aligns it to the right. A column of width 0 takes the space that is left."""

    title: str
    width: int
    is_right: bool = False


class RowTable(ScrollView, can_focus=True):
    """A table that calls for the cells of one row at a time, so that 10,000 rows cost as much as 50."""

    DEFAULT_CSS = "RowTable { height: 1fr; overflow-x: hidden; padding: 0 1; } RowTable:focus { background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "up", show=False),
        Binding("down", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-1000000000)", "first", show=False),
        Binding("end", "move(1000000000)", "last", show=False),
        Binding("enter", "open", "open"),
    ]
    cursor = reactive(0)

    class Selected(Message):
        """Enter, or a second click, on a row."""

        def __init__(self, table: RowTable, row: int) -> None:
            super().__init__()
            self.table, self.row = table, row

        @property
        def control(self) -> RowTable:
            return self.table

    class Moved(Selected):
        """The cursor moved to another row."""

    class HeaderClicked(Message):
        """A click on a column's title."""

        def __init__(self, table: RowTable, column: int) -> None:
            super().__init__()
            self.table, self.column = table, column

    def __init__(self, columns: Sequence[Column], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._count = 0
        self._row: Callable[[int], Sequence[str]] = lambda _: ()

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    @property
    def count(self) -> int:
        return self._count

    def show(self, count: int, row: Callable[[int], Sequence[str]]) -> None:
        """Show `count` rows; `row` returns the cells of one, as texts without control characters."""
        self._count, self._row = count, row
        self.virtual_size = Size(0, count + 1)
        self.cursor = min(self.cursor, max(0, count - 1))
        self.refresh()

    def show_rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Show rows whose cells are known."""
        self.show(len(rows), rows.__getitem__)

    def texts(self, index: int) -> tuple[str, ...]:
        """Return the cells of a row."""
        return tuple(self._row(index))

    def render_line(self, y: int) -> Strip:
        width, base = self._width, self.rich_style
        if y == 0:
            return self._strip([column.title for column in self._columns], base + BOLD + DIM, width)
        index = self.scroll_offset.y + y - 1
        if not 0 <= index < self._count:
            return Strip.blank(width, base)
        style = base if index != self.cursor else base + (CURSOR if self.has_focus else BOLD)
        return self._strip(self._row(index), style, width)

    def _strip(self, texts: Sequence[str], style: Style, width: int) -> Strip:
        widths = self._widths(width)
        columns = zip(texts, widths, self._columns, strict=True)
        line = _GAP.join(_fit(text, size, column.is_right) for text, size, column in columns if size)
        return Strip([Segment(line, style)]).adjust_cell_length(width, self.rich_style)

    def _widths(self, width: int) -> list[int]:
        """Return the width of each column; those that do not fit are left out (0), the last fixed one first."""
        fixed = [column.width for column in self._columns]
        reserved = 10 if 0 in fixed else 0
        for index in range(len(fixed) - 1, 0, -1):
            if sum(size + len(_GAP) for size in fixed if size > 0) + reserved <= width:
                break
            if self._columns[index].width:
                fixed[index] = -1
        used = sum(size + len(_GAP) for size in fixed if size > 0)
        return [
            max(4, width - used) if column.width == 0 else max(0, size)
            for column, size in zip(self._columns, fixed, strict=True)
        ]

    def watch_cursor(self) -> None:
        self._scroll_to_cursor()
        self.refresh()
        if self._count:
            self.post_message(self.Moved(self, self.cursor))

    def _scroll_to_cursor(self) -> None:
        top, num_visible = self.scroll_offset.y, max(1, self.size.height - 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + num_visible:
            self.scroll_to(y=self.cursor - num_visible + 1, animate=False)

    def action_move(self, by: int) -> None:
        self.cursor = min(max(0, self.cursor + by), max(0, self._count - 1))

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - 2))

    def action_open(self) -> None:
        if self._count:
            self.post_message(self.Selected(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            self._click_title(offset.x)
        elif (row := self.scroll_offset.y + offset.y - 1) < self._count:
            is_second = row == self.cursor and event.chain > 1
            self.cursor = row
            if is_second:
                self.action_open()

    def _click_title(self, x: int) -> None:
        end = 0
        for index, size in enumerate(self._widths(self._width)):
            end += size + len(_GAP) * bool(size)
            if size and x < end:
                self.post_message(self.HeaderClicked(self, index))
                return

    def on_resize(self) -> None:
        self.virtual_size = Size(0, self._count + 1)


def _fit(text: str, size: int, is_right: bool) -> str:
    """Cut or pad a text to exactly `size` cells."""
    if cell_width(text) > size:
        text = set_cell_size(text, max(0, size - 1)) + "…"
    pad = " " * (size - cell_width(text))
    return pad + text if is_right else text + pad
