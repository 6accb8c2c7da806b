"""Requests that others interrupt within a link, a compilation or a token: each is what it is alone, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from subjects import HEAD, LENGTH_DEPENDENT, LENGTHS, TAIL, Subject, default_policy, make_chunks, subject

from pictool.compiler.compile import compile_chunks, compute_chunks, object_key
from pictool.linker.link import link
from pictool.linker.policies.base import Policy
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime import prefill
from pictool.runtime.decode import generate
from pictool.runtime.memory import image
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.stack import LayerStack
from pictool.serve.backends.torch import engine_thread
from pictool.serve.backends.torch.engine_thread import EngineTask
from pictool.store.store import Store

Work = Callable[[], list[Any]]
OTHERS = (29, 17, 60)  # lengths of another prompt's documents
REQUESTS = {
    "llama": ("full", "naive", "legolink", "cacheblend", "speccache", "prefix", "chunks"),
    "llama-dynamic": ("full", "naive"),
    "gemma3": ("full", "legolink", "cacheblend", "chunks"),  # with windows
    "qwen3_next": ("full", "legolink", "prefix", "chunks"),  # a hybrid
    "bamba": ("full", "naive", "chunks"),
}


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is one layer of sixteen rows."""
    monkeypatch.setattr(engine_thread, "QUANTUM_S", 0.0)
    monkeypatch.setattr(image, "_AT_ONCE", 16)
    monkeypatch.setattr(prefill, "_PACK_TOKENS", 16)


def answer(one: Subject, store: Store, policy: Policy, lengths: tuple[int, ...], pool: ResidentObjects | None) -> Any:
    """The rows of a link, its first logits, and three tokens."""
    linked = link(
        one.model, store, Spec(TAIL, make_chunks(lengths), policy, head=HEAD, is_raw=True), residents=pool
    )  # fmt: skip
    assert linked.image.logits is not None
    first = linked.image.logits.tolist()
    answered = generate(one.model, linked.image, 3)
    return linked.rows.tolist(), first, answered.tokens, answered.logprobs


def objects(one: Subject) -> Any:
    """The bytes of chunks that are compiled."""
    keys = {object_key(one.model, chunk): chunk for chunk in make_chunks((37, 5), seed=1)}
    return sorted(
        (chunk.meta.key, [[bytes(part) for part in parts] for parts in (*chunk.layers, *chunk.states)])
        for chunk in compute_chunks(one.model, keys)
    )


def in_turns(works: list[Work], seed: int) -> tuple[list[Any], int]:
    """What works give that take turns in a random order, and how many turns they took."""
    results = dict[int, Any]()

    def task_of(index: int) -> EngineTask:
        return EngineTask("t", lambda _: results.update({index: works[index]()}), lambda _: None)

    left, rng, num_turns = [task_of(index) for index in range(len(works))], random.Random(seed), 0
    while left:
        task, num_turns = rng.choice(left), num_turns + 1
        if not task.advance():
            left.remove(task)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled(), "what a task set is its own"
    return [results[index] for index in range(len(works))], num_turns


@pytest.mark.parametrize("architecture", REQUESTS)
def test_requests_that_take_turns_give_what_they_give_alone(architecture: str, tmp_path: Path) -> None:
    one, store, folders = subject(architecture), Store(tmp_path / "store"), itertools.count()
    has_pool = one.model.geometry.states is None and architecture not in LENGTH_DEPENDENT

    def linked(policy: Policy, lengths: tuple[int, ...], pool: ResidentObjects | None) -> Any:
        own = Store(tmp_path / str(next(folders))) if policy.needs.chain_block else store
        return answer(one, own, policy, lengths, pool)

    def works(pool: ResidentObjects | None) -> list[Work]:
        compiling = [partial(objects, one)] * ("chunks" in REQUESTS[architecture])
        policies = [default_policy(name) for name in REQUESTS[architecture] if name != "chunks"]
        linking = [partial(linked, policy, lengths, pool) for policy in policies for lengths in (LENGTHS, OTHERS)]
        return [*compiling, *linking]

    for work in works(None):  # compiles the documents
        work()
    alone = [work() for work in works(None)]
    pool = ResidentObjects(one.model, 6 * (200 + GROWTH) * slot_bytes(one.model)) if has_pool else None
    found, num_turns = in_turns(works(pool), seed=0)
    assert num_turns > 10 * len(alone)
    for want, got in zip(alone, found, strict=True):
        assert want == got


@pytest.mark.parametrize("kind", ["link", "compile"])
def test_what_nobody_waits_for_computes_no_further_layer(
    kind: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, whose slots of the pool are free again; and of a document, of which no object is left."""
    one, count, layer = subject("llama"), 0, LayerStack.layer
    pool = ResidentObjects(one.model, 2 * (200 + GROWTH) * slot_bytes(one.model), keeps_prefixes=True)

    def counted(*args: Any) -> Any:
        nonlocal count
        out = layer(*args)
        count += 1
        return out

    def work(_: EngineTask) -> None:
        if kind == "link":
            answer(one, store, default_policy("full"), OTHERS, pool)
        else:
            compile_chunks(one.model, store, make_chunks((60,)))

    monkeypatch.setattr(LayerStack, "layer", counted)
    task = EngineTask("t", work, lambda _: None)
    for _ in range(4):
        assert task.advance()
    task.stop()
    assert count == 3
    assert [*store.keys()] == [] and all(not region.pieces for region in pool._regions)
    want = answer(one, store, default_policy("full"), OTHERS, None)
    assert answer(one, store, default_policy("full"), OTHERS, pool) == want
