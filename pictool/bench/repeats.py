"""Interleaved repeats: a slow moment of the machine meets every run, and no run is always the first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
OnRun = Callable[[], None]  # called after each run


@dataclass(frozen=True)
class MedianRange:
    """The median of some values, the least and the most of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> MedianRange:
        return cls(statistics.median(values), min(values), max(values))


def interleave(runs: Mapping[str, Callable[[], T]], repeats: int, on_run: OnRun | None = None) -> dict[str, list[T]]:
    """Run all, `repeats` times, each time beginning with the next one; returns what each run gave, by its name.

    All are run once more before that, as a warm-up: it brings kernels, weights and objects to where later runs find
    them.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name in rotated(list(runs), repeat):
            result = runs[name]()
            if repeat:
                results[name].append(result)
            if on_run:
                on_run()
    return results


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The same items, beginning with the one at `by`, round and round."""
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the repeats' ratios: runs of one repeat are compared, not moments of the machine."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def median_or_none(values: Sequence[float | None]) -> float | None:
    """The median; None if a run has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
