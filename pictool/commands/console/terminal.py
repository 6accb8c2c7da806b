"""Draw heat maps, bars and tables on a terminal with rich, readable on light and dark ones and without colour.

A coloured cell has its own background and text colour, so that it does not depend on the terminal's. Without colour
(NO_COLOR, a pipe) cells are characters from light to heavy, and nothing is lost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from pictool.escapes import unguarded, visible_lines
from pictool.trace.heatmap import ASCII_RAMP, bin_columns, color_step, color_style, tick_labels
from pictool.trace.labels import short

_LABEL_WIDTH = 12
_GAP = 2  # columns between those of a table
_ANY_WIDTH = 1 << 16
_MIN_WIDTH = 8  # columns of a map on the narrowest terminal

Numbers = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


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


def heat_map(
    screen: Console, values: Numbers, labels: Sequence[str], starts: Sequence[int], high: float | None = None
) -> None:
    """Draw rows of cells from 0 to `high` (default: the maximum), with ticks at the columns `starts`; nan is blank.

    Columns that do not fit into the width are binned: a cell shows the maximum of its columns.
    """
    indent = max([_LABEL_WIDTH // 2, *(min(_LABEL_WIDTH, len(label)) for label in labels)])
    bins = bin_columns(values, max(_MIN_WIDTH, screen.width - indent - 2))
    if high is None:
        high = float(np.nanmax(bins.values)) if np.isfinite(bins.values).any() else 1.0
    for label, row in zip(labels, bins.values, strict=True):
        name = set_cell_size(short(label, indent), min(indent, cell_len(short(label, indent))))  # wide characters
        line = Text(" " * (indent - cell_len(name)) + name + " ")
        for value in row / (high or 1.0):
            line.append_text(_cell(screen, float(value)))
        screen.print(line, no_wrap=True)
    tick_bins = [bins.bin_of(start) for start in starts if start < values.shape[1]]
    names = [str(start) for start in starts if start < values.shape[1]]
    width = len(bins.edges) - 1
    ticks = "".join("|" if i in tick_bins else " " for i in range(width))
    screen.print(Text(" " * (indent + 1) + ticks, style="dim"), no_wrap=True)
    screen.print(Text(" " * (indent + 1) + tick_labels(tick_bins, names, width), style="dim"), no_wrap=True)
    per_cell = int(np.diff(bins.edges).max())
    screen.print(_legend(screen, high, f"{per_cell} tokens a cell, the largest shown" if per_cell > 1 else ""))


def _legend(screen: Console, high: float, more: str) -> Text:
    line = Text("0 ")
    for value in np.linspace(0, 1, 2 * len(ASCII_RAMP)):
        line.append_text(_cell(screen, float(value)))
    return line.append(f" {high:.3g}" + (f"   {more}" if more else ""))


def _cell(screen: Console, value: float) -> Text:
    """Return one cell of a value from 0 to 1; without colour it is a character of the ramp."""
    if np.isnan(value):
        return Text(" ")
    if not has_color(screen):
        return Text(ASCII_RAMP[color_step(value)])
    return Text(" ", style=color_style(value))


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
