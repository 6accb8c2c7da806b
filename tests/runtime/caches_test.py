"""Caches of decoder layers: however rows are split into passes, they attend to what a prefill of all of them does."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from pictool.core import Layout
from pictool.runtime.memory.caches import (
    CapturingCache,
    LayerKV,
    PassThroughCache,
    Projected,
    ProjectionCache,
)
from pictool.runtime.memory.image import Image, ImageCache, ReadOnlyCache
from pictool.runtime.model import wrap_model
from pictool.runtime.rows import Rows, Run
from pictool.runtime.stack import LayerStack

LENGTH = 40
ARCHITECTURES = ["llama", "llama3", "qwen3", "gemma3", "phi3-partial"]
WHOLE = (Run(0, 0, LENGTH),)


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


def test_capturing_changes_nothing(stack: LayerStack) -> None:
    tokens, tables = token_ids(2), stack.rotary_tables(torch.arange(LENGTH))
    plain = stack.layers(stack.embed(tokens), PassThroughCache(stack, tables), tables, WHOLE)
    hidden, layers = prefill(stack, tokens)
    assert torch.equal(plain, hidden) and len(layers) == stack.num_layers


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
