"""Rounds, medians, lengths, exponents: the arithmetic of measuring, by hand and against scipy."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from scipy.stats import linregress

from pictool.bench.growth import Growth, upper_half
from pictool.bench.options import ContextOptions, PromptOptions
from pictool.bench.rounds import Spread, median_of, median_ratio, rotated, rounds
from pictool.errors import InputError


def test_each_round_runs_all_begins_one_later_and_the_first_is_thrown_away() -> None:
    order: list[str] = []
    steps: list[None] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = rounds({name: partial(run, name) for name in "abc"}, 2, lambda: steps.append(None))
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert len(steps) == 9


def test_rotation_goes_round() -> None:
    assert [rotated(["a", "b"], by) for by in (0, 1, 2)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert rotated([], 1) == []


def test_medians_and_spread() -> None:
    assert Spread.of([5.0, 1.0, 3.0]) == Spread(3.0, 1.0, 5.0)
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == 2.0  # of 2, 3 and 0.5; the medians' ratio is 1.33
    assert median_of([1.0, 2.0]) == 1.5
    assert median_of([1.0, None]) is None and median_of([None]) is None


def test_a_power_law_gives_its_exponent() -> None:
    tokens = [1024, 2048, 4096, 8192]
    fit = Growth.fit(tokens, [3e-9 * n**1.7 for n in tokens])
    assert fit is not None and fit.error is not None
    assert fit.exponent == pytest.approx(1.7) and fit.error == pytest.approx(0, abs=1e-6)


def test_exponent_and_error_are_those_of_scipy() -> None:
    tokens = [1000, 1500, 4000, 9000, 30000]
    seconds = np.random.default_rng(0).uniform(0.5, 2, 5) * np.array(tokens) ** 1.3
    fit, expected = Growth.fit(tokens, list(seconds)), linregress(np.log(tokens), np.log(seconds))
    assert fit is not None
    assert (fit.exponent, fit.error) == pytest.approx((expected.slope, expected.stderr))


def test_two_lengths_have_no_error_and_one_no_exponent() -> None:
    fit = Growth.fit([10, 100], [1.0, 10.0])
    assert fit is not None and fit.exponent == pytest.approx(1.0) and fit.error is None
    assert Growth.fit([10], [1.0]) is None and Growth.fit([], []) is None
    assert [str(one) for one in (Growth(1.234, None), Growth(2.0, 0.056))] == ["1.23", "2.00 ± 0.06"]


def test_the_longer_half_has_the_middle_one() -> None:
    assert [list(range(n))[upper_half(n)] for n in (1, 2, 5, 6)] == [[0], [1], [2, 3, 4], [3, 4, 5]]


def test_lengths_double_up_to_the_last() -> None:
    assert ContextOptions().lengths == (1024, 2048, 4096, 8192, 16384, 32768)
    assert ContextOptions(start=1000, stop=3999).lengths == (1000, 2000)
    assert ContextOptions(start=1000, stop=1000).lengths == (1000,)
    assert PromptOptions().num_tokens == 8 * 512 + 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunks": 0}, "--chunks 0: must be 1 or more"),
        ({"chunk_tokens": 0}, "--chunk-tokens 0"),
        ({"tail_tokens": 0}, "--tail-tokens 0"),
        ({"new_tokens": -1}, "--new-tokens -1: must be 0 or more"),
        ({"repeats": 0}, "--repeats 0"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_prompts_that_cannot_be_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PromptOptions(**wrong)  # type: ignore[arg-type]


def test_lengths_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="--from 32: must be more than the 32 tokens of the tail"):
        ContextOptions(start=32)
    with pytest.raises(InputError, match="--to 512: must be at least --from 1024"):
        ContextOptions(stop=512)
