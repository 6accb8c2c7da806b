from __future__ import annotations

import numpy as np
import pytest
import reference
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from pictool.runtime.model import wrap_model
from pictool.runtime.prefill import plan_batches, prefill_chunks


def random_tokens(lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, tiny.VOCAB, length).tolist() for length in lengths]


@given(st.lists(st.integers(1, 5000), max_size=80), st.sampled_from([512, 4096]))
def test_batches_hold_every_chunk_once_with_little_padding(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        cells = len(batch) * max(lengths[index] for index in batch)
        assert sum(lengths[index] for index in batch) >= 0.8 * cells
        assert len(batch) == 1 or cells <= budget


@pytest.mark.parametrize("lengths", [[20, 23, 1, 21, 2, 22], [130, 150, 140]], ids=["short", "past-rope-switches"])
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_batched_equals_one_by_one(architecture: str, lengths: list[int]) -> None:
    model = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer())
    chunks = random_tokens(lengths)
    assert len(plan_batches(lengths, 512)) < len(lengths)
    together = dict(prefill_chunks(model, chunks))
    for index, chunk in enumerate(chunks):
        ((_, alone),) = prefill_chunks(model, [chunk])
        for (k, v), (k1, v1) in zip(together[index], alone, strict=True):
            torch.testing.assert_close(k, k1, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(v, v1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [(), (0,), (0, 0, 0, 0)])
@pytest.mark.parametrize("architecture", tiny.CONFIGS)
def test_values_are_those_of_transformers(architecture: str, sinks: tuple[int, ...]) -> None:
    """The chunk alone (after sinks) through the model's own forward; values carry no rotation."""
    module = tiny.random_module(tiny.CONFIGS[architecture]())
    (chunk,) = random_tokens([30])
    expected = reference.isolated(reference.eager(module), chunk, len(sinks), sinks)
    ((_, layers),) = prefill_chunks(wrap_model(module, tiny.tokenizer()), [chunk], sinks)
    for (_, value), (_, value1) in zip(layers, expected, strict=True):
        torch.testing.assert_close(value, value1[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3-partial"])
def test_keys_are_kept_before_rotation(architecture: str) -> None:
    """Layer 0's un-rotated key of a token is the same wherever the token stands."""
    model = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer())
    ((_, layers),) = prefill_chunks(model, [[7, 50, 7, 90, 7]])
    key = layers[0][0]
    torch.testing.assert_close(key[:, 0], key[:, 2])
    torch.testing.assert_close(key[:, 0], key[:, 4])
    assert not torch.allclose(key[:, 0], key[:, 1])
