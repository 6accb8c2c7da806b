"""The worker's side on an emulated accelerator: what its threads read of the device was computed before."""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from emulated import MAIN, Race
from torch import nn

from pictool.core import TokenIds
from pictool.engines.vllm.messages import CompileJob, JobResult
from pictool.engines.vllm.request import Problem
from pictool.engines.vllm.worker import worker
from pictool.engines.vllm.worker.forward import ForwardPiece, PromptBatch, Work
from pictool.engines.vllm.worker.kv import KVHeads
from pictool.engines.vllm.worker.worker import StepBudget, WorkerSide
from pictool.runtime.memory import streams
from pictool.runtime.model import Model
from pictool.runtime.tensors import to_bytes
from pictool.store.store import Store

TOKENS: TokenIds = np.arange(5, 25, dtype=np.int32)
ENGINE = "stream of the engine"  # vLLM's own, of the thread that steps; other threads have the main one


class Attention(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None: ...


class Rotary(nn.Module):
    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None: ...


class OneRank:
    is_first = True

    def __init__(self, heads: KVHeads) -> None:
        self.heads = heads

    def agree(self, problems: list[Problem | None], is_done: list[bool]) -> list[tuple[Problem | None, bool]]:
        return list(zip(problems, is_done, strict=True))

    def follow_first(self, number: int, has_failed: bool) -> tuple[int, bool]:
        return number, has_failed

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        return part


class Layers:
    """A model whose keys at layer i are the tokens plus i, and whose values are their negatives."""

    def __init__(self, model: Model) -> None:
        geometry, self.device = model.geometry, torch.device("cpu")
        self.width = geometry.kv_heads * geometry.head_dim
        self.rank = OneRank(KVHeads(0, geometry.kv_heads, 1))
        self.layers = [
            SimpleNamespace(rotary=Rotary(), attention=Attention(), keys_and_values=itemgetter(1, 2))
            for _ in range(geometry.layers)
        ]

    def as_stored(self, key: torch.Tensor) -> torch.Tensor:
        return key

    @property
    def model(self) -> Layers:
        return self

    def run(self, batch: PromptBatch, *_: object) -> Work[None]:
        for index, layer in enumerate(self.layers):
            yield ForwardPiece("layer", len(batch.tokens))
            key = torch.from_numpy(batch.tokens).float()[:, None].expand(-1, self.width) + index
            layer.rotary(torch.arange(len(key)), key, key)
            layer.attention(key, key, -key)


def compiled(model: Model, store: Store) -> JobResult:
    """Steps until a chunk is in the store."""
    forward: Any = Layers(model)
    side = WorkerSide(forward, store, model, StepBudget(10**9, 10**6, 10.0))
    job, outcomes = CompileJob("a", TOKENS, 0, "a text", (0,)), dict[str, JobResult]()
    for step in range(1000):
        outcomes |= side.step([] if step else [job], model.target, True)
        if outcomes:
            break
        time.sleep(1e-3)
    side.shutdown()
    return outcomes["a"]


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., JobResult]:
    """Compiles with an engine that has a stream of its own, and threads that have another."""

    def run(model: Model, store: Store) -> JobResult:
        with monkeypatch.context() as patch, emulated.emulated(patch) as device:
            write = WorkerSide._write

            def on_main_stream(*arguments: Any) -> None:
                with device.on(MAIN):
                    write(*arguments)

            patch.setattr(WorkerSide, "_write", on_main_stream)
            patch.setattr(worker, "to_bytes", lambda tensor: to_bytes(tensor.clone()))  # a copy from the device
            with device.on(ENGINE):
                return compiled(model, store)

    return run


def test_an_object_is_what_was_computed(model: Model, store: Store, on_accelerator: Callable[..., JobResult]) -> None:
    assert on_accelerator(model, store).problem is None
    geometry = model.geometry
    with store.open(model.key(TOKENS, "none")) as file:
        for layer in range(geometry.layers):
            key, value = (np.frombuffer(part, np.float32) for part in file.layer(layer))
            want = np.broadcast_to(TOKENS[:, None] + layer, (geometry.kv_heads, len(TOKENS), geometry.head_dim))
            assert np.array_equal(key, want.ravel()) and np.array_equal(value, -want.ravel())


def test_a_thread_that_did_not_wait_would_race(
    model: Model, store: Store, on_accelerator: Callable[..., JobResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "event_now", lambda _: None)
    with pytest.raises(Race, match=ENGINE):
        on_accelerator(model, store)
