"""Runs side by side, in rounds: a slow moment of the machine meets one round, and no run is always the first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
OnRun = Callable[[], None]  # is told that one more run is done


@dataclass(frozen=True)
class Spread:
    """The median of some runs, and the least and the most of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def rounds(runs: Mapping[str, Callable[[], T]], repeats: int, on_run: OnRun | None = None) -> dict[str, list[T]]:
    """What each run gave in each round, by name; a round begins with the run that came second in the one before.

    A first round is thrown away: it brings kernels, weights and objects to where the others find them.
    """
    kept: dict[str, list[T]] = {name: [] for name in runs}
    for index in range(repeats + 1):
        for name in rotated(list(runs), index):
            result = runs[name]()
            if index:
                kept[name].append(result)
            if on_run:
                on_run()
    return kept


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The same names, beginning with the one at `by`."""
    by %= max(1, len(names))
    return [*names[by:], *names[:by]]


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' ratios: what ran side by side is compared, not moments of the machine."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def median_of(values: Sequence[float | None]) -> float | None:
    """The median; None if a run has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
