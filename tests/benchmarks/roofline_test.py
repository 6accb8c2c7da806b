"""FLOPs of rows against PyTorch's own counter and by hand; the roofline is the longer of copying and computing."""

from __future__ import annotations

import numpy as np
import pytest
import subjects
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import roofline
from benchmarks.roofline import Rates, link_flops, measure_rates, window_of
from pictool.bench.shapes import random_model
from pictool.core import RowMask
from pictool.fidelity.transformers_module import transformers_module
from pictool.runtime.model import Model

# tiny: what one row's matrices cost at a layer, of that its K and V, and what one key costs.
HIDDEN, INTERMEDIATE, VOCAB, ATTENTION = 64, 256, 2048, 64
ROW = 2 * (4 * HIDDEN * ATTENTION + 3 * HIDDEN * INTERMEDIATE)
KV = 2 * 2 * HIDDEN * ATTENTION
LOGITS = 2 * HIDDEN * VOCAB
KEY = 4 * ATTENTION


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiny", "cpu", "float32")


def mask(*layers: str) -> RowMask:
    return np.array([[mark == "x" for mark in layer] for layer in layers])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3-partial", "gemma3"])
def test_all_rows_cost_what_pytorch_counts(architecture: str) -> None:
    """PyTorch counts whole squares of keys, so what a row does not see is taken off."""
    model = subjects.subject(architecture).model
    tokens, geometry = 11, model.geometry  # shorter than any window
    plain = transformers_module(model)
    plain.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        plain(torch.arange(3, 3 + tokens)[None], logits_to_keep=1)
    per_key = 4 * model.config.num_attention_heads * geometry.head_dim
    unseen = geometry.layers * per_key * tokens * (tokens - 1) / 2
    every = np.ones((geometry.layers, tokens), dtype=bool)
    layer = sum(weight.numel() for weight in plain.model.layers[-1].parameters() if weight.dim() == 2)
    kv = 2 * model.config.hidden_size * geometry.kv_heads * geometry.head_dim
    unneeded = (tokens - 1) * (2 * (layer - kv) + per_key * tokens / 2)  # of the last layer, all rows but one
    counts = counter.get_flop_counts().items()  # older transformers multiply matrices for the tables of RoPE
    tables = sum(sum(each.values()) for name, each in counts if name.endswith("rotary_emb"))
    assert link_flops(model, every, ()) == counter.get_total_flops() - tables - unseen - unneeded


def test_some_rows_by_hand(model: Model) -> None:
    rows = mask("..x.x", "x...x")
    assert link_flops(model, rows, ()) == LOGITS + 2 * ROW + (3 + 5) * KEY + 2 * KV + (ROW - KV) + 5 * KEY


def test_a_checked_layer_needs_k_and_v_of_all_and_the_rest_of_those_that_are_kept(model: Model) -> None:
    wide, narrow = mask("xxxxx", "x.x.x")
    assert link_flops(model, np.array([wide, narrow]), (0,)) == (
        LOGITS + 5 * KV + 3 * (ROW - KV) + (1 + 3 + 5) * KEY + 3 * KV + (ROW - KV) + 5 * KEY
    )


def test_a_window_bounds_the_keys() -> None:
    model = subjects.subject("mistral-window").model
    assert window_of(model.config, 0) == 12
    whole, cut = (link_flops(model, mask(*["." * (n - 1) + "x"] * 3), ()) for n in (12, 40))
    assert whole == cut


def test_windows_are_those_of_the_layers() -> None:
    config = subjects.subject("gemma3").model.config
    assert [window_of(config, layer) for layer in range(3)] == [12, None, 12]
    assert window_of(subjects.subject("qwen2").model.config, 0) is None
    assert window_of(subjects.subject("llama").model.config, 0) is None


def test_the_roofline_is_the_longer_of_copying_and_computing() -> None:
    rates = Rates(copy_bytes_s=100.0, flops_s=1000.0)
    assert rates.roofline_s(50, 100) == 0.5
    assert rates.roofline_s(5, 100) == 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rates_are_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "_SIZE", 64)
    rates = measure_rates("cpu", dtype)
    assert 1e6 < rates.copy_bytes_s < 1e13 and 1e6 < rates.flops_s < 1e15
