"""Caches of decoder layers: however rows are split into passes, they attend to what a prefill of all of them does."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from pictool.core import Layout
from pictool.runtime.attention import Rows, Run
from pictool.runtime.memory.caches import (
    CapturingCache,
    GrowingCache,
    LayerKV,
    PassThroughCache,
    PrefixedCache,
    Projected,
    ProjectionCache,
)
from pictool.runtime.memory.image import Image, ImageCache, ReadOnlyCache
from pictool.runtime.model import wrap_model
from pictool.runtime.rope import tables_at
from pictool.runtime.stack import LayerStack

LENGTH, CUT = 40, 13
ARCHITECTURES = ["llama", "llama3", "qwen3", "gemma3", "phi3-partial"]
WHOLE, REST = (Run(0, 0, LENGTH),), (Run(0, CUT, LENGTH),)


@pytest.fixture(params=ARCHITECTURES)
def stack(request: pytest.FixtureRequest) -> LayerStack:
    return wrap_model(tiny.random_module(tiny.CONFIGS[request.param]()), tiny.tokenizer()).stack


def token_ids(batch: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(3, tiny.VOCAB, (batch, LENGTH)))


def prefill(stack: LayerStack, tokens: Tensor) -> tuple[Tensor, list[LayerKV]]:
    """Hidden states of all tokens, and their un-rotated K and V."""
    tables = stack.rotary_tables(torch.arange(LENGTH))
    cache = CapturingCache(stack, tables)
    return stack.layers(stack.embed(tokens), cache, tables, WHOLE), cache.layers


def prefix_of(stack: LayerStack, layers: list[LayerKV], sequences: int) -> dict[int, LayerKV]:
    """Rotated K and V of the first `CUT` tokens of some sequences."""
    tables = tables_at(stack.rotary_tables(torch.arange(LENGTH)), slice(CUT))
    return {
        layer: (stack.rotate(key[:sequences, :, :CUT], tables, layer), value[:sequences, :, :CUT])
        for layer, (key, value) in enumerate(layers)
    }


def test_capturing_changes_nothing(stack: LayerStack) -> None:
    tokens, tables = token_ids(2), stack.rotary_tables(torch.arange(LENGTH))
    plain = stack.layers(stack.embed(tokens), PassThroughCache(stack, tables), tables, WHOLE)
    hidden, layers = prefill(stack, tokens)
    assert torch.equal(plain, hidden) and len(layers) == stack.num_layers


@pytest.mark.parametrize("sequences", [1, 2, 6])
def test_after_a_prefix_rows_are_as_in_one_pass(stack: LayerStack, sequences: int) -> None:
    """A batch of 6, whose first tokens repeat those of 1, 2 or all 6 sequences."""
    tokens = token_ids(6)
    tokens[:, :CUT] = tokens[:sequences, :CUT].repeat(6 // sequences, 1)
    hidden, layers = prefill(stack, tokens)
    keys: list[Tensor] = []
    rows = tables_at(stack.rotary_tables(torch.arange(LENGTH)), slice(CUT, None))
    cache = PrefixedCache(stack, rows, prefix_of(stack, layers, sequences), lambda layer, key: keys.insert(layer, key))
    rest = stack.layers(stack.embed(tokens[:, CUT:]), cache, rows, REST)
    torch.testing.assert_close(rest, hidden[:, CUT:], atol=1e-5, rtol=1e-5)
    for key, (whole, _) in zip(keys, layers, strict=True):
        torch.testing.assert_close(key, whole[:, :, CUT:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("steps", [[LENGTH], [1] * LENGTH, [CUT, 1, LENGTH - CUT - 1]], ids=str)
def test_growing_in_any_steps_is_as_in_one_pass(stack: LayerStack, steps: list[int]) -> None:
    tokens = token_ids(3)
    hidden, _ = prefill(stack, tokens)
    cache, start, parts = GrowingCache(stack), 0, []
    for step in steps:
        end = start + step
        cache.tables = stack.rotary_tables(torch.arange(start, end))
        parts.append(stack.layers(stack.embed(tokens[:, start:end]), cache, cache.tables, (Run(0, start, end),)))
        start = end
    torch.testing.assert_close(torch.cat(parts, 1), hidden, atol=1e-5, rtol=1e-5)


def test_an_image_takes_what_is_computed_and_a_read_only_cache_gives_it_back(stack: LayerStack) -> None:
    tokens, tables = token_ids(1), stack.rotary_tables(torch.arange(LENGTH))
    image, rows = Image(stack, Layout.of([], [], tokens[0].tolist())), Rows.of(torch.arange(LENGTH))
    image.keep_keys()
    hidden = stack.layers(stack.embed(tokens), ImageCache(image, tables, rows), tables, rows.runs)
    expected, layers = prefill(stack, tokens)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    assert image.fresh_keys is not None and len(image.fresh_keys) == stack.num_layers
    for layer, (key, value) in enumerate(layers):
        torch.testing.assert_close(image.fresh_keys[layer], key, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(image.key(layer), stack.rotate(key, tables, layer), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(image.value(layer), value, atol=1e-5, rtol=1e-5)
    keys = [image.key(layer).clone() for layer in range(stack.num_layers)]
    again = stack.layers(stack.embed(tokens), ReadOnlyCache(image), tables, rows.runs)
    assert torch.equal(again, hidden)
    assert all(torch.equal(key, image.key(layer)) for layer, key in enumerate(keys))


def test_a_projection_gives_the_keys_that_the_layer_would_and_writes_nothing(stack: LayerStack) -> None:
    tokens = token_ids(1)
    _, layers = prefill(stack, tokens)
    image, rows = Image(stack, Layout.of([], [], tokens[0].tolist())), Rows.of(torch.arange(LENGTH))
    zeros = torch.zeros_like(layers[0][0])
    image.write(0, zeros, zeros, rows)
    key, value = image.project(0, stack.embed(tokens), rows)
    tables = stack.rotary_tables(torch.arange(LENGTH))
    assert torch.equal(key, stack.rotate(layers[0][0], tables, 0)) and torch.equal(value, layers[0][1])
    assert not image.key(0).any() and not image.value(0).any()
    with pytest.raises(Projected) as projected:
        stack.layer(0, stack.embed(tokens), ProjectionCache(), tables, WHOLE)
    assert torch.equal(projected.value.key, layers[0][0])
