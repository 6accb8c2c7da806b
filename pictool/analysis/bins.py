"""Many columns in few: what a picture of fixed width shows of a long prompt."""

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
