"""The measurement of two revisions side by side, on sides that take what the test says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.against import compare


class FakeSide:
    """Takes `seconds` for its nth run, and notes that it ran."""

    def __init__(self, name: str, seconds: list[float], log: list[str]) -> None:
        self._name, self._seconds, self._log = name, iter(seconds), log

    def runs(self) -> list[str]:
        return ["full"]

    def run(self, name: str) -> float:
        self._log.append(self._name)
        return next(self._seconds)


def test_runs_alternate_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    this: Any = FakeSide("this", [100.0, 2.0, 3.0, 8.0], log)
    other: Any = FakeSide("other", [1.0, 1.0, 2.0, 8.0], log)
    result = compare(this, other, 3)["full"]
    assert log == ["other", "this", "this", "other", "other", "this", "this", "other"]
    assert result["this_s"] == [2.0, 3.0, 8.0] and result["other_s"] == [1.0, 2.0, 8.0]
    assert result["ratio"] == pytest.approx(1.5), "the median of the repeats' ratios, not a ratio of medians"
    assert (result["median_this_s"], result["median_other_s"]) == (3.0, 2.0)
