"""Heat maps of any width: bin many columns into few, and colour values from 0 to 1 by a ramp of nine steps.

The terminal's pictures and the plots use the same bins and colours. numpy is imported only where columns are binned,
since the first screen of `pic tui` needs the colours alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Viridis, from dark to light: even steps to the eye, also for the colour-blind.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
ASCII_RAMP = ".:-=+*#%@"  # the same steps without colour
_FIRST_LIGHT = 5  # steps from here on need dark text


@dataclass(frozen=True)
class BinnedColumns:
    """Columns merged into bins, [rows, bins]; bin i holds the columns [edges[i], edges[i + 1])."""

    values: NDArray[np.float64]
    edges: NDArray[np.int64]

    def bin_of(self, column: int) -> int:
        """Return the bin that holds a column."""
        return bisect_right(self.edges, column) - 1


def bin_columns(values: NDArray[np.floating[Any]] | NDArray[np.integer[Any]], width: int) -> BinnedColumns:
    """Merge columns into at most `width` bins of nearly equal size.

    A bin has the maximum of its columns; nan columns do not count, and a bin of nothing else is nan.
    """
    import numpy as np

    assert values.ndim == 2 and values.shape[1] and width > 0
    num_bins = min(width, values.shape[1])
    edges = np.arange(num_bins + 1) * values.shape[1] // num_bins
    numbers = values.astype(np.float64)
    known = np.where(np.isnan(numbers), -np.inf, numbers)
    maxima = np.maximum.reduceat(known, edges[:-1], axis=1)
    return BinnedColumns(np.where(np.isneginf(maxima), np.nan, maxima), edges)


def tick_labels(bins: Sequence[int], labels: Sequence[str], width: int) -> str:
    """Return a line of text with each label at its bin; a label that would touch the one before is left out."""
    line = ""
    for column, label in zip(bins, labels, strict=True):
        if column >= len(line) + bool(line) and column + len(label) <= width:
            line = line.ljust(column) + label
    return line


def color_style(value: float) -> str:
    """Return the rich style, text on background, of a value from 0 to 1."""
    return step_style(min(len(VIRIDIS) - 1, max(0, int(value * len(VIRIDIS)))))


def step_style(step: int) -> str:
    """Return the rich style, text on background, of a step of the ramp."""
    return f"{'#ffffff' if step < _FIRST_LIGHT else '#000000'} on {VIRIDIS[step]}"
