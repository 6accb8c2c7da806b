"""Textual's table of rows, and its select on one line, with texts that are never read as markup."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Select

from pictool.escapes import visible


class RowTable(DataTable[Text]):
    """A table whose rows are replaced as a whole. A title that begins with > is of numbers, aligned to the right."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "open")]
    DEFAULT_CSS = "RowTable { height: 1fr; scrollbar-size-horizontal: 0; }"

    def __init__(self, *titles: str, id: str) -> None:
        super().__init__(cursor_type="row", id=id)
        self._titles = titles

    def on_mount(self) -> None:
        for title in self._titles:
            self.add_column(Text(title.removeprefix(">"), justify="right" if title.startswith(">") else "left"))

    def set_width(self, index: int, width: int) -> None:
        """Give a column a width in cells; rows that are shown from now on have it."""
        column = self.ordered_columns[index]
        column.width, column.auto_width = width, False

    def show_rows(self, rows: Iterable[Sequence[object]], style_of: Callable[[int], str] = lambda _: "") -> None:
        """Show these rows, each in a style; the cursor and the first line stay where they are."""
        cursor, top = self.cursor_row, self.scroll_y
        self.clear()
        for index, row in enumerate(rows):
            cells = zip(row, self.ordered_columns, strict=True)
            style = style_of(index)
            self.add_row(*(_cell(str(cell), style, column.label) for cell, column in cells))
        self.move_cursor(row=cursor)
        self.call_after_refresh(self.scroll_to, y=top, animate=False)


def _cell(text: str, style: str, title: Text) -> Text:
    return Text(visible(text), style, justify=title.justify, no_wrap=True, overflow="ellipsis")


class Choice(Select[int | str | None]):
    """A select that is stepped through by keys of its screen, and hidden where there is nothing to choose."""

    DEFAULT_CSS = "Choice { width: 20; }"

    def __init__(self, id: str) -> None:
        super().__init__([("", "")], id=id, compact=True, allow_blank=False)

    def choose_from(self, labels: Mapping[Any, str], value: int | str | None) -> None:
        """Set the values with their labels, and the one that is chosen; no message is posted."""
        self.values: list[Any] = list(labels)
        with self.prevent(Select.Changed):
            self.set_options([(Text(visible(label)), key) for key, label in labels.items()])
            self.value = value
        self.display = len(labels) > 1

    def step(self, by: int) -> None:
        """Choose the next value, or the one before; after the last one comes the first."""
        if self.display:
            self.value = self.values[(self.values.index(self.value) + by) % len(self.values)]
