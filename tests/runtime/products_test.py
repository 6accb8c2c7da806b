"""oneDNN's products give the numbers of torch's own, wherever they take their place."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from subjects import ARCHITECTURES, LENGTHS, Subject, make_chunks, run, subject
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from pictool.linker.policies import make_policy
from pictool.runtime import attention, products
from pictool.runtime.memory.user_cache import cache_dir
from pictool.runtime.model import wrap_model
from pictool.runtime.products import OneDnnLinear
from pictool.store.store import Store

pytestmark = pytest.mark.skipif(not products.has_onednn(), reason="this torch has no oneDNN")


@contextmanager
def only_onednn() -> Iterator[None]:
    """oneDNN computes all products, small ones too; of models that are loaded within."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "onednn_wins", lambda: True)
        patch.setattr(attention, "products_win", lambda: True)
        for name in ("_MIN_WEIGHTS", "_MANY_WEIGHTS"):
            patch.setattr(products, name, 0)
        patch.setattr(attention, "_MIN_PRODUCT", 0)
        yield


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_links_are_the_same(architecture: str, store: Store) -> None:
    """Full is the model's own forward; scattered rows over reused KV are those of torch's products (rules 2 and 5)."""
    one, chunks, legolink = subject(architecture), make_chunks(LENGTHS), make_policy("legolink", {"k": 4})
    usual = run(one, store, legolink, chunks)
    assert not any(isinstance(layer, OneDnnLinear) for layer in one.model.module.modules())
    with only_onednn():
        model = wrap_model(copy.deepcopy(one.model.module), one.model.tokenizer, architecture)
        other = Subject(model, one.pristine)
        full, linked = (run(other, store, policy, chunks) for policy in (make_policy("full", {}), legolink))
        assert any(isinstance(layer, OneDnnLinear) for layer in model.module.modules())
    with torch.no_grad():
        want = one.reference(torch.from_numpy(full.image.layout.tokens.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(full.image.logits, want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linked.image.logits, usual.image.logits, atol=1e-5, rtol=1e-5)


class WeightsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether each weight that oneDNN is called with is contiguous."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.contiguous: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.contiguous.append(args[1].is_contiguous())
        return func(*args, **(kwargs or {}))


def test_keys_of_a_chunk_that_is_compiled_are_made_contiguous() -> None:
    """They leave their layer head by head with gaps, for which oneDNN has no fast kernel."""
    with only_onednn():
        model = wrap_model(tiny.random_module(tiny.CONFIGS["gemma2"]()), tiny.tokenizer())
        with WeightsSeen() as seen:
            list(model.prefill([list(range(3, 40)), [5, 6, 7]]))
    assert len(seen.contiguous) > 20 and all(seen.contiguous)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 65])
def test_a_layer(rows: int, has_bias: bool) -> None:
    layer, hidden = nn.Linear(600, 520, has_bias), torch.randn(2, rows, 600)
    want = linear(hidden.double(), layer.weight.double(), layer.bias.double() if has_bias else None).float()
    layer.__class__ = OneDnnLinear
    with torch.inference_mode():
        torch.testing.assert_close(layer(hidden), want, atol=1e-5, rtol=1e-5)
        hidden[0, 0, 0] = float("nan")
        assert layer(hidden)[0, 0].isnan().all()


def test_only_large_layers_in_float32_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "onednn_wins", lambda: True)
    model = nn.ModuleDict(
        {"large": nn.Linear(600, 520), "small": nn.Linear(60, 52), "of_bf16": nn.Linear(600, 520).bfloat16()}
    )  # fmt: skip
    before = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    products.use_fastest(model)
    assert [name for name, layer in model.items() if type(layer) is OneDnnLinear] == ["large"]
    assert {name: weight.data_ptr() for name, weight in model.state_dict().items()} == before


@pytest.mark.parametrize("default_s, is_faster", [(1.0, False), (2.0, True)])
def test_what_was_measured_is_kept(default_s: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def measure() -> tuple[float, float]:
        measured.append(1)
        return default_s, 1.0

    monkeypatch.setattr(products, "measure_products", measure)
    assert [products.onednn_gain.__wrapped__() for _ in range(2)] == [default_s] * 2 and len(measured) == 1
    monkeypatch.setattr(products, "onednn_gain", products.onednn_gain.__wrapped__)
    assert products.onednn_wins() is is_faster
    (path,) = (cache_dir() / "products").iterdir()
    for damaged in (b"", b"{}", b"[1]", b"\xff", json.dumps({"default_s": "x", "onednn_s": 1.0}).encode(), b"[" * 900):
        measured.clear()
        Path(path).write_bytes(damaged)
        assert products.onednn_wins() is is_faster and len(measured) == 1


def test_both_ways_are_measured() -> None:
    for times in (products.measure_products(), attention.measure_attention()):
        assert all(0 < seconds < 60 for seconds in times)
