"""Which rows of a prompt are computed: positions in runs of consecutive ones, or whole sequences in a pack."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Run(NamedTuple):
    """Consecutive rows: [row, row + end - start) of the hidden states are at the positions [start, end)."""

    row: int
    start: int
    end: int


Bounds = NDArray[np.int64]  # [runs, 3], of each run what `Run` has: there may be thousands


@dataclass(frozen=True)
class Rows:
    """Which positions of the prompt the hidden states are."""

    positions: Tensor  # int64 [rows], ascending
    bounds: Bounds

    @classmethod
    def of(cls, positions: Tensor) -> Rows:
        """Group ascending positions (on the CPU) into runs; they move to the device with `to`."""
        return cls(positions, runs_of(positions.numpy()))

    @classmethod
    def one(cls, positions: Tensor, start: int, end: int) -> Rows:
        """The positions [start, end), which are given on the device."""
        return cls(positions, bounds_of(Run(0, start, end)))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(itertools.starmap(Run, self.bounds.tolist()))

    def before(self, position: int) -> int:
        """How many of the rows are before a position; the device is not asked."""
        _, start, end = self.bounds.T
        return int((np.minimum(end, position) - start).clip(0).sum())

    def split(self, size: int) -> list[Rows]:
        """The same rows, `size` at a time."""
        return [Rows.of(positions) for positions in torch.split(self.positions, size)]

    def to(self, device: torch.device | str) -> Rows:
        return Rows(self.positions.to(device), self.bounds)


class DeviceRows(Rows):
    """Rows whose positions only the device knows; who asks for their runs waits for it."""

    def __init__(self, positions: Tensor) -> None:
        object.__setattr__(self, "positions", positions)

    @cached_property
    def bounds(self) -> Bounds:  # type: ignore[override]
        return Rows.of(self.positions.cpu()).bounds


def runs_of(positions: NDArray[np.int64]) -> Bounds:
    """The bounds of the runs of ascending positions."""
    first = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return np.stack([first, positions[first], positions[first] + np.diff(first, append=len(positions))], 1)


def bounds_of(*runs: Run) -> Bounds:
    """The bounds of runs."""
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class Pack:
    """Rows that are sequences of these lengths, one after the other. No sequence sees another one.

    Each attends to itself, and to the keys that are before those of all rows, if there are any.
    """

    lengths: tuple[int, ...]
