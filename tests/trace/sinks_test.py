"""The sink of an object: known in advance on models made by hand, and counted from transformers' attentions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from subjects import ARCHITECTURES, subject
from transformers import LlamaConfig

from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.trace import sinks
from pictool.trace.sinks import OFFSETS, sink_profile

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
    profile = sink_profile(sink_model(0.0), TOKENS, first=4)
    wanted = np.mean([4 / (i + 1) for i in range(4, 40)])
    assert profile.num_rows == 36 and profile.if_even == pytest.approx(wanted)
    assert profile.share.tolist() == [[pytest.approx(wanted, abs=1e-6)]]
    assert profile.by_offset[0, 0, 0] == pytest.approx(np.mean([1 / (i + 1) for i in range(4, 40)]), abs=1e-6)


@pytest.mark.parametrize("first", [1, 4, 20])
def test_the_share_of_a_model_with_a_sink_is_known(first: int) -> None:
    """One SINK at the start: row i gives it e³ / (e³ + i), and 1 / (e³ + i) to each other."""
    profile = sink_profile(sink_model(SCORE), [SINK, *[OTHER] * 29], first=first)
    rows, weight = np.arange(first, 30), math.exp(SCORE)
    assert profile.share[0, 0] == pytest.approx(np.mean((weight + first - 1) / (weight + rows)), abs=1e-5)
    assert profile.by_offset[0, 0, 0] == pytest.approx(np.mean(weight / (weight + rows)), abs=1e-5)
    assert profile.by_offset.shape == (1, 1, max(OFFSETS, first)) and not profile.dummies.any()


def test_dummies_that_are_the_sink_take_it_from_the_chunk() -> None:
    """LegoLink-0: two SINKs in front, which are not in the object; they draw, and the chunk's first token does not."""
    profile = sink_profile(sink_model(SCORE), [OTHER] * 30, dummies=[SINK, SINK], first=1)
    rows, weight = np.arange(1, 30), math.exp(SCORE)
    assert profile.dummies[0, 0] == pytest.approx(np.mean(2 * weight / (2 * weight + rows + 1)), abs=1e-5)
    assert profile.share[0, 0] == pytest.approx(np.mean(1 / (2 * weight + rows + 1)), abs=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_is_what_transformers_attentions_give(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, and dummies in front."""
    monkeypatch.setattr(sinks, "_BLOCK_FLOATS", 7 * 43 * sinks._MOST_HEADS)
    one, dummies = subject(architecture), [0, 0, 0]
    profile = sink_profile(one.model, TOKENS, dummies, first=4)
    with torch.no_grad():
        attentions = one.reference(torch.tensor([[*dummies, *TOKENS]]), output_attentions=True).attentions
    rows = np.stack([a[0].double().numpy()[:, 3 + 4 :] for a in attentions]).mean(2)  # [layers, heads, columns]
    np.testing.assert_allclose(profile.by_offset, rows[..., 3 : 3 + OFFSETS], atol=1e-5)
    np.testing.assert_allclose(profile.share, rows[..., 3:7].sum(-1), atol=1e-5)
    np.testing.assert_allclose(profile.dummies, rows[..., :3].sum(-1), atol=1e-5)


@pytest.mark.parametrize("first", [0, 3, 40])
def test_there_must_be_rows_behind(first: int) -> None:
    with pytest.raises(InputError, match=rf"the first {first} of 3 tokens"):
        sink_profile(subject("llama").model, TOKENS[:3], first=first)
    with pytest.raises(InputError, match="reads from 1 to"):
        sink_profile(subject("llama").model, TOKENS * 20)
