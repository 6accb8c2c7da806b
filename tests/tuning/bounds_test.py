"""Bounds of means: they hold as often as they say, at every look, whatever the tail of the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from pictool.tuning.bounds import log_capital_above, log_capital_below, lower_bound, upper_bound

LEVEL = 0.05
LOOKS = (32, 64, 128, 256, 512)


def heavy(rng: np.random.Generator, share: float, top: float, count: int = 512) -> np.ndarray:
    """Nothing for most, `top` for a few."""
    return np.where(rng.random(count) < share, top, 0.0)


@pytest.mark.parametrize(("share", "top"), [(0.01, 5.0), (0.05, 1.0), (0.005, 10.0)])
def test_a_mean_at_the_limit_is_shown_to_be_below_as_rarely_as_said(share: float, top: float) -> None:
    rng, limit, wrong = np.random.default_rng(1), 0.05, 0
    assert share * top >= limit
    for _ in range(300):
        values = heavy(rng, share, top)
        wrong += any(log_capital_below(values[:n], limit, 0, 10) >= -math.log(LEVEL) for n in LOOKS)
    assert binomtest(wrong, 300).proportion_ci(0.99).low <= LEVEL


def test_a_mean_below_the_limit_is_rarely_shown_to_be_above() -> None:
    rng, wrong = np.random.default_rng(2), 0
    for _ in range(300):
        values = rng.exponential(0.05, 512).clip(max=1)
        wrong += any(log_capital_above(values[:n], 0.051, 0, 1) >= -math.log(LEVEL) for n in LOOKS)
    assert binomtest(wrong, 300).proportion_ci(0.99).low <= LEVEL


def test_what_is_clear_is_shown() -> None:
    rng = np.random.default_rng(3)
    small, large = rng.exponential(0.005, 256).clip(max=1), rng.exponential(0.2, 256).clip(max=1)
    assert upper_bound(small, LEVEL, 0, 1) < 0.05 < lower_bound(large, LEVEL, 0, 1)
    assert lower_bound(small, LEVEL, 0, 1) <= small.mean() <= upper_bound(small, LEVEL, 0, 1)


def test_without_a_single_bad_value_the_range_decides() -> None:
    """A sample of zeros says the more, the less a value can be: no bootstrap knows that."""
    zeros = np.zeros(128)
    assert upper_bound(zeros, LEVEL, 0, 1) < 0.05 < upper_bound(zeros, LEVEL, 0, 10)
    assert upper_bound(zeros[:0], LEVEL, 0, 1) == pytest.approx(1)


def test_bounds_do_not_depend_on_the_order() -> None:
    values = np.random.default_rng(4).random(64)
    assert upper_bound(values, LEVEL, -1, 1) == pytest.approx(upper_bound(values[::-1], LEVEL, -1, 1), abs=1e-9)


def test_a_value_beyond_the_range_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        log_capital_below(np.array([2.0]), 0.5, 0, 1)
