"""Norms and ranges of an object's layers against torch; raw numbers of every dtype."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from subjects import make_chunks, subject

from pictool.api import compile
from pictool.errors import ObjectError
from pictool.runtime.model import wrap_model
from pictool.runtime.tensors import to_bytes
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.trace.object_stats import object_stats, to_float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_are_what_was_compiled(dtype: torch.dtype, store: Store) -> None:
    module = tiny.random_module(tiny.CONFIGS["llama"]()).to(dtype)
    model = wrap_model(module, tiny.tokenizer())
    (chunk,) = make_chunks([17])
    (done,) = compile(model, store, [chunk])
    (_, expected), *_ = model.prefill([chunk.tokens])
    with ObjectFile(done.path) as file:
        stats = object_stats(file)
    for layer, pair in zip(stats, expected, strict=True):
        for part, tensor in zip((layer.key, layer.value), pair, strict=True):
            norms = tensor.double().square().sum((0, 2)).sqrt()
            np.testing.assert_allclose(part.norms, norms.numpy(), rtol=1e-6)
            assert (part.min, part.max) == (float(tensor.min()), float(tensor.max()))
            assert part.mean_norm == pytest.approx(float(norms.mean())) and part.first_norm == part.norms[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_raw_numbers_are_exact(dtype: str) -> None:
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    tensor[:4] = torch.tensor([0.0, -0.0, float("inf"), 1e-7])
    assert np.array_equal(to_float32(to_bytes(tensor), dtype), tensor.float().numpy())


def test_a_damaged_layer_is_refused(store: Store) -> None:
    (done,) = compile(subject("llama").model, store, make_chunks([17]))
    data = bytearray(done.path.read_bytes())
    data[-300] ^= 1
    done.path.write_bytes(data)
    with ObjectFile(done.path) as file, pytest.raises(ObjectError, match="layer 2 "):
        object_stats(file)
