"""CIDRA: many runs of KV to new places at once, in place (Span queries §5.5.1). The planner, which moves nothing.

moves → duplicates → partial permutation → strongly connected components → batches

A run is `length` consecutive slots: a block of a paged pool, or a document. A batch reads all its sources before it
writes a target. So a move may share a batch with the moves that read what it overwrites, or come after them; only
components have to be whole. A run that goes to several places is copied to each of them straight away, in the moves
that overwrite nothing needed; that needs no memory of its own.

Beside the buffer of one batch there is scratch for one run at most, and only where a cycle of equal runs (of the same
length, each exactly in the place of the next, as blocks are) is longer than a batch: its first run is saved, the others
follow one another, and the saved one comes last. That is the only move beyond those that are asked for. It could be
saved where a run of the cycle is also copied, unrotated, to a place that stays: from there it could be read again. Runs
of a pool are rotated on their way, and its batches hold all of them, so the planner does not look for such copies. Such
cycles take turns. Any other component that is longer than a
batch, of runs that overlap in parts, is moved as one batch of its own; `MovePlan.buffer` tells its length.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

SCRATCH = -1  # the place of a run that a long cycle saves


@dataclass(frozen=True, order=True)
class Move:
    """A run's way from one place to another. `position`: keys are rotated to it on the way; None: they are not."""

    source: int
    target: int
    position: int | None = None
    length: int = 1


@dataclass(frozen=True)
class MovePlan:
    """Batches in order. `duplicates` counts moves from a place that another move reads as well, less the first; a run
    that stays where it is, a move of its own, is among these.

    `scratch` and `buffer`: slots that are saved beside, and slots of the longest batch.
    """

    batches: tuple[tuple[Move, ...], ...]
    duplicates: int
    scratch: int
    buffer: int

    @property
    def num_moves(self) -> int:
        """Of runs, over scratch too."""
        return sum(map(len, self.batches))

    @property
    def num_slots(self) -> int:
        """That are moved, over scratch too."""
        return sum(move.length for batch in self.batches for move in batch)


def plan(moves: Iterable[Move], batch: int) -> MovePlan:
    """Plan moves that take place at once: afterwards each target holds what its source held before.

    Args:
        batch: slots that are moved together at most, but for runs and components that are longer.
    """
    unique = dict.fromkeys(moves)
    listed = [move for move in unique if move.source != move.target or move.position is not None]
    readers, packer = _readers(listed), _Packer(max(batch, *(move.length for move in listed), 1))
    for component in _ordered_components(readers):
        within = set(component)
        before = {reader for index in component for reader in readers[index]} - within
        packer.add([listed[index] for index in component], [listed[index] for index in before])
    sources = {(move.source, move.length) for move in unique}
    return packer.plan(len(unique) - len(sources))


def _readers(moves: Sequence[Move]) -> list[list[int]]:
    """For each move the others that read what it overwrites."""
    by_target = sorted(range(len(moves)), key=lambda index: moves[index].target)
    starts = [moves[index].target for index in by_target]
    for before, after in pairwise(by_target):
        assert moves[before].target + moves[before].length <= moves[after].target, "two runs go to one place"
    readers: list[list[int]] = [[] for _ in moves]
    for reader, move in enumerate(moves):
        at = max(0, bisect.bisect_right(starts, move.source) - 1)
        while at < len(starts) and starts[at] < move.source + move.length:
            writer = by_target[at]
            if writer != reader and move.source < moves[writer].target + moves[writer].length:
                readers[writer].append(reader)
            at += 1
    return readers


def _ordered_components(readers: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The strongly connected components, each after all others that read what it overwrites; long ones first."""
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(readers)))
    graph.add_edges_from((reader, writer) for writer, reading in enumerate(readers) for reader in reading)
    components = networkx.condensation(graph)
    members = components.nodes.data("members")
    for number in networkx.lexicographical_topological_sort(
        components, key=lambda number: (-len(members[number]), min(members[number]))
    ):
        yield sorted(members[number])


def _as_cycle(component: Sequence[Move]) -> list[Move] | None:
    """Moves in the order in which each overwrites the source of the one before; None if they are no such cycle."""
    into = {move.target: move for move in component}
    cycle = [component[0]]
    while len(cycle) < len(component) and (following := into.get(cycle[-1].source)) is not None:
        cycle.append(following)
    is_closed = cycle[-1].source == component[0].target and len(set(cycle)) == len(component)
    return cycle if is_closed and len({move.length for move in component}) == 1 else None


class _Packer:
    """Packs components into batches, each into the first that has room and is early enough: first fit."""

    def __init__(self, batch: int) -> None:
        self._size = batch
        self._batches: list[list[Move]] = []
        self._filled: list[int] = []  # slots of each batch
        self._first_open = 0
        self._read_at: dict[Move, int] = {}  # the batch that reads a move's source
        self._scratch_free = 0  # the batch from which on scratch may be written to
        self._scratch = 0

    def add(self, component: Sequence[Move], readers: Iterable[Move]) -> None:
        """Add a component; `readers`, which read what it overwrites, were added before."""
        earliest = max((self._read_at[move] for move in readers), default=0)
        is_long = sum(move.length for move in component) > self._size
        cycle = _as_cycle(component) if is_long else None
        if cycle is not None:
            self._add_long_cycle(cycle, earliest)
        else:
            self._put(component, earliest)

    def plan(self, duplicates: int) -> MovePlan:
        return MovePlan(tuple(map(tuple, self._batches)), duplicates, self._scratch, max(self._filled, default=0))

    def _add_long_cycle(self, cycle: Sequence[Move], earliest: int) -> None:
        """Save the first run that is overwritten, let the others follow, and bring the saved one to its place."""
        saved, length = cycle[0].target, cycle[0].length
        self._scratch = max(self._scratch, length)
        at = saved_at = self._put((Move(saved, SCRATCH, length=length),), max(earliest, self._scratch_free))
        for move in cycle[:-1]:
            at = self._put((move,), at)
        last = cycle[-1]
        assert last.source == saved
        restored = Move(SCRATCH, last.target, last.position, length)
        self._scratch_free = self._put((restored,), max(at, saved_at + 1))
        self._read_at[last] = saved_at

    def _put(self, moves: Sequence[Move], earliest: int) -> int:
        """Put moves into one batch, at `earliest` or later; returns which."""
        slots, at = sum(move.length for move in moves), max(earliest, self._first_open)
        while at < len(self._batches) and self._filled[at] and self._filled[at] + slots > self._size:
            at += 1
        while len(self._batches) <= at:
            self._batches.append([])
            self._filled.append(0)
        self._batches[at].extend(moves)
        self._filled[at] += slots
        self._read_at.update(dict.fromkeys(moves, at))
        while self._first_open < len(self._batches) and self._filled[self._first_open] >= self._size:
            self._first_open += 1
        return at
