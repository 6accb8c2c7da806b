"""A heat map of rows over tokens, binned to the width, with a cursor; zoomed, it shows a window around the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from pictool.trace.heatmap import VIRIDIS, BinnedColumns, bin_columns, tick_labels
from pictool.trace.labels import short
from pictool.tui.widgets.styles import BOLD, DIM, map_cell

_INDENT = 9  # columns of the labels, at least
_TICK_LINES = 2  # below the rows
_CURSOR = "┼"


class HeatMap(ScrollView, can_focus=True):
    """Rows × tokens. `column` is the token under the cursor, `row` its row, or None if it is on no row."""

    DEFAULT_CSS = "HeatMap { height: 10; overflow-x: hidden; } HeatMap:focus { background: $surface; }"
    help_title = "map"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "cell to the left", show=False),
        Binding("right", "move(1)", "cell to the right", show=False),
        Binding("up", "pick(-1)", "row above", show=False),
        Binding("down", "pick(1)", "row below", show=False),
        Binding("plus,equals_sign", "zoom(2)", "zoom in", show=False),
        Binding("minus", "zoom(-2)", "zoom out", show=False),
    ]
    column = reactive(0)
    row: reactive[int | None] = reactive(None)

    class Moved(Message):
        """The cursor moved to another token or row."""

        def __init__(self, view: HeatMap, column: int, row: int | None) -> None:
            super().__init__()
            self.view, self.column, self.row = view, column, row

    def __init__(self, starts: Sequence[int], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._starts, self._low, self._high = tuple(starts), 0.0, 1.0
        self._labels: tuple[str, ...] = ("",)
        self._values = np.zeros((1, 1))
        self._zoom, self._window = 1, (0, 1)
        self._bins: BinnedColumns | None = None

    def show(self, values: NDArray[np.float64], labels: Sequence[str], low: float, high: float) -> None:
        """Show values [rows, tokens] between `low` and `high`; a cell shows the maximum of its tokens."""
        self._values, self._labels, self._low, self._high = values, tuple(labels), low, high
        self.row = None if self.row is None else min(self.row, len(values) - 1)
        self._rebin()

    @property
    def bins(self) -> BinnedColumns:
        """The values of the cells; edges count from the start of the window."""
        if self._bins is None:
            self._bins = bin_columns(self._values[:, slice(*self._window)], self._room)
        return self._bins

    @property
    def window(self) -> tuple[int, int]:
        return self._window

    @property
    def _room(self) -> int:
        return max(1, self.scrollable_content_region.width - self._indent - 1)

    @property
    def _indent(self) -> int:
        """Columns of the labels: what the longest one needs, but at most a quarter of the width."""
        needed = max(map(len, self._labels)) + 2
        return max(_INDENT, min(needed, self.scrollable_content_region.width // 4))

    def _rebin(self) -> None:
        total = self._values.shape[1]
        size = min(total, max(total // self._zoom, min(self._room, total)))
        start = min(max(0, self.column - size // 2), total - size)
        self._window, self._bins = (start, start + size), None
        self.virtual_size = Size(0, len(self._values) + _TICK_LINES)
        self.refresh()

    def on_resize(self) -> None:
        self._rebin()

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        row = self.scroll_offset.y + y
        if row < len(self._values):
            return Strip(self._cells(row)).adjust_cell_length(width, base)
        line = "" if row >= len(self._values) + _TICK_LINES else self._ticks(row - len(self._values))
        return Strip([Segment(" " * self._indent + line, base + DIM)]).adjust_cell_length(width, base)

    def _cells(self, row: int) -> list[Segment]:
        base, has_color = self.rich_style, not self.app.no_color
        width = self._indent - 1
        label = short(self._labels[row], width).rjust(width) + " "
        segments = [Segment(label, base + BOLD if row == self.row else base + DIM)]
        cursor = self._cursor_cell()
        steps = self._steps(self.bins.values[row]).tolist()
        for (step, is_cursor), group in groupby(enumerate(steps), key=lambda cell: (cell[1], cell[0] == cursor)):
            text, style = map_cell(step, has_color)
            segments.append(Segment((self._cursor_mark(row) if is_cursor else text) * len(list(group)), base + style))
        return segments

    def _cursor_mark(self, row: int) -> str:
        """Return the character in the cursor's column."""
        return _CURSOR if self.row in (row, None) else "│"

    def _steps(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        scaled = (values - self._low) / (self._high - self._low or 1.0)
        steps = np.clip(np.nan_to_num(scaled) * len(VIRIDIS), 0, len(VIRIDIS) - 1).astype(np.int64)
        return np.where(np.isnan(values), -1, steps)

    def _cursor_cell(self) -> int:
        start, end = self._window
        return self.bins.bin_of(self.column - start) if start <= self.column < end else -1

    def _ticks(self, line: int) -> str:
        start, end = self._window
        part_starts = [part_start for part_start in self._starts if start <= part_start < end]
        ticks = [self.bins.bin_of(part_start - start) for part_start in part_starts]
        if line == 0:
            return "".join("|" if cell in set(ticks) else " " for cell in range(len(self.bins.edges) - 1))
        return tick_labels(ticks, [str(part_start) for part_start in part_starts], self._room)

    def validate_column(self, column: int) -> int:
        return min(max(0, column), self._values.shape[1] - 1)

    def watch_column(self) -> None:
        if not self._window[0] <= self.column < self._window[1]:
            self._rebin()
        self.refresh()

    def watch_row(self) -> None:
        if self.row is not None and self.size.height:
            top, num_visible = self.scroll_offset.y, max(1, self.size.height - 1)
            if self.row < top or self.row >= top + num_visible:
                self.scroll_to(y=max(0, self.row - num_visible // 2), animate=False)
        self.refresh()

    def action_move(self, cells: int) -> None:
        """Move by a number of cells, to the first token of another one."""
        start, edges = self._window[0], self.bins.edges
        cell = self._cursor_cell() + cells
        if 0 <= cell < len(edges) - 1:
            self.column = start + int(edges[cell])
        else:
            self.column += cells * int(np.diff(edges).max())
        self.post_message(self.Moved(self, self.column, self.row))

    def action_pick(self, by: int) -> None:
        """Move to another row; above the first one is None, the mean of all."""
        row = (-1 if self.row is None else self.row) + by
        self.row = None if row < 0 else min(row, len(self._values) - 1)
        self.post_message(self.Moved(self, self.column, self.row))

    def action_zoom(self, by: int) -> None:
        tokens_per_cell = max(1, self._values.shape[1] // self._room)
        self._zoom = min(self._zoom * by, max(1, 2 * tokens_per_cell)) if by > 0 else max(1, self._zoom // -by)
        self._rebin()

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        row, cell = self.scroll_offset.y + offset.y, offset.x - self._indent
        if row < len(self._values) and 0 <= cell < len(self.bins.edges) - 1:
            self.column, self.row = self._window[0] + int(self.bins.edges[cell]), row
            self.post_message(self.Moved(self, self.column, self.row))
