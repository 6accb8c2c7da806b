"""Repositioning in place, against keys that are rotated to where they belong straight away."""

from __future__ import annotations

import random

import pytest
import tiny
import torch

from pictool.errors import ModelError
from pictool.runtime.model import Model, wrap_model
from pictool.spans.cidra import Move
from pictool.spans.pool import PagedPool

BLOCK, BLOCKS = 4, 12
ARCHITECTURES = [name for name in tiny.CONFIGS if name not in ("llama-dynamic", "phi3-long")]


def load(name: str) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS[name]()), tiny.tokenizer(), name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_are_where_they_belong_after_many_rounds(name: str) -> None:
    model, rng = load(name), random.Random(4)
    pool, twin = PagedPool(model, BLOCKS, BLOCK), PagedPool(model, BLOCKS, BLOCK)
    torch.manual_seed(1)
    shape = (model.geometry.kv_heads, BLOCK, model.geometry.head_dim)
    held = [[(torch.randn(shape), torch.randn(shape)) for _ in range(model.geometry.layers)] for _ in range(BLOCKS)]
    positions = [rng.randrange(200) for _ in range(BLOCKS)]
    for at in range(BLOCKS):
        pool.write(at, positions[at], held[at])
    for _ in range(8):
        targets = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
        sources = (
            rng.sample(targets, len(targets)) if rng.random() < 0.5 else rng.choices(range(BLOCKS), k=len(targets))
        )
        moves = [
            Move(source, target, rng.randrange(200) - positions[source])
            for source, target in zip(sources, targets, strict=True)
        ]
        done = pool.reposition(moves, batch=rng.choice([1, 3, 100]))
        assert done.tokens == done.moves * BLOCK and done.scratch <= 1 and done.tokens_per_ms > 0
        after = {move.target: (held[move.source], positions[move.source] + move.shift) for move in moves}
        for target, (layers, position) in after.items():
            held[target], positions[target] = layers, position
    for at in range(BLOCKS):
        twin.write(at, positions[at], held[at])
        for layer in range(model.geometry.layers):
            for moved, fresh in zip(pool.read(layer, at), twin.read(layer, at), strict=True):
                torch.testing.assert_close(moved, fresh, rtol=0, atol=1e-4)


def test_moves_that_turn_nothing_are_bit_for_bit() -> None:
    model = load("llama")
    pool = PagedPool(model, 3, BLOCK)
    shape = (model.geometry.kv_heads, BLOCK, model.geometry.head_dim)
    for at in range(3):
        pool.write(at, 7 * at, [(torch.randn(shape), torch.randn(shape))] * model.geometry.layers)
    before = [[part.clone() for part in pool.read(1, at)] for at in range(3)]
    done = pool.reposition([Move(0, 1), Move(1, 2), Move(2, 0)], batch=2)
    assert (done.moves, done.batches, done.scratch) == (4, 2, 1)
    for source, target in ((0, 1), (1, 2), (2, 0)):
        assert all(map(torch.equal, before[source], pool.read(1, target)))


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-long"])
def test_rope_that_depends_on_the_length_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"^{name}: its RoPE depends on the prompt's length"):
        PagedPool(load(name), 1, BLOCK)
