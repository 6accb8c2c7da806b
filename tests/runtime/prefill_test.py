from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from subjects import ARCHITECTURES
from torch import Tensor

from pictool.runtime import prefill
from pictool.runtime.memory import image
from pictool.runtime.model import wrap_model
from pictool.runtime.prefill import plan_packs
from pictool.runtime.stack import LayerStack


def random_tokens(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, tiny.VOCAB, length).tolist() for length in lengths]


@given(st.lists(st.integers(1, 5000), max_size=80), st.sampled_from([1, 512, 4096]))
def test_packs_hold_every_chunk_once_within_the_budget(lengths: list[int], budget: int) -> None:
    packs = plan_packs(lengths, budget)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in pack) for pack in packs]
    assert all(size <= budget or len(pack) == 1 for size, pack in zip(sizes, packs, strict=True))
    assert sum(2 * size <= budget for size in sizes) <= 1, "two packs would fit in one"


LENGTHS = {"short": [20, 23, 1, 21, 2, 20, 20], "past-rope-switches": [130, 150, 140, 4]}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("sinks", [(), (0, 0)], ids=["", "sinks"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_equals_one_by_one(architecture: str, sinks: tuple[int, ...], lengths: list[int]) -> None:
    """Beyond the windows, and where rotation depends on a chunk's own length; neighbours of one length too."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer())
    chunks, all_lengths = random_tokens(lengths), [len(sinks) + length for length in lengths]
    assert len(plan_packs(all_lengths, 512)) == 1
    together, alone = (
        dict(model.prefill(chunks, [sinks] * len(chunks))),
        dict(model.prefill(chunks, [sinks] * len(chunks), alone=True)),
    )
    for index, length in enumerate(lengths):
        for pair, own in zip(together[index], alone[index], strict=True):
            for tensor, want in zip(pair, own, strict=True):
                assert want.shape[1] == length
                torch.testing.assert_close(tensor, want, atol=1e-5, rtol=1e-5)


def test_a_context_is_computed_once_for_all_chunks_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer()), random_tokens([20, 7, 3])
    computed, layer = list[int](), LayerStack.layer

    def counted(stack: LayerStack, index: int, hidden: Tensor, *rest: Any) -> Tensor:
        computed.append(hidden.shape[1])
        return layer(stack, index, hidden, *rest)

    monkeypatch.setattr(LayerStack, "layer", counted)
    assert len(list(model.prefill(chunks, [tuple(range(3, 43))] * 3))) == 3
    assert sum(computed) == (model.stack.num_layers - 1) * (40 + 30) + 30  # of the last layer, K and V of the chunks


@pytest.mark.parametrize("architecture", ["llama-dynamic", "gemma3", "llama4", "deepseek_v3"])
def test_a_long_chunk_is_computed_some_rows_at_a_time(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no layer of it keeps others waiting; by the same numbers but for the order of sums."""
    model, chunks = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer()), random_tokens([90])
    ((_, whole),), most, layer = model.prefill(chunks, [(0, 0)]), 0, LayerStack.layer

    def counted(stack: LayerStack, index: int, hidden: Tensor, *rest: Any) -> Tensor:
        nonlocal most
        most = max(most, hidden.shape[1] if index < stack.num_layers - 1 else 0)
        return layer(stack, index, hidden, *rest)

    monkeypatch.setattr(LayerStack, "layer", counted)
    monkeypatch.setattr(prefill, "_PACK_TOKENS", 16)
    monkeypatch.setattr(image, "_AT_ONCE", 16)
    ((_, parts),) = model.prefill(chunks, [(0, 0)])
    assert most == 16
    for pair, own in zip(parts, whole, strict=True):
        for tensor, want in zip(pair, own, strict=True):
            torch.testing.assert_close(tensor, want, atol=1e-5, rtol=1e-5)


def test_of_the_last_layer_nothing_but_k_and_v_is_computed() -> None:
    model, seen = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer()), list[int]()
    for index, layer in enumerate(model.module.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    ((_, layers),) = model.prefill(random_tokens([30]))
    assert seen == [0, 1] and len(layers) == 3


def test_no_chunk_of_a_pack_sees_another() -> None:
    """Whatever else is in it, bit for bit."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
    first, second, third, other = random_tokens([30, 20, 20, 20])
    before, after = (
        dict(model.prefill([first, second, third])),
        dict(model.prefill([first, other, third])),
    )
    for index in (0, 2):
        for pair, again in zip(before[index], after[index], strict=True):
            assert torch.equal(pair[0], again[0]) and torch.equal(pair[1], again[1])
    assert not torch.equal(before[1][0][0], after[1][0][0])


@pytest.mark.parametrize("sinks", [(), (0,), (0, 0, 0, 0)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_those_of_transformers(architecture: str, sinks: tuple[int, ...]) -> None:
    """The chunk alone (after sinks) through the model's own forward; values carry no rotation."""
    module = tiny.random_module(tiny.CONFIGS[architecture]())
    (chunk,) = random_tokens([30])
    expected = reference.isolated(reference.eager(module), chunk, len(sinks), sinks)
    model = wrap_model(module, tiny.tokenizer())
    ((_, layers),) = model.prefill([chunk], [sinks])
    for pair, own in zip(layers, expected, strict=True):
        value, value1 = (model.stack.by_rotation(*parts)[1] for parts in (pair, own))
        torch.testing.assert_close(value, value1[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3-partial"])
def test_keys_are_kept_before_rotation(architecture: str) -> None:
    """Layer 0's un-rotated key of a token is the same wherever the token stands."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer())
    ((_, layers),) = model.prefill([[7, 50, 7, 90, 7]])
    key = layers[0][0]
    torch.testing.assert_close(key[:, 0], key[:, 2])
    torch.testing.assert_close(key[:, 0], key[:, 4])
    assert not torch.allclose(key[:, 0], key[:, 1])
