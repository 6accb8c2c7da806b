"""CIDRA's planner against a naive copy, bit for bit, and what it may use."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from pictool.spans.cidra import SCRATCH, Move, Plan, moves_of_range, plan

Pool = NDArray[np.uint32]


def shifted(block: Pool, shift: int) -> Pool:
    """Stands for a rotation: it does not commute with being done twice."""
    return block * np.uint32(2654435761) + np.uint32(shift & 0xFFFFFFFF) if shift else block.copy()


def naive(pool: Pool, moves: list[Move]) -> Pool:
    after = pool.copy()
    for move in moves:
        after[move.target] = shifted(pool[move.source], move.shift)
    return after


def run(pool: Pool, made: Plan) -> Pool:
    """As an executor does it: each batch reads all its sources, then writes. The last row is scratch."""
    held = np.concatenate([pool, np.zeros((1, pool.shape[1]), dtype=np.uint32)])
    for batch in made.batches:
        assert len({move.target for move in batch}) == len(batch)
        read = [shifted(held[move.source], move.shift) for move in batch]
        for move, block in zip(batch, read, strict=True):
            held[move.target] = block
    return held[:SCRATCH]


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
        return moves_of_range(source, target, length, rng.choice([0, target - source]))
    else:  # duplicates and chains
        sources = rng.choices(range(places), k=len(targets))
    return [
        Move(source, target, rng.choice([0, target - source, 7]))
        for source, target in zip(sources, targets, strict=True)
    ]


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
    for number in range(10_000):
        places, batch = rng.randint(1, 40), rng.choice([1, 2, 3, 5, 8, 64])
        pool = noise.integers(0, 1 << 32, (places, 2), dtype=np.uint32)
        moves = random_moves(rng, places)
        made = plan(moves, batch)
        assert np.array_equal(run(pool, made), naive(pool, moves)), (number, moves, batch)
        assert all(0 < len(part) <= batch for part in made.batches)
        assert made.scratch == has_cycle_longer_than(moves, batch) <= 1
        kept = [move for move in set(moves) if move.source != move.target or move.shift]
        assert made.duplicates == len(kept) - len({move.source for move in kept})
        assert len(kept) <= made.num_moves <= len(kept) + len(made.batches)
        used += made.scratch
    assert used > 500


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


def test_two_blocks_cannot_go_to_one_place() -> None:
    with pytest.raises(AssertionError, match="two blocks go to one place"):
        plan([Move(0, 2), Move(1, 2)], 4)
