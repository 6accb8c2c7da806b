"""`make wheel` tries every extra."""

from __future__ import annotations

from benchmarks.wheel import CORE, EXTRAS, NEEDS, SDIST, WORKS


def test_every_extra_has_something_that_it_is_for() -> None:
    assert set(EXTRAS) - {CORE, SDIST} == NEEDS.keys() | WORKS.keys()
