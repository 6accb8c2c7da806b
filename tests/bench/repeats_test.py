"""Interleaved repeats, and medians of them, by hand."""

from __future__ import annotations

from functools import partial

from pictool.bench.repeats import MedianRange, interleave, median_or_none, median_ratio, rotated


def test_each_repeat_runs_all_begins_one_later_and_the_first_is_a_warm_up() -> None:
    order: list[str] = []
    steps: list[None] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = interleave({name: partial(run, name) for name in "abc"}, 2, lambda: steps.append(None))
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert len(steps) == 9


def test_rotation_goes_round() -> None:
    assert [rotated(["a", "b"], by) for by in (0, 1, 2)] == [["a", "b"], ["b", "a"], ["a", "b"]]
    assert rotated([], 1) == []


def test_medians_and_spread() -> None:
    assert MedianRange.of([5.0, 1.0, 3.0]) == MedianRange(3.0, 1.0, 5.0)
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == 2.0  # of 2, 3 and 0.5; the medians' ratio is 1.33
    assert median_or_none([1.0, 2.0]) == 1.5
    assert median_or_none([1.0, None]) is None and median_or_none([None]) is None
