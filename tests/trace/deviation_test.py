"""Deviation from full recompute: of KV and attention against transformers' own, of probabilities by the textbook."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from numpy.typing import NDArray
from subjects import ARCHITECTURES, HEAD, LENGTH_DEPENDENT, LENGTHS, make_chunks, of_keys, parts_of, run, subject
from traces import trace_of_link

from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy
from pictool.runtime.architectures import cache_name
from pictool.runtime.decode import generate
from pictool.runtime.memory.image import Image
from pictool.runtime.model import wrap_model
from pictool.store.store import Store
from pictool.trace.analysis import analyse_trace
from pictool.trace.deviation import (
    AttentionDeviation,
    DeviationFromFull,
    KVDeviation,
    _cosine_distance,
    attention_deviation,
    kv_deviation,
)
from pictool.trace.format import Trace

Array = NDArray[np.float64]
FIXED_ROPE = [architecture for architecture in ARCHITECTURES if architecture not in LENGTH_DEPENDENT]


def linked_by(architecture: str, store: Store, policy: str, tail: str = " why?", **fields: Any) -> Linked:
    return run(subject(architecture), store, make_policy(policy, fields), make_chunks(LENGTHS), HEAD, tail)


def dense_kv(dense: reference.Dense) -> tuple[Array, Array]:
    """K and V of transformers' forward, float64 [layers, n, kv_heads · head_dim]."""
    key, value = (
        np.stack([x[i][0].double().numpy().transpose(1, 0, 2).reshape(x[i].shape[2], -1) for x in dense.kv])
        for i in (0, 1)
    )
    return key, value


def cosine_distance(a: Array, b: Array) -> Array:
    cosine: Array = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return 1 - cosine


# KV


@pytest.mark.parametrize("architecture", FIXED_ROPE)
def test_kv_deviation_is_that_of_transformers_kv(architecture: str, store: Store) -> None:
    linked = linked_by(architecture, store, "naive")
    full = linked_by(architecture, store, "full").image
    rows = torch.arange(full.num_tokens) >= full.layout.num_context
    k, v = dense_kv(reference.link(subject(architecture).reference, parts_of(linked), rows))
    full_k, full_v = dense_kv(reference.full(subject(architecture).reference, full.layout.tokens.tolist()))
    deviation = kv_deviation(linked.image, full)
    for got in (deviation.key, deviation.value, deviation.cosine):
        assert got.dtype == np.float32 and got.shape == (3, full.num_tokens)
    np.testing.assert_allclose(deviation.key, np.linalg.norm(k - full_k, axis=-1), atol=1e-4)
    np.testing.assert_allclose(deviation.value, np.linalg.norm(v - full_v, axis=-1), atol=1e-4)
    whole, full_whole = np.concatenate([k, v], -1), np.concatenate([full_k, full_v], -1)
    np.testing.assert_allclose(deviation.both, np.linalg.norm(whole - full_whole, axis=-1), atol=2e-4)
    np.testing.assert_allclose(deviation.cosine, cosine_distance(whole, full_whole), atol=1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layer_0_deviates_nowhere_and_deeper_layers_do(architecture: str, store: Store) -> None:
    """Rule 3, and that the head is exact at every layer."""
    linked, full = linked_by(architecture, store, "naive"), linked_by(architecture, store, "full").image
    deviation = kv_deviation(linked.image, full)
    for got in (deviation.key, deviation.value, deviation.cosine):
        assert got[0].max() <= 1e-4
        assert got[1:].max(1).min() > 1e-3
        assert got[:, : full.layout.head[1]].max() <= 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_deviates_nowhere_from_full(architecture: str, store: Store) -> None:
    image, again = (linked_by(architecture, store, "full").image for _ in range(2))
    deviation = kv_deviation(image, again)
    assert not any(got.any() for got in (deviation.key, deviation.value, deviation.cosine, deviation.both))
    assert not attention_deviation(image, again).layers.any()


def test_decoded_tokens_are_left_out(store: Store) -> None:
    linked, full = linked_by("llama", store, "naive").image, linked_by("llama", store, "full").image
    kv, attention = kv_deviation(linked, full), attention_deviation(linked, full)
    generate(subject("llama").model, linked, 5)
    generate(subject("llama").model, full, 3)
    assert np.array_equal(kv_deviation(linked, full).both, kv.both)
    assert np.array_equal(attention_deviation(linked, full).layers, attention.layers)


def test_the_cosine_distance_of_vectors_made_by_hand() -> None:
    a = torch.tensor([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 2.0], [1e-42, 0.0]])
    b = torch.tensor([[6.0, 8.0], [0.0, 2.0], [-5.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = _cosine_distance(a, b)
    assert got[:6].tolist() == pytest.approx([0, 1, 2, 0, 1, 1], abs=1e-6)
    assert bool(torch.isfinite(got).all())


@pytest.mark.parametrize("measure", [kv_deviation, attention_deviation])
def test_images_of_different_prompts_or_models_are_refused(measure: Any, store: Store) -> None:
    linked, other = linked_by("llama", store, "naive").image, linked_by("llama", store, "full", " who?").image
    with pytest.raises(InputError, match=r"\(\d+ .* \d+ "):
        measure(linked, other)
    small = tiny.CONFIGS["llama"]()
    small.num_hidden_layers = 2
    model = wrap_model(tiny.random_module(small), tiny.tokenizer(), "small")
    with pytest.raises(InputError, match=r"layers=3.*layers=2"):
        measure(linked, Image(model.stack, linked.layout))


# Attention


@pytest.mark.parametrize("architecture", FIXED_ROPE)
def test_attention_deviation_is_that_of_transformers_attentions(architecture: str, store: Store) -> None:
    linked, full = linked_by(architecture, store, "naive").image, linked_by(architecture, store, "full").image
    attentions = []
    for image, reused in ((linked, image_context(linked)), (full, torch.zeros(full.num_tokens, dtype=torch.bool))):
        cache = reference.Splice([(image.key(layer), image.value(layer)) for layer in range(3)], reused)
        ids = torch.from_numpy(image.layout.tokens.astype(np.int64))[None]
        with torch.no_grad():
            module = subject(architecture).reference
            out = module(input_ids=ids, use_cache=True, output_attentions=True, **{cache_name(module): cache})
        attentions.append(
            np.stack([of_keys(x[0, :, slice(*image.layout.tail)].double()).numpy() for x in out.attentions])
        )
    difference = attentions[0] - attentions[1]  # [layers, heads, tail rows, n]
    expected = np.sqrt((difference**2).sum((2, 3))).mean(1)
    deviation = attention_deviation(linked, full)
    np.testing.assert_allclose(deviation.layers, expected, atol=1e-4)
    assert deviation.mean == pytest.approx(float(expected.mean()), abs=1e-4)
    assert deviation.layers[0] < 1e-4 < 5e-3 < deviation.layers[-1]  # in windows it arrives later
    assert deviation.layers.max() <= np.sqrt(2 * (full.num_tokens - full.layout.num_context))


def image_context(image: Image) -> torch.Tensor:
    return torch.arange(image.num_tokens) < image.layout.num_context


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recomputing_everything_leaves_no_deviation(architecture: str, store: Store) -> None:
    linked, full = linked_by(architecture, store, "legolink", k=1000), linked_by(architecture, store, "full").image
    assert kv_deviation(linked.image, full).both.max() <= 1e-4
    assert attention_deviation(linked.image, full).mean <= 1e-4


def test_one_decoded_token_more_or_less_is_another_prompt(store: Store) -> None:
    linked = linked_by("llama", store, "full").image
    longer = Layout(np.append(linked.layout.tokens, 7).astype(np.int32), linked.layout.starts)
    with pytest.raises(InputError, match="prompts"):
        kv_deviation(linked, Image(linked.stack, longer))


def test_results_are_frozen() -> None:
    nothing = np.zeros((1, 1), dtype=np.float32)
    assert replace(KVDeviation(nothing, nothing, nothing), key=nothing + 3).both[0, 0] == 3
    with pytest.raises(AttributeError):
        AttentionDeviation(np.zeros(1), nothing, nothing).layers = np.ones(1)  # type: ignore[misc]


# A link and what it generated


def deviation_of(store: Store, trace: Trace, architecture: str = "llama") -> DeviationFromFull:
    deviation = analyse_trace(subject(architecture).model, store, trace, "t").deviation
    assert deviation is not None
    return deviation


@pytest.mark.parametrize("architecture", ["llama", "llama-dynamic", "gemma2"])
def test_kl_and_probabilities_are_those_of_two_plain_forwards(architecture: str, store: Store) -> None:
    """Full: transformers' own forward on the prompt and the tokens. Linked: what was logged when they were chosen."""
    trace = trace_of_link(store, "naive", architecture)
    deviation = deviation_of(store, trace, architecture)
    ids = [*trace.layout.tokens.tolist(), *(token.id for token in trace.generated[:-1])]
    if architecture != "llama-dynamic":  # decoding rotates by other frequencies than one forward of all
        with torch.no_grad():
            logits = subject(architecture).reference(torch.tensor([ids])).logits[0, trace.layout.num_tokens - 1 :]
        full = logits.double().log_softmax(-1)
        for token, generated, expected in zip(trace.generated, deviation.generated, full, strict=True):
            assert generated.full == pytest.approx(float(expected[token.id].exp()), abs=1e-4)
            assert generated.choice == int(expected.argmax())
            assert generated.choice_full == pytest.approx(float(expected.max().exp()), abs=1e-4)
        p, q = full[0], torch.from_numpy(trace.logits).double().log_softmax(-1)
        assert deviation.generated[0].kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
    linked = [generated.linked for generated in deviation.generated]
    np.testing.assert_allclose(linked, np.exp([token.logprob for token in trace.generated]), atol=1e-5)
    assert all(generated.kl > 0 for generated in deviation.generated)


def test_full_is_not_apart_from_full(store: Store) -> None:
    deviation = deviation_of(store, trace_of_link(store, "full"))
    assert not deviation.kv.both.any() and not deviation.attention.gained.any()
    assert all(generated.kl == 0 and generated.linked == generated.full for generated in deviation.generated)


def test_attention_gained_is_lost_elsewhere_and_columns_make_the_norm(store: Store) -> None:
    deviation = deviation_of(store, trace_of_link(store, "naive"))
    attention = deviation.attention
    np.testing.assert_allclose(attention.gained.sum(1), 0, atol=1e-6)
    assert np.abs(attention.gained[1:]).max() > 1e-3
    assert attention.gained.shape == attention.tokens.shape == deviation.kv.key.shape
    # By the triangle inequality a column is no longer than the matrix, and all of them together no shorter.
    assert (attention.tokens.max(1) <= attention.layers + 1e-6).all()
    assert (attention.tokens.sum(1) >= attention.layers - 1e-6).all()
