"""Means of cases with bootstrap intervals; questions over the same documents are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.eval import require_extra

Numbers = NDArray[np.float64]

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
    sums, counts = (np.bincount(index, weights).astype(float) for weights in (numbers, None))
    if len(sums) < 2:
        return Estimate(mean, None, None)
    if (numbers == numbers[0]).all():
        return Estimate(mean, mean, mean)
    return Estimate(mean, *ratio_interval(sums, counts))


def ratio_interval(numerators: Numbers, denominators: Numbers) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of Σ numerators ÷ Σ denominators, where pairs are resampled.

    The random numbers are fixed. There are two pairs or more.

    Raises:
        InputError: scipy is not installed.
    """
    require_extra("scipy")
    from scipy.stats import bootstrap

    result = bootstrap(
        (numerators, denominators), lambda above, below, axis: above.sum(axis) / below.sum(axis), paired=True,
        vectorized=True, n_resamples=RESAMPLES, batch=max(1, _BATCH_CELLS // len(numerators)),
        confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
