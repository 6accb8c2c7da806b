"""Jaccard overlap of the highest scores, on inputs made by hand and against a direct count."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.overlap import chance_overlap, layer_overlap, model_overlap, top_share, top_share_overlap
from pictool.errors import InputError

SCORES = st.lists(st.integers(-3, 3), min_size=1, max_size=30)
PERCENT = st.integers(1, 100)


def chosen(scores: list[int], percent: int) -> set[int]:
    """⌈percent · n / 100⌉ in whole numbers, by (score, earlier first)."""
    count = -(-percent * len(scores) // 100)
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


@settings(max_examples=200, deadline=None)
@given(SCORES, PERCENT)
def test_the_highest_share_is_counted_exactly(scores: list[int], percent: int) -> None:
    array = np.array(scores)
    for got in (top_share(array, percent / 100), top_share(array.astype(np.float32), percent / 100)):
        assert set(np.flatnonzero(got)) == chosen(scores, percent)


def test_the_share_is_rounded_up_without_float_error() -> None:
    assert top_share(np.arange(100.0), 0.07).sum() == 7  # 0.07 · 100 is 7.000000000000001
    assert top_share(np.arange(15.0), 0.2).sum() == 3
    assert top_share(np.arange(11.0), 0.2).sum() == 3
    assert top_share(np.arange(3.0), 1e-12).sum() == 1


def test_equal_scores_are_taken_from_the_front() -> None:
    assert top_share(np.ones(10), 0.25).tolist() == [True] * 3 + [False] * 7
    assert top_share(np.array([0, 5, 0, 5, 5.0]), 0.4).tolist() == [False, True, False, True, False]
    assert top_share(np.array([3, 1, 2], dtype=np.uint8), 0.5).tolist() == [True, False, True]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30), PERCENT)
def test_overlap_is_jaccard(pairs: list[tuple[int, int]], percent: int) -> None:
    a, b = ([pair[i] for pair in pairs] for i in (0, 1))
    got = top_share_overlap(np.array(a), np.array(b), percent / 100)
    of_a, of_b = chosen(a, percent), chosen(b, percent)
    assert got == pytest.approx(len(of_a & of_b) / len(of_a | of_b))
    assert top_share_overlap(np.array(a), np.array(a), percent / 100) == 1


def test_overlap_of_layers_made_by_hand() -> None:
    layers = np.array(
        [
            [9, 8, 7, 0, 0, 0, 0, 0, 0, 0],  # chooses 0 1 2
            [9, 8, 0, 7, 0, 0, 0, 0, 0, 0],  # 0 1 3
            [0, 0, 0, 9, 8, 7, 0, 0, 0, 0],  # 3 4 5
            [1, 2, 3, 0, 0, 0, 0, 0, 0, 0],  # 2 1 0
        ],
        dtype=np.float32,
    )
    overlap = layer_overlap(layers, 0.3)
    assert overlap.first.tolist() == [0.5, 0.0, 1.0]
    assert overlap.neighbours.tolist() == pytest.approx([0.5, 0.2, 0.0])
    assert overlap.share == 0.3 and overlap.chance == chance_overlap(10, 0.3)
    alone = layer_overlap(layers[:1])
    assert alone.share == 0.2 and alone.first.shape == alone.neighbours.shape == (0,)


def test_overlap_of_models_made_by_hand() -> None:
    speculative, target = np.array([5.0, 4, 3, 2, 1]), np.array([50.0, 0, 40, 0, 0])
    overlap = model_overlap(speculative, target, 0.4)
    assert overlap.share == 0.4 and overlap.jaccard == pytest.approx(1 / 3)
    assert overlap.chance == chance_overlap(5, 0.4)
    assert model_overlap(speculative, speculative * 7 + 1).jaccard == 1


@pytest.mark.parametrize(("n", "count"), [(1, 1), (5, 1), (5, 2), (6, 3), (7, 6), (4, 4)])
def test_chance_is_the_mean_over_all_pairs_of_choices(n: int, count: int) -> None:
    fixed = set(range(count))
    every = [set(choice) for choice in itertools.combinations(range(n), count)]
    expected = sum(Fraction(len(fixed & other), len(fixed | other)) for other in every) / len(every)
    assert chance_overlap(n, count / n) == pytest.approx(float(expected))


def test_chance_of_random_scores_is_met_by_random_scores() -> None:
    draw = np.random.default_rng(0)
    overlap = [top_share_overlap(draw.random(200), draw.random(200)) for _ in range(300)]
    assert np.mean(overlap) == pytest.approx(chance_overlap(200), abs=0.01)


@pytest.mark.parametrize(
    ("a", "b", "share", "named"),
    [
        (np.ones(3), np.ones(4), 0.2, r"\(3,\) .*\(4,\)"),
        (np.ones(0), np.ones(0), 0.2, r"\(0,\)"),
        (np.ones((2, 2)), np.ones((2, 2)), 0.2, r"\(2, 2\)"),
        (np.array([1.0, np.nan]), np.ones(2), 0.2, "nan"),
        (np.ones(3), np.ones(3), 0.0, "0.0"),
        (np.ones(3), np.ones(3), 1.1, "1.1"),
        (np.ones(3), np.ones(3), float("nan"), "nan"),
    ],
)
def test_what_cannot_be_compared_is_refused(a: Any, b: Any, share: float, named: str) -> None:
    for overlap in (top_share_overlap, model_overlap):
        with pytest.raises(InputError, match=named):
            overlap(a, b, share)


def test_layers_of_another_shape_are_refused() -> None:
    for wrong in (np.ones(3), np.ones((0, 3)), np.ones((2, 0))):
        with pytest.raises(InputError):
            layer_overlap(wrong)
    with pytest.raises(InputError, match=r"^0 "):
        chance_overlap(0)
