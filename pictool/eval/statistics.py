"""Means of cases with bootstrap intervals; questions over the same documents are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pictool.eval import require_extra

CONFIDENCE = 0.95
RESAMPLES = 2000
_BATCH_CELLS = 2_000_000  # resampled numbers in memory at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; of a single group there is none."""

    mean: float
    low: float | None
    high: float | None


def clustered_mean(values: Sequence[float], groups: Sequence[int]) -> Estimate:
    """The mean of values with its 95 % percentile bootstrap interval, where whole groups are resampled.

    The random numbers are fixed: equal values give an equal interval, in every run.

    Args:
        groups: of each value, the number of its group.

    Raises:
        InputError: scipy is not installed.
    """
    numbers = np.asarray(values, dtype=float)
    mean = float(numbers.mean())
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    sums, counts = np.bincount(index, numbers), np.bincount(index).astype(float)
    if len(sums) < 2:
        return Estimate(mean, None, None)
    if (numbers == numbers[0]).all():
        return Estimate(mean, mean, mean)
    require_extra("scipy")
    from scipy.stats import bootstrap

    result = bootstrap(
        (sums, counts), lambda total, count, axis: total.sum(axis) / count.sum(axis), paired=True, vectorized=True,
        n_resamples=RESAMPLES, batch=max(1, _BATCH_CELLS // len(sums)), confidence_level=CONFIDENCE,
        method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return Estimate(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))
