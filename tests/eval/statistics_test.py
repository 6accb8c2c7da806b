"""Means and their intervals, against numpy, theory, and what must hold in corners."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.stats import binomtest

from pictool.eval.statistics import Estimate, clustered_mean


def by_hand(values: list[float], groups: list[int], resamples: int = 4000) -> tuple[float, float]:
    """The percentile bootstrap as textbooks tell it: draw whole groups, take the mean of what they hold."""
    draw = np.random.default_rng(7)
    members = [[v for v, g in zip(values, groups, strict=True) if g == group] for group in sorted(set(groups))]
    means = []
    for _ in range(resamples):
        drawn = draw.integers(0, len(members), len(members))
        means.append(np.concatenate([members[i] for i in drawn]).mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def test_the_interval_is_the_textbook_bootstrap_of_groups() -> None:
    draw = np.random.default_rng(0)
    groups = [int(g) for g in draw.integers(0, 12, 80)]
    values = [float(draw.normal(group / 5, 1)) for group in groups]
    found = clustered_mean(values, groups)
    low, high = by_hand(values, groups)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(low, abs=0.05) and found.high == pytest.approx(high, abs=0.05)


def test_of_single_cases_it_is_near_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    found, half = clustered_mean(values.tolist(), list(range(400))), 1.96 * values.std() / 20
    assert found.low == pytest.approx(found.mean - half, abs=0.03)
    assert found.high == pytest.approx(found.mean + half, abs=0.03)


def test_questions_over_the_same_documents_count_as_one() -> None:
    """Every value ten times: as dependent ones they say no more than one of each."""
    values = np.random.default_rng(0).normal(0, 1, 20)
    once = clustered_mean(values.tolist(), list(range(20)))
    tenfold = clustered_mean(np.repeat(values, 10).tolist(), np.repeat(np.arange(20), 10).tolist())
    assert tenfold.mean == pytest.approx(once.mean)
    assert tenfold.low == pytest.approx(once.low) and tenfold.high == pytest.approx(once.high)


def test_it_is_the_same_every_time_whatever_the_groups_are_called() -> None:
    values, groups = [0.0, 1.0, 1.0, 0.5, 0.0], [0, 0, 1, 2, 3]
    assert clustered_mean(values, groups) == clustered_mean(values, [10 * group for group in groups])


@pytest.mark.parametrize(
    ("values", "groups", "expected"),
    [
        ([1.0], [0], Estimate(1.0, None, None)),
        ([0.0, 1.0], [3, 3], Estimate(0.5, None, None)),
        ([1.0, 1.0, 1.0], [0, 1, 1], Estimate(1.0, None, None)),
        ([0.0, 0.0], [0, 1], Estimate(0.0, None, None)),
        ([0.0, 1.0], [0, 1], Estimate(0.5, 0.0, 1.0)),
    ],
)
def test_corners_give_numbers_and_no_warning(values: list[float], groups: list[int], expected: Estimate) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clustered_mean(values, groups) == expected


def test_groups_of_equal_means_have_an_exact_interval_or_none() -> None:
    """A bootstrap of them would have no width, however few they are. Six of six: Clopper and Pearson say 0.541 to 1."""
    six = clustered_mean([1.0] * 6, range(6), (0.0, 1.0))
    expected = binomtest(6, 6).proportion_ci(0.95, method="exact")
    assert six == Estimate(1.0, pytest.approx(expected.low), 1.0)  # type: ignore[arg-type]
    differences = clustered_mean([0.0] * 6, range(6), (-1.0, 1.0))
    half = pytest.approx(1 - expected.low)
    assert differences.high == half and differences == Estimate(0.0, -(differences.high or 0), differences.high)
    assert clustered_mean([0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1]) == Estimate(0.5, None, None)
    tenths = clustered_mean([0.1 + 0.2, 0.3], [0, 1])  # equal but for rounding
    assert tenths.low is None
