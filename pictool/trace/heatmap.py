"""Many columns in few: what a picture of fixed width shows of a long prompt.

Levels from 0 to 1 as nine steps: the colours and the characters that every picture on a terminal uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Binned:
    """Columns put together, [rows, bins]; bin i holds the columns [edges[i], edges[i + 1])."""

    values: NDArray[np.float64]
    edges: NDArray[np.int64]

    def bin_of(self, column: int) -> int:
        """The bin that a column is in."""
        return int(np.searchsorted(self.edges, column, side="right")) - 1


def binned(values: NDArray[np.floating[Any]] | NDArray[np.integer[Any]], width: int) -> Binned:
    """At most `width` bins of nearly equal size. A bin shows its largest number, and nan if it has none."""
    assert values.ndim == 2 and values.shape[1] and width > 0
    count = min(width, values.shape[1])
    edges = np.arange(count + 1) * values.shape[1] // count
    numbers = values.astype(np.float64)
    known = np.where(np.isnan(numbers), -np.inf, numbers)
    most = np.maximum.reduceat(known, edges[:-1], axis=1)
    return Binned(np.where(np.isneginf(most), np.nan, most), edges)


def tick_labels(bins: Sequence[int], labels: Sequence[str], width: int) -> str:
    """A line of text with each label at its bin, where it does not run into the one before."""
    line = ""
    for at, label in zip(bins, labels, strict=True):
        if at >= len(line) + bool(line) and at + len(label) <= width:
            line = line.ljust(at) + label
    return line


RAMP = ".:-=+*#%@"


# Viridis, from dark to light: even steps to the eye, also for the colour-blind.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
_FIRST_LIGHT = 5  # the steps from here on need dark ink


def step_of(level: float) -> int:
    """The step of a level: 0 to 8."""
    return min(len(VIRIDIS) - 1, max(0, int(level * len(VIRIDIS))))


def style_of(level: float) -> str:
    """Ink and background of a level from 0 to 1."""
    return style_of_step(step_of(level))


def style_of_step(step: int) -> str:
    return f"{'#ffffff' if step < _FIRST_LIGHT else '#000000'} on {VIRIDIS[step]}"
