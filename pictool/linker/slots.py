"""Free slots of a pool: where so many are in a row, and what has to be evicted for it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Protocol


class Placed(Protocol):
    """What takes the slots [start, end)."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def slots_of(items: Iterable[Placed]) -> list[tuple[int, int]]:
    return [(item.start, item.end) for item in items]


def shared_slots(item: Placed, start: int, end: int) -> int:
    """How many of the slots [start, end) something takes."""
    return max(0, min(item.end, end) - max(item.start, start))


def overlaps(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for span in spans)


def find_room(
    order: Sequence[Placed], used: Sequence[tuple[int, int]], length: int, num_slots: int
) -> tuple[int, int] | None:
    """Where `length` slots are free once the first of `order` are evicted, and how many these are; None: nowhere."""

    def gap(evicted: int) -> int | None:
        return first_gap([*used, *slots_of(order[evicted:])], length, num_slots)

    evicted = bisect.bisect_left(range(len(order) + 1), True, key=lambda count: gap(count) is not None)
    start = gap(evicted) if evicted <= len(order) else None
    return None if start is None else (start, evicted)


def first_gap(used: Sequence[tuple[int, int]], length: int, num_slots: int) -> int | None:
    """Where the first `length` slots begin that nobody uses; None: nowhere."""
    at = 0
    for start, end in sorted(used):
        if start - at >= length:
            return at
        at = max(at, end)
    return at if num_slots - at >= length else None
