"""What has to hold on an accelerator: the exactness rules, and every policy and codec as on the CPU.

`make gpu PART=exact` runs this file; its name keeps it out of `make test`. On the CPU (PIC_GPU_REHEARSAL) the
comparisons of two devices are of one with itself: that shows that the file runs, no more.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from subjects import ARCHITECTURES, LENGTHS, default_policy, make_chunks, run, subject

from pictool.bench.shapes import random_model
from pictool.core import Chunk
from pictool.doctor.exactness import dense, difference, examine_exactness, largest_difference
from pictool.doctor.verdict import VerdictStatus
from pictool.linker.link import Linked, link
from pictool.linker.plan import plan_without_objects
from pictool.linker.policies import make_policy, policies
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.device import accelerator
from pictool.runtime.machine import PeakMemory
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model, wrap_model
from pictool.store.codecs import codecs
from pictool.store.memory import LayerMemory
from pictool.store.store import Store

IS_REHEARSAL = bool(os.environ.get("PIC_GPU_REHEARSAL"))
DEVICE = "cpu" if IS_REHEARSAL else accelerator()
DTYPES = ("float32",) if IS_REHEARSAL else ("float32", "bfloat16", "float16")
CLOSE = 1e-3  # float32, relative: two devices sum in other orders


@cache
def on_device(architecture: str, dtype: str = "float32") -> Model:
    """The tiny model of an architecture on the device."""
    assert DEVICE is not None, "this machine has no accelerator"
    module = copy.deepcopy(subject(architecture).model.module)
    for parameter in module.parameters():  # not `to`, which would round the frequencies of RoPE too
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return wrap_model(module.to(DEVICE), subject(architecture).model.tokenizer, architecture)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_exactness_rules_hold(architecture: str, dtype: str, store: Store) -> None:
    verdicts = list(examine_exactness(on_device(architecture, dtype), store))
    assert [verdict for verdict in verdicts if verdict.status is VerdictStatus.FAILED] == []


def as_on_the_cpu(architecture: str, policy: str, store: Store) -> tuple[Linked, Linked]:
    """The same link on the device and on the CPU, from the same objects; nothing of a chain is stored before."""
    one, chunks = subject(architecture), make_chunks(LENGTHS)
    cpu = run(one, store, default_policy(policy), chunks)
    own = Store(store.root / "chains") if default_policy(policy).needs.chain_block else store
    spec = replace(Spec.raw(chunks, " why?", default_policy(policy), "<s>You are."), after="none")
    device = link(on_device(architecture), own, spec)
    return device, cpu


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_policy_gives_what_it_gives_on_the_cpu(architecture: str, policy: str, store: Store) -> None:
    device, cpu = as_on_the_cpu(architecture, policy, store)
    assert (device.rows == cpu.rows).all()
    moved = dense(device)
    moved = type(moved)(moved.logits.cpu(), [(key.cpu(), value.cpu()) for key, value in moved.kv])
    assert largest_difference(moved, dense(cpu)) <= CLOSE


@pytest.mark.parametrize("memory", [0, 1 << 26], ids=["disk", "memory"])
@pytest.mark.parametrize("codec", sorted(codecs()))
def test_every_codec_gives_what_it_gives_on_the_cpu(codec: str, memory: int, store: Store) -> None:
    chunks = make_chunks(LENGTHS)
    spec = Spec("Answer:", chunks, make_policy("legolink", {"k": 4}), codec=codec, is_raw=True)
    cpu = link(subject("llama").model, store, spec)
    near = Store(store.root, memory_bytes=memory)
    for _ in range(3):
        device = link(on_device("llama"), near, spec)
        assert cpu.image.logits is not None and device.image.logits is not None
        assert difference(device.image.logits.cpu(), cpu.image.logits) <= CLOSE
    assert near.memory is None or near.memory.hits


def test_answers_are_those_of_the_cpu(store: Store) -> None:
    device, cpu = as_on_the_cpu("llama", "legolink", store)
    ours, theirs = generate(on_device("llama"), device.image, 16), generate(subject("llama").model, cpu.image, 16)
    assert ours.tokens == theirs.tokens


def test_prefixes_that_the_pool_evicts_come_back_from_host_memory(store: Store) -> None:
    """In turn two prompts, of which the pool holds one; the CPU has no other memory than its pool's."""
    model, memory = on_device("llama"), LayerMemory(1 << 26)
    pool = ResidentObjects(model, (400 + GROWTH) * slot_bytes(model), keeps_prefixes=True, memory=memory)
    for first in (3, 4, 3, 4):
        ids = np.arange(first, first + 300, dtype=np.int32)
        spec = Spec.planned(plan_without_objects(make_policy("full"), ids))
        ours, plain = link(model, store, spec, residents=pool), link(model, store, spec)
        assert ours.image.logits is not None and plain.image.logits is not None and ours.pool is not None
        assert difference(ours.image.logits, plain.image.logits) <= CLOSE
        found = ours.pool.prefix
        del ours
    assert IS_REHEARSAL or (found == 288 and pool.counts.restored_bytes == 2 * 288 * slot_bytes(model))


def test_memory_grows_with_rows_and_keys_not_with_their_product(store: Store) -> None:
    """A link of n tokens takes its image, and no n × n anything."""
    model = random_model("tiny", DEVICE or "cpu", "float32")
    peaks = {}
    for tokens in (2048, 8192) if IS_REHEARSAL else (8192, 32768):
        ids = tuple(10 + index % 500 for index in range(512))
        chunks = [Chunk(f"{index}", (index % 500 + 3, *ids[1:]), "made") for index in range(tokens // 512)]
        spec = Spec.raw(chunks, "Answer:", make_policy("legolink"))
        link(model, store, spec)
        with PeakMemory(model.device) as peak:
            link(model, store, spec)
        peaks[tokens] = peak.bytes
    (few, little), (many, much) = sorted(peaks.items())
    if little is None or much is None:
        pytest.fail(f"{model.device} does not say how much memory is in use")
    assert much <= 3 * (many / few) * max(little, 32 << 20)
