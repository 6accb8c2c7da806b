"""Means of cases with bootstrap intervals; questions over the same documents are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.needs import require_extra

Numbers = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
_EQUAL = 1e-12  # means of groups that differ by less are equal
_BATCH_CELLS = 2_000_000  # resampled numbers in memory at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its interval; None: there are too few groups for one."""

    mean: float
    low: float | None
    high: float | None


def clustered_mean(
    values: Sequence[float], groups: Sequence[int], bounds: tuple[float, float] | None = None
) -> Estimate:  # fmt: skip
    """The mean of values with its 95 % percentile bootstrap interval, where whole groups are resampled.

    The random numbers are fixed: equal values give an equal interval, in every run. A bootstrap of groups with equal
    means has no width, whatever their number. Then the interval is exact instead, from `bounds`; without them there is
    none.

    Args:
        groups: of each value, the number of its group.
        bounds: the least and the highest value that there can be.

    Raises:
        InputError: scipy is not installed.
    """
    numbers = np.asarray(values, dtype=float)
    mean = float(numbers.mean())
    _, index = np.unique(np.asarray(groups), return_inverse=True)
    sums, counts = (np.bincount(index, weights).astype(float) for weights in (numbers, None))
    if len(sums) < 2:
        return Estimate(mean, None, None)
    if np.ptp(sums / counts) < _EQUAL:
        return Estimate(mean, None, None) if bounds is None else _of_equal_groups(mean, len(sums), bounds)
    return Estimate(mean, *ratio_interval(sums, counts))


def _of_equal_groups(mean: float, num_groups: int, bounds: tuple[float, float]) -> Estimate:
    """The exact interval if all groups have one mean (Clopper and Pearson 1934, no success).

    At most a share of 1 - (α/2)^(1/n) of all groups has another mean, and none lies beyond the bounds.
    """
    low, high = bounds
    share = 1 - ((1 - CONFIDENCE) / 2) ** (1 / num_groups)
    return Estimate(mean, mean - share * (mean - low), mean + share * (high - mean))


def ratio_interval(numerators: Numbers, denominators: Numbers) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of Σ numerators ÷ Σ denominators, where pairs are resampled.

    The random numbers are fixed. There are two pairs or more.

    Raises:
        InputError: scipy is not installed.
    """
    require_extra("eval", "an interval", "scipy")
    from scipy.stats import bootstrap

    result = bootstrap(
        (numerators, denominators), lambda above, below, axis: above.sum(axis) / below.sum(axis), paired=True,
        vectorized=True, n_resamples=RESAMPLES, batch=max(1, _BATCH_CELLS // len(numerators)),
        confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
