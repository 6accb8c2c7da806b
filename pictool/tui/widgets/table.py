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


_ANY = 1 << 20  # columns that cells of unknown length may need
_FLEXIBLE_SHARE = 1 / 3  # of a table's width, that a column of width 0 has before others are left out


@dataclass(frozen=True)
class Column:
    """A column; `is_right` aligns it to the right. A column of width 0 takes the space that is left.

    Where all rows are known (`RowTable.show_rows`), one may grow to the width of its cells.
    """

    title: str
    width: int
    is_right: bool = False


class RowTable(ScrollView, can_focus=True):
    """A table that calls for the cells of one row at a time, so that 10,000 rows cost as much as 50."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-table--marked"}
    DEFAULT_CSS = """
    RowTable { height: 1fr; overflow-x: hidden; padding: 0 1; }
    RowTable:focus { background: $surface; }
    RowTable > .row-table--marked { color: $text-error; }
    """
    help_title = "table"
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

    def __init__(self, columns: Sequence[Column], *, can_open: bool = False, id: str | None = None) -> None:
        """Make an empty table; `can_open`: Enter on a row does something."""
        super().__init__(id=id)
        self._can_open = can_open
        self._columns = tuple(columns)
        self._count = 0
        self._row: Callable[[int], Sequence[str]] = lambda _: ()
        self._is_marked: Callable[[int], bool] = lambda _: False
        self._needed = tuple(column.width or _ANY for column in columns)  # widths, by the cells that are known
        self._empty = ""

    @property
    def _width(self) -> int:
        return self.scrollable_content_region.width

    @property
    def count(self) -> int:
        return self._count

    def show(
        self, count: int, row: Callable[[int], Sequence[str]], is_marked: Callable[[int], bool] = lambda _: False,
        empty: str = "",
    ) -> None:  # fmt: skip
        """Show `count` rows.

        Args:
            row: returns the cells of one, as texts without control characters.
            is_marked: whether a row is drawn in the colour of errors; without colour it is bold.
            empty: lines that are shown in place of rows if there are none.
        """
        self._count, self._row, self._is_marked, self._empty = count, row, is_marked, empty
        self._needed = tuple(column.width or _ANY for column in self._columns)
        self.virtual_size = Size(0, count + 1)
        self.cursor = min(self.cursor, max(0, count - 1))
        self.refresh()

    def show_rows(
        self, rows: Sequence[Sequence[str]], is_marked: Callable[[int], bool] = lambda _: False, empty: str = ""
    ) -> None:
        """Show rows whose cells are known: a column is as wide as its cells, if there is room."""
        self.show(len(rows), rows.__getitem__, is_marked, empty)
        if rows:
            self._needed = tuple(
                max(column.width, *(cell_width(row[index]) for row in rows))
                for index, column in enumerate(self._columns)
            )

    def texts(self, index: int) -> tuple[str, ...]:
        """Return the cells of a row."""
        return tuple(self._row(index))

    def render_line(self, y: int) -> Strip:
        width, base = self._width, self.rich_style
        if y == 0:
            return self._strip([column.title for column in self._columns], base + BOLD + DIM, width)
        index = self.scroll_offset.y + y - 1
        if not self._count:
            lines = self._empty.splitlines()
            return Strip([Segment(lines[index] if index < len(lines) else "", base)]).adjust_cell_length(width, base)
        if not 0 <= index < self._count:
            return Strip.blank(width, base)
        style = base + self._marked_style if self._is_marked(index) else base
        if index == self.cursor:
            style += CURSOR if self.has_focus else BOLD
        return self._strip(self._row(index), style, width)

    @property
    def _marked_style(self) -> Style:
        if self.app.no_color:
            return BOLD
        return Style(color=self.get_component_rich_style("row-table--marked").color)

    def _strip(self, texts: Sequence[str], style: Style, width: int) -> Strip:
        widths = self._widths(width)
        columns = zip(texts, widths, self._columns, strict=True)
        line = _GAP.join(_fit(text, size, column.is_right) for text, size, column in columns if size)
        return Strip([Segment(line, style)]).adjust_cell_length(width, self.rich_style)

    def _widths(self, width: int) -> list[int]:
        """Return the width of each column; those that do not fit are left out (0), the last fixed one first.

        Where there is room beside them, columns grow to what their cells need, the first one first.
        """
        fixed = [column.width for column in self._columns]
        reserved = 0
        if 0 in fixed:
            reserved = min(self._needed[fixed.index(0)], max(10, int(width * _FLEXIBLE_SHARE)))
        for index in range(len(fixed) - 1, 0, -1):
            if _total(fixed) + reserved <= width:
                break
            if self._columns[index].width:
                fixed[index] = -1
        for index, needed in enumerate(self._needed):
            if fixed[index] > 0:
                fixed[index] += max(0, min(needed - fixed[index], width - reserved - _total(fixed)))
        return [
            max(4, width - _total(fixed)) if column.width == 0 else max(0, size)
            for column, size in zip(self._columns, fixed, strict=True)
        ]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "open" or self._can_open

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


def _total(widths: Sequence[int]) -> int:
    """The width of columns of fixed width, each with the gap after it."""
    return sum(size + len(_GAP) for size in widths if size > 0)


def _fit(text: str, size: int, is_right: bool) -> str:
    """Cut or pad a text to exactly `size` cells."""
    if cell_width(text) > size:
        text = set_cell_size(text, max(0, size - 1)) + "…"
    pad = " " * (size - cell_width(text))
    return pad + text if is_right else text + pad
