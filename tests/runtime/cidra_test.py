"""CIDRA's planner against a naive copy, bit for bit, and what it may use."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from numpy.typing import NDArray

from pictool.runtime.memory.cidra import SCRATCH, Move, MovePlan, plan

Pool = NDArray[np.uint32]


def moves_of_range(source: int, target: int, length: int, position: int | None = None) -> list[Move]:
    """The moves of `length` consecutive blocks; the two ranges may overlap."""
    return [Move(source + offset, target + offset, position) for offset in range(length)]


def rotated(block: Pool, position: int | None) -> Pool:
    """Stands for a rotation: it does not commute with being done twice."""
    return block.copy() if position is None else block * np.uint32(2654435761) + np.uint32(position & 0xFFFFFFFF)


def slots(place: int, move: Move) -> slice:
    return slice(place, place + move.length)


def naive(pool: Pool, moves: list[Move]) -> Pool:
    after = pool.copy()
    for move in moves:
        after[slots(move.target, move)] = rotated(pool[slots(move.source, move)], move.position)
    return after


def run(pool: Pool, made: MovePlan) -> Pool:
    """As an executor does it: each batch reads all its sources, then writes. The last row is scratch."""
    beside = len(pool)
    held = np.concatenate([pool, np.zeros((made.scratch, pool.shape[1]), dtype=np.uint32)])

    def at(place: int, move: Move) -> slice:
        return slots(beside if place == SCRATCH else place, move)

    for batch in made.batches:
        assert sum(move.length for move in batch) <= made.buffer
        read = [rotated(held[at(move.source, move)], move.position) for move in batch]
        for move, block in zip(batch, read, strict=True):
            held[at(move.target, move)] = block
    return held[:beside]


def random_moves(rng: random.Random, places: int) -> list[Move]:
    """Duplicates, chains, cycles, ranges that overlap themselves, and blocks that stay but turn."""
    targets = rng.sample(range(places), rng.randint(0, places))
    kind = rng.random()
    if kind < 0.3:  # a permutation: cycles
        sources = rng.sample(targets, len(targets))
    elif kind < 0.4:  # one cycle
        sources = targets[1:] + targets[:1]
    elif kind < 0.6:
        length = rng.randint(1, places)
        source, target = (rng.randint(0, places - length) for _ in range(2))
        return moves_of_range(source, target, length, rng.choice([None, target]))
    else:  # duplicates and chains
        sources = rng.choices(range(places), k=len(targets))
    return [
        Move(source, target, rng.choice([None, target, 7])) for source, target in zip(sources, targets, strict=True)
    ]


def random_runs(rng: random.Random, places: int) -> list[Move]:
    """Documents to new places: of all lengths, sources that overlap, targets that do not."""
    moves, at = [], rng.randint(0, 3)
    while at < places:
        length = min(rng.randint(1, 9), places - at)
        moves.append(Move(rng.randint(0, places - length), at, rng.choice([None, at]), length))
        at += length + rng.choice([0, 0, 1, 4])
    rng.shuffle(moves)
    return moves


def permuted_runs(rng: random.Random) -> tuple[int, list[Move]]:
    """The documents of a prompt in another order."""
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
    order = rng.sample(range(len(lengths)), len(lengths))
    moves = [
        Move(sum(lengths[:index]), sum(lengths[other] for other in order[:place]), place, lengths[index])
        for place, index in enumerate(order)
    ]
    return sum(lengths), moves


def has_cycle_longer_than(moves: list[Move], batch: int) -> bool:
    into = {move.target: move.source for move in moves if move.source != move.target}
    for start in into:
        place, length = into[start], 1
        while place != start and place in into and length <= len(into):
            place, length = into[place], length + 1
        if place == start and length > batch:
            return True
    return False


def test_random_moves_are_as_a_naive_copy_within_the_bounds() -> None:
    rng, noise = random.Random(13), np.random.default_rng(13)
    used = 0
    for number in range(2_000):
        places, batch = rng.randint(1, 40), rng.choice([1, 2, 3, 5, 8, 64])
        pool = noise.integers(0, 1 << 32, (places, 2), dtype=np.uint32)
        moves = random_moves(rng, places)
        made = plan(moves, batch)
        assert np.array_equal(run(pool, made), naive(pool, moves)), (number, moves, batch)
        assert all(0 < len(part) <= batch for part in made.batches)
        assert made.scratch == has_cycle_longer_than(moves, batch) <= 1
        kept = [move for move in set(moves) if move.source != move.target or move.position is not None]
        assert made.duplicates == len(set(moves)) - len({move.source for move in moves})
        assert len(kept) <= made.num_moves <= len(kept) + len(made.batches)
        used += made.scratch
    assert used > 100


def test_random_runs_are_as_a_naive_copy() -> None:
    rng, noise = random.Random(14), np.random.default_rng(14)
    whole = 0
    for number in range(3_000):
        if number % 2:
            places, moves = permuted_runs(rng)
        else:
            places = rng.randint(1, 60)
            moves = random_runs(rng, places)
        batch = rng.choice([1, 8, 16, 100])
        pool = noise.integers(0, 1 << 32, (places, 2), dtype=np.uint32)
        made = plan(moves, batch)
        assert np.array_equal(run(pool, made), naive(pool, moves)), (number, moves, batch)
        longest = max((move.length for move in moves), default=0)
        assert made.scratch <= longest and made.buffer <= places
        whole += made.buffer > max(batch, longest)
    assert whole > 100


@pytest.mark.parametrize(
    ("moves", "batch", "want"),
    [
        pytest.param([], 4, [], id="nothing"),
        pytest.param([Move(3, 3)], 4, [], id="a block that stays"),
        pytest.param([Move(3, 3, 5)], 4, [{Move(3, 3, 5)}], id="a block that turns where it is"),
        pytest.param([Move(0, 1), Move(1, 0)], 2, [{Move(0, 1), Move(1, 0)}], id="a swap, in one batch"),
        pytest.param(
            [Move(0, 1), Move(1, 2), Move(2, 3)], 1, [{Move(2, 3)}, {Move(1, 2)}, {Move(0, 1)}],
            id="a chain, from its end",
        ),
        pytest.param(
            [Move(0, 1), Move(0, 2), Move(2, 3)], 1, [{Move(0, 1)}, {Move(2, 3)}, {Move(0, 2)}], id="a duplicate"
        ),
        pytest.param(
            [Move(0, 1), Move(1, 2), Move(2, 0)], 2,
            [{Move(1, SCRATCH), Move(0, 1)}, {Move(2, 0), Move(SCRATCH, 2)}],
            id="a cycle longer than a batch, over scratch",
        ),
        pytest.param(
            [Move(0, 1), Move(1, 0), Move(4, 5), Move(6, 7)], 3,
            [{Move(0, 1), Move(1, 0), Move(4, 5)}, {Move(6, 7)}], id="cycles are packed first",
        ),
    ],
)  # fmt: skip
def test_plans(moves: list[Move], batch: int, want: list[set[Move]]) -> None:
    assert [set(part) for part in plan(moves, batch).batches] == want


def test_independent_moves_fill_their_batches() -> None:
    made = plan(moves_of_range(0, 1000, 1000), 64)
    assert [len(part) for part in made.batches] == [64] * 15 + [40] and made.scratch == 0 == made.duplicates


def test_two_runs_cannot_go_to_one_place() -> None:
    with pytest.raises(AssertionError):
        plan([Move(0, 2), Move(1, 2)], 4)


def test_only_a_long_cycle_costs_a_move_more() -> None:
    """All moves of up to four blocks, with batches of every size."""
    for places in range(1, 5):
        for sources in itertools.product((None, *range(places)), repeat=places):
            moves = [Move(source, target) for target, source in enumerate(sources) if source not in (None, target)]
            for batch in range(1, places + 1):
                assert plan(moves, batch).num_moves == len(moves) + num_long_cycles(moves, batch)


def num_long_cycles(moves: list[Move], batch: int) -> int:
    """Cycles of moves that are longer than a batch, by following each block to where it is read from."""
    source_of = {move.target: move.source for move in moves}
    cycles = set[frozenset[int]]()
    for start in source_of:
        walked, at = list[int](), start
        while at in source_of and at not in walked:
            walked.append(at)
            at = source_of[at]
        if at == start:
            cycles.add(frozenset(walked))
    return sum(len(cycle) > batch for cycle in cycles)
