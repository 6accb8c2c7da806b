"""Drawing on a terminal with rich: heat maps, bars and marked text that read well on light, dark and no colour.

A cell's colour is always a background with its own ink, so it does not depend on the terminal's; without colour
(NO_COLOR, a pipe) cells are characters from light to heavy, and nothing that is shown is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pictool.trace.heatmap import RAMP, binned, step_of, style_of, tick_labels
from pictool.trace.labels import harmless as harmless
from pictool.trace.labels import short as short
from pictool.trace.labels import visible as visible

_LABEL_WIDTH = 12
_SHORTEST = 8  # columns of a map on the narrowest terminal

Numbers = NDArray[np.floating[Any]] | NDArray[np.integer[Any]]


def open_screen() -> Console:
    """Standard output. Not a terminal: no colour, and as wide as COLUMNS says (80)."""
    return Console(highlight=False, markup=False, emoji=False)


def has_color(screen: Console) -> bool:
    return screen.color_system is not None and not screen.no_color


def heading(screen: Console, text: str) -> None:
    screen.print()
    screen.print(Text(text, style="bold"))


def heat_map(
    screen: Console, values: Numbers, labels: Sequence[str], starts: Sequence[int], most: float | None = None
) -> None:
    """Rows of cells from 0 to `most` (default: the largest); nan is blank. Ticks stand at the columns `starts`.

    What does not fit into the width is put together: a cell is the largest of its columns.
    """
    indent = max([_LABEL_WIDTH // 2, *(min(_LABEL_WIDTH, len(label)) for label in labels)])
    shown = binned(values, max(_SHORTEST, screen.width - indent - 2))
    top = most if most is not None else float(np.nanmax(shown.values)) if np.isfinite(shown.values).any() else 1.0
    for label, row in zip(labels, shown.values, strict=True):
        name = set_cell_size(short(label, indent), min(indent, cell_len(short(label, indent))))  # wide characters
        line = Text(" " * (indent - cell_len(name)) + name + " ")
        for level in row / (top or 1.0):
            line.append_text(_cell(screen, float(level)))
        screen.print(line, no_wrap=True)
    at = [shown.bin_of(start) for start in starts if start < values.shape[1]]
    names = [str(start) for start in starts if start < values.shape[1]]
    width = len(shown.edges) - 1
    ticks = "".join("|" if i in at else " " for i in range(width))
    screen.print(Text(" " * (indent + 1) + ticks, style="dim"), no_wrap=True)
    screen.print(Text(" " * (indent + 1) + tick_labels(at, names, width), style="dim"), no_wrap=True)
    per_cell = int(np.diff(shown.edges).max())
    screen.print(_legend(screen, top, f"{per_cell} tokens a cell, the largest shown" if per_cell > 1 else ""))


def _legend(screen: Console, top: float, more: str) -> Text:
    line = Text("0 ")
    for level in np.linspace(0, 1, 2 * len(RAMP)):
        line.append_text(_cell(screen, float(level)))
    return line.append(f" {top:.3g}" + (f"   {more}" if more else ""))


def _cell(screen: Console, level: float, text: str = " ") -> Text:
    """One cell of a level from 0 to 1; without colour a blank text becomes a character."""
    if np.isnan(level):
        return Text(text)
    if not has_color(screen):
        return Text(RAMP[step_of(level)] * len(text) if text.isspace() else text)
    return Text(text, style=style_of(level))


def percent_grid(screen: Console, values: Numbers, rows: Sequence[str], column: str) -> None:
    """Shares [rows, columns] as percent on coloured cells; as a map if they do not fit."""
    room = (screen.width - max(map(len, rows)) - 1) // 5
    if values.shape[1] > room:
        heat_map(screen, values, rows, range(0, values.shape[1], 8))
        return
    top = float(np.nanmax(values)) or 1.0
    indent = max(map(len, rows))
    head = "".join(f"{f'{column}{i}':>5}" for i in range(values.shape[1]))
    screen.print(Text(" " * (indent + 1) + head, style="dim"), no_wrap=True)
    for name, row in zip(rows, values, strict=True):
        line = Text(name.rjust(indent) + " ")
        for value in row:
            text = "    -" if np.isnan(value) else f"{100 * value:5.1f}"
            line.append_text(_cell(screen, float(value / top), text))
        screen.print(line, no_wrap=True)


def bars(screen: Console, items: Sequence[tuple[str, float, str]], most: float | None = None) -> None:
    """Lines of (label, size, text), each with a bar as long as its size; `most` (default: the largest) fills it."""
    indent = max(len(label) for label, *_ in items)
    most = most or max(size for _, size, _ in items) or 1.0
    room = max(_SHORTEST, min(40, screen.width - indent - 2 - max(len(text) for *_, text in items)))
    mark = "█" if screen.encoding.lower().startswith("utf") else "#"
    for label, size, text in items:
        screen.print(f"{label:<{indent}} {mark * round(room * size / most):<{room}} {text}", no_wrap=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Table:
    """A plain table: numbers to the right and never cut; the columns in `left` are texts that may be shortened."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        if index in left:
            made.add_column(name, overflow="ellipsis", no_wrap=True, min_width=4)
        else:
            made.add_column(
                name, justify="right", no_wrap=True, min_width=max([len(name), *(len(r[index]) for r in rows)])
            )
    for row in rows:
        made.add_row(*row)
    return made


def first_tokens(count: int) -> str:
    return "the first token" if count == 1 else f"the first {count} tokens"
