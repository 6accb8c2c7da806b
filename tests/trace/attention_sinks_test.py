"""The attention sinks of an object: known in advance on models made by hand, and by transformers' attentions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from subjects import ARCHITECTURES, of_keys, subject
from transformers import LlamaConfig

from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.trace.attention_sinks import _MAX_HEADS, NUM_OFFSETS, attention_sinks

TOKENS = np.random.default_rng(0).integers(3, tiny.VOCAB, 40).tolist()
SINK, OTHER, SCORE = 5, 6, 3.0


def sink_model(score: float) -> Model:
    """One layer, one head: every token scores SINK by `score` and all else by 0, wherever it stands.

    Token SINK is embedded in dimension 0, all others in dimension 1. Only dimensions that RoPE hardly turns are used.
    """
    config = LlamaConfig(**{**tiny.SIZE, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
                            "rope_parameters": {"rope_type": "default", "rope_theta": 1e16}})  # fmt: skip
    module: Any = tiny.random_module(config)
    layer, width, dim = module.model.layers[0], config.hidden_size, config.head_dim
    with torch.no_grad():
        module.model.embed_tokens.weight.zero_()
        module.model.embed_tokens.weight[:, 1] = 100.0
        module.model.embed_tokens.weight[SINK, :2] = torch.tensor([100.0, 0.0])
        layer.input_layernorm.weight.fill_(1.0)  # an embedding becomes √width long (less an epsilon, hence 100)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.zero_()
        layer.self_attn.q_proj.weight[dim // 2 - 1, :2] = 1.0
        layer.self_attn.k_proj.weight[dim // 2 - 1, 0] = score * math.sqrt(dim) / width
    return wrap_model(module, tiny.tokenizer(), "sink")


def test_a_model_that_attends_evenly_draws_what_chance_does() -> None:
    sinks = attention_sinks(sink_model(0.0), TOKENS)
    expected = np.mean([4 / (i + 1) for i in range(4, 40)])
    assert sinks.num_rows == 36 and sinks.uniform_share == pytest.approx(expected)
    assert sinks.initial_share.tolist() == [[pytest.approx(expected, abs=1e-6)]]
    assert sinks.share_by_offset[0, 0, 0] == pytest.approx(np.mean([1 / (i + 1) for i in range(4, 40)]), abs=1e-6)


def test_the_share_of_a_model_with_a_sink_is_known() -> None:
    """One SINK at the start: row i gives it e³ / (e³ + i), and 1 / (e³ + i) to each other."""
    sinks = attention_sinks(sink_model(SCORE), [SINK, *[OTHER] * 29])
    rows, weight = np.arange(4, 30), math.exp(SCORE)
    assert sinks.initial_share[0, 0] == pytest.approx(np.mean((weight + 3) / (weight + rows)), abs=1e-5)
    assert sinks.share_by_offset[0, 0, 0] == pytest.approx(np.mean(weight / (weight + rows)), abs=1e-5)
    assert sinks.share_by_offset.shape == (1, 1, NUM_OFFSETS) and not sinks.dummy_share.any()


def test_dummies_that_are_the_sink_take_it_from_the_chunk() -> None:
    """LegoLink-0: two SINKs before the chunk, not in the object, draw what its first token would draw."""
    sinks = attention_sinks(sink_model(SCORE), [OTHER] * 30, dummies=[SINK, SINK])
    rows, weight = np.arange(4, 30), math.exp(SCORE)
    assert sinks.dummy_share[0, 0] == pytest.approx(np.mean(2 * weight / (2 * weight + rows + 1)), abs=1e-5)
    assert sinks.initial_share[0, 0] == pytest.approx(np.mean(4 / (2 * weight + rows + 1)), abs=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_what_transformers_attentions_give(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and dummy tokens before the chunk."""
    monkeypatch.setattr("pictool.trace.attention_sinks._BLOCK_FLOATS", 7 * 43 * _MAX_HEADS)
    dummies = [0, 0, 0]
    sinks = attention_sinks(subject(architecture).model, TOKENS, dummies)
    with torch.no_grad():
        attentions = (
            subject(architecture).reference(torch.tensor([[*dummies, *TOKENS]]), output_attentions=True).attentions
        )
    shares = [of_keys(weights[0].double()).numpy()[:, 3 + 4 :] for weights in attentions]
    rows = np.stack(shares).mean(2)  # [layers, heads, columns]
    np.testing.assert_allclose(sinks.share_by_offset, rows[..., 3 : 3 + NUM_OFFSETS], atol=1e-5)
    np.testing.assert_allclose(sinks.initial_share, rows[..., 3:7].sum(-1), atol=1e-5)
    np.testing.assert_allclose(sinks.dummy_share, rows[..., :3].sum(-1), atol=1e-5)


def test_rows_must_follow_the_initial_tokens() -> None:
    with pytest.raises(InputError, match=" 4 "):
        attention_sinks(subject("llama").model, TOKENS[:4])
    with pytest.raises(InputError, match=" 1 "):
        attention_sinks(subject("llama").model, TOKENS * 20)
