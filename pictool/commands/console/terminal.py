"""Draw bars and tables on a terminal with rich, readable on light and dark ones and without colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pictool.escapes import unguarded, visible_lines

_GAP = 2  # columns between those of a table
_ANY_WIDTH = 1 << 16
_MIN_WIDTH = 8  # columns of a bar on the narrowest terminal


class Screen(Console):
    """A console to which no text is markup, and whose own escapes are the only ones that reach the terminal."""

    @property
    def table_width(self) -> int:
        """Columns that a table may take: all that it needs, unless a terminal reads it or COLUMNS says how many."""
        return self.width if self.is_terminal or "COLUMNS" in os.environ else _ANY_WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        width, table_width = self.width, self.table_width
        if width == table_width or not any(isinstance(part, Table | LabelledTable) for part in objects):
            super().print(*objects, **options)
            return
        self.width = table_width
        super().print(*objects, **options)
        self.width = width

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible_lines(segment.text), segment.style)


def open_screen(width: int | None = None, on_stderr: bool = False) -> Screen:
    """Return a console on standard output or error; if that is no terminal: without colour, and COLUMNS (80) wide."""
    file = unguarded(sys.stderr if on_stderr else sys.stdout)
    return Screen(file=file, width=width, highlight=False, markup=False, emoji=False)


def has_color(screen: Console) -> bool:
    return screen.color_system is not None and not screen.no_color


def heading(screen: Console, text: str) -> None:
    screen.print()
    screen.print(Text(text, style="bold"))


def bars(screen: Console, items: Sequence[tuple[str, float, str]], high: float | None = None) -> None:
    """Draw a bar for each (label, size, text); `high` (default: the maximum) is the size of a full bar."""
    indent = max(len(label) for label, *_ in items)
    high = high or max(size for _, size, _ in items) or 1.0
    room = max(_MIN_WIDTH, min(40, screen.width - indent - 2 - max(len(text) for *_, text in items)))
    mark = "█" if screen.encoding.lower().startswith("utf") else "#"
    for label, size, text in items:
        length = round(room * min(1.0, max(0.0, size / high)))
        screen.print(f"{label:<{indent}} {mark * length:<{room}} {text}", no_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """Return a plain table: numbers are right-aligned and never cut, texts (the columns `left`) may be shortened.

    Only columns that may wrap give way to others (`rich` would take from all alike, down to nothing); their cells do
    not wrap, and so are cut.
    """
    plain = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        if index in left:
            plain.add_column(name, overflow="ellipsis", min_width=4)
        else:
            width = max([len(name), *(len(row[index]) for row in rows)])
            plain.add_column(name, justify="right", no_wrap=True, min_width=width)
    for row in rows:
        cells = (Text(cell, no_wrap=True, overflow="ellipsis") for cell in row)
        plain.add_row(*(text if index in left else text.plain for index, text in enumerate(cells)))
    return plain


class LabelledTable:
    """A table of numbers beside labels. On a terminal too narrow for it, it goes on below, the labels again beside it.

    Nothing is cut or wrapped, and no column is left out.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns, self._rows = list(columns), list[Sequence[str]]()

    def add_row(self, *cells: str) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for number, columns in enumerate(self._blocks(options.max_width)):
            if number:
                yield ""
            yield self._table(columns)

    def _blocks(self, width: int) -> list[list[int]]:
        """The columns of each part, by their indices without the labels'."""
        widths = [max(map(cell_len, [name, *(row[i] for row in self._rows)])) for i, name in enumerate(self._columns)]
        blocks: list[list[int]] = [[]]
        for column in range(1, len(widths)):
            taken = widths[0] + sum(widths[other] + _GAP for other in (*blocks[-1], column))
            if taken > width and blocks[-1]:
                blocks.append([])
            blocks[-1].append(column)
        return blocks

    def _table(self, columns: Sequence[int]) -> Table:
        part = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
        part.add_column(self._columns[0], no_wrap=True)
        for column in columns:
            part.add_column(self._columns[column], justify="right", no_wrap=True)
        for row in self._rows:
            part.add_row(row[0], *(row[column] for column in columns))
        return part
