"""A part of the fuzz that `benchmarks/store_fuzz.py` runs at full size."""

from __future__ import annotations

from benchmarks.store_fuzz import MUTATIONS, fuzz


def test_mutated_objects_are_refused() -> None:
    outcomes = fuzz(2100, seed=1)
    assert set(outcomes) == {mutation.__name__ for mutation in MUTATIONS}
    for counts in outcomes.values():
        assert counts["refused"] > 100 and set(counts) <= {"refused", "as before"}, outcomes
