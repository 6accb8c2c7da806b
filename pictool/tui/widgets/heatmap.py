"""A heat map of rows over tokens, binned to the width, with a cursor."""

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

from pictool.trace.heatmap import VIRIDIS, bin_columns, tick_labels
from pictool.trace.labels import short
from pictool.tui.token_colors import BOLD, DIM, map_cell

_INDENT = 9  # columns of the labels, at least
_TICK_LINES = 2  # below the rows
_CURSOR = "┼"


class HeatMap(ScrollView, can_focus=True):
    """Rows × tokens. `column` is the token under the cursor, `row` the one that is marked, if any."""

    DEFAULT_CSS = "HeatMap { height: 10; overflow-x: hidden; } HeatMap:focus { background: $surface; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", "cell to the left", show=False),
        Binding("right", "move(1)", "cell to the right", show=False),
    ]
    column = reactive(0)
    row: reactive[int | None] = reactive(None)

    class Moved(Message):
        """The user moved the cursor to another token."""

        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    def __init__(self, starts: Sequence[int]) -> None:
        super().__init__()
        self._starts, self._low, self._high = tuple(starts), 0.0, 1.0
        self._labels: tuple[str, ...] = ("",)
        self._values = np.zeros((1, 1))
        self._indent, self._bins = _INDENT, bin_columns(self._values, 1)

    def show(
        self, values: NDArray[np.float64], labels: Sequence[str], low: float, high: float, row: int | None = None
    ) -> None:
        """Show values [rows, tokens] between `low` and `high`; a cell shows the maximum of its tokens."""
        self._values, self._labels, self._low, self._high = values, tuple(labels), low, high
        self.row = row
        self.on_resize()

    def on_resize(self) -> None:
        width = self.scrollable_content_region.width
        # What the longest label needs, but at most a quarter of the width.
        self._indent = max(_INDENT, min(max(map(len, self._labels)) + 2, width // 4))
        self._bins = bin_columns(self._values, max(1, width - self._indent - 1))
        self.virtual_size = Size(0, len(self._values) + _TICK_LINES)
        self.refresh()

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
        cursor, mark = self._bins.bin_of(self.column), _CURSOR if self.row in (row, None) else "│"
        steps = self._steps(self._bins.values[row]).tolist()
        for (step, is_cursor), group in groupby(enumerate(steps), key=lambda cell: (cell[1], cell[0] == cursor)):
            text, style = map_cell(step, has_color)
            segments.append(Segment((mark if is_cursor else text) * len(list(group)), base + style))
        return segments

    def _steps(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        scaled = (values - self._low) / (self._high - self._low or 1.0)
        steps = np.clip(np.nan_to_num(scaled) * len(VIRIDIS), 0, len(VIRIDIS) - 1).astype(np.int64)
        return np.where(np.isnan(values) | (values <= self._low), -1, steps)  # what was reused is quiet

    def _ticks(self, line: int) -> str:
        ticks, width = [self._bins.bin_of(start) for start in self._starts], len(self._bins.edges) - 1
        if line == 0:
            return "".join("|" if cell in ticks else " " for cell in range(width))
        return tick_labels(ticks, [str(start) for start in self._starts], width)

    def validate_column(self, column: int) -> int:
        return min(max(0, column), self._values.shape[1] - 1)

    def watch_column(self) -> None:
        self.refresh()

    def watch_row(self) -> None:
        if self.row is not None and self.size.height:
            top, num_visible = self.scroll_offset.y, max(1, self.size.height - 1)
            if self.row < top or self.row >= top + num_visible:
                self.scroll_to(y=max(0, self.row - num_visible // 2), animate=False)
        self.refresh()

    def action_move(self, cells: int) -> None:
        """Move by a number of cells, to the first token of another one."""
        cell = min(max(0, self._bins.bin_of(self.column) + cells), len(self._bins.edges) - 2)
        self.column = int(self._bins.edges[cell])
        self.post_message(self.Moved(self.column))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        cell = offset.x - self._indent
        if 0 <= cell < len(self._bins.edges) - 1:
            self.column = int(self._bins.edges[cell])
            self.post_message(self.Moved(self.column))
