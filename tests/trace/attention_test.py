"""Attention maps: against transformers' own attentions, and on maps made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from subjects import ARCHITECTURES, HEAD, LENGTH_DEPENDENT, LENGTHS, TAIL, make_chunks, of_keys, run, subject

from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.runtime.decode import generate
from pictool.store.store import Store
from pictool.trace.attention import AttentionMap, DecodedTokens, attention_map, decode_tokens

FIXED_ROPE = [architecture for architecture in ARCHITECTURES if architecture not in LENGTH_DEPENDENT]
NUM_GENERATED = 5


def attention_of(architecture: str, store: Store, policy: str, layer: int | None = None) -> tuple[AttentionMap, Any]:
    """The map of a link and of what it generated, and the tokens of all of it."""
    tiny_subject = subject(architecture)
    chunks = make_chunks(LENGTHS)
    tokens = generate(
        tiny_subject.model, run(tiny_subject, store, make_policy(policy, {}), chunks, HEAD, TAIL).image, NUM_GENERATED
    ).tokens
    image = run(tiny_subject, store, make_policy(policy, {}), chunks, HEAD, TAIL).image
    decoded = decode_tokens(image, tokens)
    return attention_map(image, decoded, layer), [*image.layout.tokens.tolist(), *tokens[:-1]]


@pytest.mark.parametrize("architecture", FIXED_ROPE)
def test_tail_and_generated_tokens_attend_as_in_transformers(architecture: str, store: Store) -> None:
    attention, tokens = attention_of(architecture, store, "full")
    with torch.no_grad():
        out = subject(architecture).reference(torch.tensor([tokens]), output_attentions=True)
    expected = np.stack([of_keys(weights[0, :, attention.starts[-1] :]).numpy() for weights in out.attentions])
    np.testing.assert_allclose(attention.weights, expected, atol=1e-4)
    assert attention.positions.tolist() == list(range(attention.starts[-1], len(tokens)))


@pytest.mark.parametrize("policy", ["naive", "cacheblend", "full"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_sums_to_1_and_sees_nothing_after_itself(architecture: str, policy: str, store: Store) -> None:
    attention, _ = attention_of(architecture, store, policy)
    np.testing.assert_allclose(attention.weights.sum(-1), 1, atol=1e-5)
    later = np.arange(attention.weights.shape[3]) > attention.positions[:, None]
    assert not attention.weights[..., later].any() and np.isneginf(attention.scores[..., later]).all()
    np.testing.assert_allclose(attention.share().sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "llama-dynamic", "phi3-long"])
def test_decoded_logits_are_those_of_the_generation(architecture: str, store: Store) -> None:
    """Each is what its token was chosen by; also where RoPE depends on the length."""
    tiny_subject = subject(architecture)
    chunks = make_chunks(LENGTHS)
    policy = make_policy("naive", {})
    generated = generate(tiny_subject.model, run(tiny_subject, store, policy, chunks).image, 8)
    decoded = decode_tokens(run(tiny_subject, store, policy, chunks).image, generated.tokens)
    assert decoded.logits.argmax(1).tolist() == list(generated.tokens)
    probabilities = torch.from_numpy(decoded.logits).log_softmax(-1)[
        range(len(generated.tokens)), list(generated.tokens)
    ]
    np.testing.assert_allclose(probabilities, generated.logprobs, atol=1e-6)
    assert np.ptp([scores.shape[2] - i for i, scores in enumerate(decoded.scores)]) == 0 and len(decoded.scores) == 7


def test_one_layer_is_that_layer_of_all(store: Store) -> None:
    every, single = attention_of("llama", store, "naive")[0], attention_of("llama", store, "naive", layer=1)[0]
    assert single.layers == (1,) and np.array_equal(single.scores[0], every.scores[1])
    assert np.array_equal(single.share(1, 2), every.share(1, 2))
    for wrong in ({"layer": 0}, {"head": 4}, {"head": -1}):
        with pytest.raises(InputError, match=r"(layers 1|heads 0 .*3)$"):
            single.share(**wrong)


def test_layers_that_are_not_and_maps_that_are_too_large_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = run(subject("llama"), store, make_policy("naive", {}), make_chunks(LENGTHS)).image
    none = DecodedTokens(np.zeros((1, 3), dtype=np.float32), ())
    with pytest.raises(InputError, match=r"^layer 3: .* 0 .* 2"):
        attention_map(image, none, 3)
    monkeypatch.setattr("pictool.trace.attention.MAX_BYTES", 4 * 4 * 4 * image.num_tokens)
    with pytest.raises(InputError, match="--layer"):
        attention_map(image, none)


# Made by hand: a head of 1, chunks of 3 and 2, two tail rows, one generated token; 2 layers, 1 head


def by_hand() -> AttentionMap:
    weights = np.zeros((2, 1, 3, 9))
    weights[0, 0] = [
        [0.1, 0.5, 0.1, 0.1, 0.1, 0.0625, 0.0375, 0, 0],
        [0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0],
        [0.0625, 0.0625, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125, 0.125],
    ]
    weights[1, 0] = np.tri(3, 9, 6) / np.array([[7], [8], [9]])
    with np.errstate(divide="ignore"):
        return AttentionMap(np.log(weights).astype(np.float32), (0, 1), (0, 1, 4, 6), 8)


def test_rows_columns_and_parts_of_a_map_made_by_hand() -> None:
    attention = by_hand()
    assert attention.positions.tolist() == [6, 7, 8]
    np.testing.assert_allclose(attention.share(0, 0)[0, :3], [0.1, 0.5, 0.1], rtol=1e-6)
    np.testing.assert_allclose(
        attention.share()[:, 0], [(0.1 + 1 / 7) / 2, (0.2 + 1 / 8) / 2, (0.0625 + 1 / 9) / 2], rtol=1e-6
    )
