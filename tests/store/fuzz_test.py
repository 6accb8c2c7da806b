"""A part of the fuzz that `benchmarks/store_fuzz.py` runs at full size."""

from __future__ import annotations

from benchmarks.store_fuzz import MUTATIONS, fuzz


def test_mutated_objects_are_refused() -> None:
    found = fuzz(2100, seed=1)
    assert set(found) == {one.__name__ for one in MUTATIONS}
    for counts in found.values():
        assert counts["refused"] > 100 and set(counts) <= {"refused", "as before"}, found
