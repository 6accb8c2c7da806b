"""Attention probabilities and hidden-state norms against transformers' own eager forward."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from subjects import ARCHITECTURES, LENGTHS, Subject, make_chunks, of_keys, run, subject
from torch import Tensor

from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.runtime.activations import attention_of_rows, hidden_norms
from pictool.runtime.architectures import cache_name
from pictool.runtime.decode import generate
from pictool.runtime.memory.caches import PassThroughCache
from pictool.runtime.memory.image import Image, ReadOnlyCache
from pictool.runtime.model import wrap_model
from pictool.runtime.rows import Run
from pictool.store.store import Store

NUM_LAYERS = 3


def image_of(tested: Subject, store: Store, policy: str) -> Image:
    return run(tested, store, make_policy(policy, {}), make_chunks(LENGTHS)).image


def tail_of(image: Image) -> list[int]:
    return list(range(*image.layout.tail))


def eager_attention(module: Any, image: Image, reused: Tensor) -> list[Tensor]:
    """Per layer [heads, n, n], the rows where `reused` holds having the image's own K and V."""
    layers = range(image.stack.num_layers)
    cache = reference.Splice([(image.key(layer), image.value(layer)) for layer in layers], reused)
    ids = torch.from_numpy(image.layout.tokens.astype(np.int64))[None]
    with torch.no_grad():
        out = module(input_ids=ids, use_cache=True, output_attentions=True, **{cache_name(module): cache})
    return [attention[0] for attention in out.attentions]


def assert_close(got: list[Tensor], expected: list[Tensor], rows: list[int], atol: float = 1e-4) -> None:
    assert len(got) == len(expected) == NUM_LAYERS
    for probabilities, eager in zip(got, expected, strict=True):
        assert probabilities.dtype == torch.float32
        torch.testing.assert_close(probabilities, of_keys(eager[:, rows].float()), atol=atol, rtol=0)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(probabilities.shape[:2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tail_of_full_attends_as_in_transformers(architecture: str, store: Store) -> None:
    tested = subject(architecture)
    image = image_of(tested, store, "full")
    expected = eager_attention(tested.reference, image, torch.zeros(image.num_tokens, dtype=torch.bool))
    assert_close(list(attention_of_rows(image, tail_of(image))), expected, tail_of(image))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scattered_rows_attend_as_in_transformers(architecture: str, store: Store) -> None:
    """Rows in and across windows and chunks: single ones, runs, the first and the last."""
    tested, rows = subject(architecture), [0, 1, 5, 13, 14, 15, 16, 40, 70]
    image = image_of(tested, store, "full")
    rows = [*rows, image.num_tokens - 1]
    expected = eager_attention(tested.reference, image, torch.zeros(image.num_tokens, dtype=torch.bool))
    assert_close(list(attention_of_rows(image, np.array(rows, dtype=np.int32))), expected, rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tail_of_a_link_attends_to_what_was_reused(architecture: str, store: Store) -> None:
    tested = subject(architecture)
    image = image_of(tested, store, "naive")
    reused = torch.arange(image.num_tokens) < image.layout.num_context
    expected = eager_attention(tested.reference, image, reused)
    assert_close(list(attention_of_rows(image, tail_of(image))), expected, tail_of(image))


def test_half_precision_attends_the_same_within_its_noise(store: Store) -> None:
    module = tiny.random_module(tiny.CONFIGS["llama"]()).to(torch.bfloat16)
    tested = Subject(wrap_model(module, tiny.tokenizer(), "half"), reference.eager(module))
    image = image_of(tested, store, "full")
    expected = eager_attention(tested.reference, image, torch.zeros(image.num_tokens, dtype=torch.bool))
    assert_close(list(attention_of_rows(image, tail_of(image))), expected, tail_of(image), atol=0.02)


@pytest.mark.parametrize("architecture", ["llama", "llama-dynamic", "gemma2"])
def test_reading_attention_leaves_the_image_as_it_is(architecture: str, store: Store) -> None:
    """Before and after decoding; decoded tokens are left out, and decoding goes on as if it had not been read."""
    tested = subject(architecture)
    image, unseen = image_of(tested, store, "naive"), image_of(tested, store, "naive")
    before = [attention.clone() for attention in attention_of_rows(image, tail_of(image))]
    kv_before = [x.clone() for layer in range(NUM_LAYERS) for x in (image.key(layer), image.value(layer))]
    prompt = image.num_tokens
    expected = [generate(tested.model, unseen, 8).tokens, generate(tested.model, unseen, 8).tokens]
    first = generate(tested.model, image, 8).tokens
    again = list(attention_of_rows(image, tail_of(image)))
    assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
    assert again[0].shape[-1] == prompt < image.num_tokens == unseen.num_tokens - len(expected[1]) + 1
    now = [x[:, :, :prompt] for layer in range(NUM_LAYERS) for x in (image.key(layer), image.value(layer))]
    assert all(torch.equal(a, b) for a, b in zip(kv_before, now, strict=True))
    assert [first, generate(tested.model, image, 8).tokens] == expected


@pytest.mark.parametrize("rows", [[], [-1, 3], [3, 10_000], [4, 4], [5, 4]])
def test_rows_must_be_ascending_positions_of_the_prompt(rows: list[int], store: Store) -> None:
    image = image_of(subject("llama"), store, "full")
    with pytest.raises(InputError, match=" 0 to 88"):
        attention_of_rows(image, rows)


def hooked_norms(module: Any, ids: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Norms in float64 of what each of transformers' decoder layers returns."""
    outputs: list[Tensor] = []
    for layer in module.model.layers:
        layer.register_forward_hook(lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        module(torch.from_numpy(ids.astype(np.int64))[None])
    return [np.linalg.norm(out[0].double().numpy(), axis=-1) for out in outputs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_norms_are_those_of_transformers_layers(architecture: str) -> None:
    tested, ids = subject(architecture), np.random.default_rng(1).integers(0, tiny.VOCAB, 150).astype(np.int32)
    norms = hidden_norms(tested.model, ids)
    assert norms.dtype == np.float32 and norms.shape == (NUM_LAYERS, 150)
    np.testing.assert_allclose(norms, hooked_norms(tested.reference, ids), rtol=1e-5, atol=1e-4)
    assert np.ptp(norms, axis=1).min() > 0.1
    np.testing.assert_allclose(
        hidden_norms(tested.model, ids[:1])[0], hooked_norms(tested.reference, ids[:1])[0], rtol=1e-5
    )


def test_hidden_norms_are_one_forward_that_keeps_no_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer asks for K and V, those of all layers before it are gone."""
    model, earlier, calls = subject("llama").model, list[weakref.ref[Tensor]](), list[tuple[int, int]]()
    update = PassThroughCache.update

    def watched(self: Any, key: Tensor, value: Tensor, layer: int, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        assert not any(ref() is not None for ref in earlier)
        out = update(self, key, value, layer, *more, **named)
        earlier.extend(map(weakref.ref, (key, value, *out)))
        calls.append((layer, key.shape[2]))
        return out

    monkeypatch.setattr(PassThroughCache, "update", watched)
    hidden_norms(model, np.arange(40))
    assert calls == [(layer, 40) for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("length", [0, 513])
def test_hidden_norms_refuse_what_the_model_cannot_read(length: int) -> None:
    with pytest.raises(InputError, match=f"^{length} .*llama .* 512"):
        hidden_norms(subject("llama").model, np.zeros(length, dtype=np.int32))


def test_reporting_scores_changes_no_output(store: Store) -> None:
    """Hidden states are the same whether scores are reported or not."""
    image = image_of(subject("gemma2"), store, "full")
    stack, length = image.stack, image.num_tokens
    tables = stack.rotary_tables(torch.arange(length))
    hidden = stack.embed(torch.from_numpy(image.layout.tokens.astype(np.int64))[None])
    runs = (Run(0, 0, length),)
    layer = partial(stack.layer, 0, hidden, ReadOnlyCache(image), tables, runs)
    seen: list[Tensor] = []
    assert torch.equal(layer(), layer(on_scores=seen.append))
    assert [x.shape for x in seen] == [(1, 4, length, length)]
