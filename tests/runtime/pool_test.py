"""Repositioning in place, against keys that are rotated to where they belong straight away."""

from __future__ import annotations

import random

import pytest
import subjects
import tiny
import torch

from pictool.errors import ModelError
from pictool.runtime.memory.cidra import Move
from pictool.runtime.memory.pool import Pool
from pictool.runtime.model import Model, wrap_model

BLOCK, BLOCKS = 4, 12
ARCHITECTURES = [name for name in subjects.ARCHITECTURES if name not in subjects.LENGTH_DEPENDENT]


def load(name: str) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[name]()), tiny.tokenizer(), name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_where_they_belong_after_many_rounds(name: str) -> None:
    model, rng = load(name), random.Random(4)
    pool, twin = (Pool(model, BLOCKS * BLOCK, scratch=BLOCK) for _ in range(2))
    torch.manual_seed(1)
    first, second = ((part.heads, BLOCK, part.width) for part in model.geometry.parts)
    held = [[(torch.randn(first), torch.randn(second)) for _ in range(model.geometry.layers)] for _ in range(BLOCKS)]
    positions = [rng.randrange(200) for _ in range(BLOCKS)]
    for at in range(BLOCKS):
        pool.write(at * BLOCK, positions[at], held[at])
    for _ in range(8):
        targets = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
        sources = (
            rng.sample(targets, len(targets)) if rng.random() < 0.5 else rng.choices(range(BLOCKS), k=len(targets))
        )
        moves = [
            Move(source * BLOCK, target * BLOCK, rng.randrange(200), BLOCK)
            for source, target in zip(sources, targets, strict=True)
        ]
        done = pool.reposition(moves, batch=rng.choice([BLOCK, 3 * BLOCK, 1000]))
        assert done.tokens == done.moves * BLOCK and done.scratch in (0, BLOCK) and done.tokens_per_ms > 0
        after = {move.target: (held[move.source // BLOCK], move.position or 0) for move in moves}
        for target, (layers, position) in after.items():
            held[target // BLOCK], positions[target // BLOCK] = layers, position
    for at in range(BLOCKS):
        twin.write(at * BLOCK, positions[at], held[at])
        for layer in range(model.geometry.layers):
            for moved, fresh in zip(
                pool.read(layer, at * BLOCK, BLOCK), twin.read(layer, at * BLOCK, BLOCK), strict=True
            ):
                assert torch.equal(moved, fresh)


def test_short_runs_are_moved_as_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """One index of all against a slice for each."""
    model, moves = load("gemma3"), [Move(at, 40 + at, 100 + 3 * at) for at in range(30)]
    pools = [Pool(model, 80), Pool(model, 80)]
    shape = (model.geometry.kv_heads, 40, model.geometry.head_dim)
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(model.geometry.layers)]
    for pool, length in zip(pools, (0, 1000), strict=True):
        monkeypatch.setattr("pictool.runtime.memory.pool._LONG_RUN", length)
        pool.write(0, 7, layers)
        pool.reposition(moves)
    for layer in range(model.geometry.layers):
        assert all(map(torch.equal, pools[0].read(layer, 40, 30), pools[1].read(layer, 40, 30)))


def test_a_long_cycle_goes_over_scratch() -> None:
    model = load("llama")
    pool = Pool(model, 3 * BLOCK, scratch=BLOCK)
    shape = (model.geometry.kv_heads, BLOCK, model.geometry.head_dim)
    for at in range(3):
        pool.write(at * BLOCK, 7 * at, [(torch.randn(shape), torch.randn(shape))] * model.geometry.layers)
    before = [pool.values[1][:, at * BLOCK : (at + 1) * BLOCK].clone() for at in range(3)]
    moves = [Move(source * BLOCK, target * BLOCK, None, BLOCK) for source, target in ((0, 1), (1, 2), (2, 0))]
    done = pool.reposition(moves, batch=2 * BLOCK)
    assert (done.moves, done.batches, done.scratch, done.buffer) == (4, 2, BLOCK, 2 * BLOCK)
    for move in moves:
        moved = pool.values[1][:, move.target : move.target + BLOCK]
        assert torch.equal(before[move.source // BLOCK], moved)


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-long"])
def test_rope_that_depends_on_the_length_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: "):
        Pool(load(name), BLOCK)
