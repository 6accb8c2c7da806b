"""CIDRA: many blocks of KV to new places at once, in place (Span queries §5.5.1). The planner, which moves nothing.

moves → duplicates → partial permutation → strongly connected components → batches

A batch reads all its sources before it writes a target. So a move may share a batch with the moves that read what it
overwrites, or come after them; only cycles have to be whole. A target has one source, so the moves of a component are
one cycle or a single move. A block that goes to several places is copied to each of them straight away, in the moves
that overwrite nothing needed; that needs no memory of its own.

Beside the buffer of one batch there is scratch for one block at most, and only where a cycle is longer than a batch:
its first block is saved, the others follow one another, and the saved one comes last. Such cycles take turns.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SCRATCH = -1  # the place of a block that a long cycle saves


@dataclass(frozen=True, order=True)
class Move:
    """A block's way from one place to another; `shift` is by how many positions its keys are rotated on it."""

    source: int
    target: int
    shift: int = 0


@dataclass(frozen=True)
class Plan:
    """Batches in order. `duplicates` counts moves from a place that another move reads as well, less the first."""

    batches: tuple[tuple[Move, ...], ...]
    duplicates: int
    scratch: int

    @property
    def num_moves(self) -> int:
        """Of blocks, over scratch too."""
        return sum(map(len, self.batches))


def moves_of_range(source: int, target: int, length: int, shift: int = 0) -> list[Move]:
    """The moves of `length` consecutive places; the two ranges may overlap."""
    return [Move(source + offset, target + offset, shift) for offset in range(length)]


def plan(moves: Iterable[Move], batch: int) -> Plan:
    """Plan moves that take place at once: afterwards each target holds what its source held before.

    Args:
        batch: blocks that are moved together at most.
    """
    assert batch > 0
    listed = [move for move in dict.fromkeys(moves) if move.source != move.target or move.shift]
    into = {move.target: move for move in listed}
    assert len(into) == len(listed), "two blocks go to one place"
    units = _units(into)
    packer = _Packer(batch)
    for unit in _ordered(units, listed):
        packer.add(unit)
    readers = {move.source for move in listed}
    return Plan(packer.batches(), len(listed) - len(readers), int(packer.uses_scratch))


def _units(into: dict[int, Move]) -> list[tuple[Move, ...]]:
    """The strongly connected components: cycles, in the order in which a move overwrites the source of the one before.

    All other moves are units of their own.
    """
    units: list[tuple[Move, ...]] = []
    visit: dict[int, int] = {}  # place → the walk that came by
    in_cycle: set[int] = set()
    for number, start in enumerate(into):
        place, walk = start, []
        while place in into and place not in visit:
            visit[place] = number
            walk.append(place)
            place = into[place].source
        if visit.get(place) == number:
            cycle = walk[walk.index(place) :]
            in_cycle.update(cycle)
            units.append(tuple(into[member] for member in cycle))
    return units + [(move,) for place, move in into.items() if place not in in_cycle]


def _ordered(units: Sequence[tuple[Move, ...]], moves: Sequence[Move]) -> Iterable[tuple[Move, ...]]:
    """Units, each after all others that read what it overwrites; of those that may come next, long ones first."""
    unit_of = {move.target: index for index, unit in enumerate(units) for move in unit}
    waits = [0] * len(units)
    for move in moves:
        writer = unit_of.get(move.source)
        if writer is not None and writer != unit_of[move.target]:
            waits[writer] += 1
    ready = [(-len(unit), index) for index, unit in enumerate(units) if not waits[index]]
    heapq.heapify(ready)
    while ready:
        _, index = heapq.heappop(ready)
        yield units[index]
        for move in units[index]:
            writer = unit_of.get(move.source)
            if writer is not None and writer != index:
                waits[writer] -= 1
                if not waits[writer]:
                    heapq.heappush(ready, (-len(units[writer]), writer))


class _Packer:
    """Packs units into batches, each into the first that has room and is early enough: first fit."""

    def __init__(self, batch: int) -> None:
        self._size = batch
        self._batches: list[list[Move]] = []
        self._first_open = 0
        self._last_reader: dict[int, int] = {}  # place → the last batch that reads it
        self._scratch_free = 0  # the batch from which on scratch may be written to
        self.uses_scratch = False

    def add(self, unit: tuple[Move, ...]) -> None:
        """Add a unit; all that read what it overwrites were added before."""
        earliest = max((self._last_reader.get(move.target, 0) for move in unit), default=0)
        if len(unit) <= self._size:
            self._put(unit, earliest)
        else:
            self._add_long_cycle(unit, earliest)

    def batches(self) -> tuple[tuple[Move, ...], ...]:
        return tuple(map(tuple, self._batches))

    def _add_long_cycle(self, cycle: tuple[Move, ...], earliest: int) -> None:
        """Save the first block that is overwritten, let the others follow, and bring the saved one to its place."""
        self.uses_scratch = True
        saved = cycle[0].target
        at = saved_at = self._put((Move(saved, SCRATCH),), max(earliest, self._scratch_free))
        for move in cycle[:-1]:
            at = self._put((move,), at)
        last = cycle[-1]
        assert last.source == saved
        self._scratch_free = self._put((Move(SCRATCH, last.target, last.shift),), max(at, saved_at + 1))

    def _put(self, moves: tuple[Move, ...], earliest: int) -> int:
        """Put moves into one batch, at `earliest` or later; returns which."""
        at = max(earliest, self._first_open)
        while at < len(self._batches) and len(self._batches[at]) + len(moves) > self._size:
            at += 1
        while len(self._batches) <= at:
            self._batches.append([])
        self._batches[at].extend(moves)
        for move in moves:
            self._last_reader[move.source] = max(at, self._last_reader.get(move.source, 0))
        while self._first_open < len(self._batches) and len(self._batches[self._first_open]) == self._size:
            self._first_open += 1
        return at
