"""Links from a pool of KV on the device, against links without one: bit for bit, whatever was linked before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chunks import flip
from subjects import HEAD, LENGTH_DEPENDENT, TAIL, default_policy, make_chunks, subject

from pictool.core import Chunk, CompileOptions
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError, ModelError, ObjectError
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy, policies
from pictool.linker.policies.base import Policy
from pictool.linker.residency import Residency, _gap
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.image import GROWTH
from pictool.runtime.model import Model
from pictool.runtime.pool import slot_bytes
from pictool.store.store import Store

LENGTHS = (1, 3, 29, 17, 23, 40, 8)
ARCHITECTURES = [name for name in tiny.CONFIGS if name not in LENGTH_DEPENDENT]


def residency(model: Model, tokens: int) -> Residency:
    return Residency(model, tokens * slot_bytes(model))


def spec(chunks: list[Chunk], policy: Policy, tail: str = TAIL) -> Spec:
    return Spec.raw(chunks, tail, policy, HEAD)


def same(a: Linked, b: Linked) -> bool:
    layers = range(a.image.stack.num_layers)
    assert a.image.logits is not None and b.image.logits is not None
    return (
        torch.equal(a.image.logits, b.image.logits)
        and (a.rows == b.rows).all()
        and all(torch.equal(a.image.key(layer), b.image.key(layer)) for layer in layers)
        and all(torch.equal(a.image.value(layer), b.image.value(layer)) for layer in layers)
    )


def drawn(rng: random.Random, chunks: list[Chunk]) -> list[Chunk]:
    """Documents in any order, some twice."""
    return rng.choices(chunks, k=rng.randint(1, 6))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_stream_of_requests_is_linked_as_without_a_pool(architecture: str, store: Store) -> None:
    model, chunks, rng = subject(architecture).model, make_chunks(LENGTHS), random.Random(5)
    pool = residency(model, 150 + GROWTH)
    kinds = [default_policy(name) for name in ("naive", "legolink", "cacheblend", "fixup", "full")]
    stayed = resident = duplicates = 0
    for _ in range(16):
        wanted = spec(drawn(rng, chunks), rng.choice(kinds))
        own, plain = link(model, store, wanted, residency=pool), link(model, store, wanted)
        assert own.pool is not None
        stayed, resident = stayed + own.pool.stayed, resident + own.pool.resident
        duplicates += own.pool.moved.duplicates
        assert same(own, plain)
        assert generate(model, own.image, 5).tokens == generate(model, plain.image, 5).tokens
        del own
    assert resident > stayed > 0 and duplicates


@pytest.mark.parametrize("policy", policies())
def test_every_policy_leaves_documents_as_they_were_compiled(policy: str, store: Store) -> None:
    """What it wrote over them is undone before the next link, in another order and under naive reuse."""
    model, chunks = subject("llama").model, make_chunks(LENGTHS)
    pool = residency(model, 200 + GROWTH)
    link(model, store, spec(chunks, default_policy(policy)), residency=pool)
    wanted = spec(chunks[::-1], make_policy("naive"))
    again = link(model, store, wanted, residency=pool)
    assert same(again, link(model, store, wanted)) and again.pool is not None
    linked = default_policy(policy).needs
    if linked.objects and not linked.sinks:  # else these are other objects
        assert again.pool.resident > 100 and again.bytes_read < 10_000


def test_documents_that_stay_cost_nothing(store: Store) -> None:
    model, chunks = subject("llama").model, make_chunks((29, 17, 40))
    pool, naive = residency(model, 200 + GROWTH), make_policy("naive")
    first = link(model, store, spec(chunks, naive), residency=pool)
    total = first.image.layout.num_context
    assert first.pool is not None and (first.pool.loaded, first.pool.resident) == (total, 0) and first.bytes_read > 0
    del first
    second = link(model, store, spec(chunks, naive, " who?"), residency=pool)
    assert second.pool is not None and second.bytes_read == 0 == second.pool.moved.moves
    assert second.pool.stayed == second.pool.resident == total


def test_documents_that_make_room_are_parked_and_come_back(store: Store) -> None:
    model, naive = subject("qwen3").model, make_policy("naive")
    one, two, three, four = make_chunks((29, 17, 40, 23))
    pool = residency(model, 160 + GROWTH)
    for chunks in ([one, two], [three, four], [two, three, one]):
        linked = link(model, store, spec(chunks, naive), residency=pool)
        assert same(linked, link(model, store, spec(chunks, naive))) and linked.pool is not None
        loaded = linked.pool.loaded
        del linked
    assert loaded == 0


def test_the_least_recently_used_are_evicted(store: Store) -> None:
    model, naive = subject("llama").model, make_policy("naive")
    one, two, three = make_chunks((40, 41, 42))
    pool = residency(model, 110 + GROWTH)  # one prompt, and one document beside
    for chunk in (one, two, three):
        link(model, store, spec([chunk], naive), residency=pool)
    assert link(model, store, spec([two], naive), residency=pool).bytes_read == 0
    assert link(model, store, spec([one], naive), residency=pool).bytes_read > 0


def test_an_image_that_is_held_is_never_touched(store: Store) -> None:
    model, chunks, policy = subject("llama").model, make_chunks(LENGTHS), make_policy("legolink", {"k": 4})
    pool = residency(model, 3 * (150 + GROWTH))
    held = [link(model, store, spec(chunks[at:], policy), residency=pool) for at in range(4)]
    uses = [linked.pool for linked in held]
    assert all(use is not None and not use.resident for use in uses)  # each has documents of its own
    assert [use is not None and use.has_room for use in uses] == [True, True, True, False]
    for at, linked in enumerate(held):
        plain = link(model, store, spec(chunks[at:], policy))
        assert same(linked, plain)
        assert generate(model, linked.image, 9).tokens == generate(model, plain.image, 9).tokens
    held.clear()
    assert link(model, store, spec(chunks, policy), residency=pool).bytes_read == 0


def test_an_answer_longer_than_its_room_goes_on_elsewhere(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17)), make_policy("naive")
    pool = residency(model, 2 * GROWTH)
    own, plain = link(model, store, spec(chunks, naive), residency=pool), link(model, store, spec(chunks, naive))
    for token in range(5, GROWTH + 9):
        assert torch.equal(own.image.append(token), plain.image.append(token))
    del own
    assert same(link(model, store, spec(chunks, naive), residency=pool), link(model, store, spec(chunks, naive)))


def test_a_link_that_fails_leaves_nothing_half_loaded(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17, 40)), make_policy("naive")
    pool, engine = residency(model, 200 + GROWTH), TorchEngine(model, store)
    compiled = engine.compile(chunks, CompileOptions())
    good, bad = compiled[0].path, compiled[2].path
    link(model, store, Spec.raw([str(good)], TAIL, naive, HEAD), residency=pool)
    data = bad.read_bytes()
    flip(bad, len(data) - 3)  # in the last layer's values
    with pytest.raises(ObjectError):
        link(model, store, Spec.raw([str(bad), str(good)], TAIL, naive, HEAD), residency=pool)
    bad.write_bytes(data)
    wanted = Spec.raw([str(bad), str(good)], TAIL, naive, HEAD)
    linked = link(model, store, wanted, residency=pool)
    assert same(linked, link(model, store, wanted)) and linked.pool is not None
    assert (linked.pool.resident, linked.pool.loaded) == (29 + len(model.encode(HEAD)), 40)


def test_a_salt_finds_no_object_of_another(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29,)), make_policy("naive")
    pool = residency(model, 200 + GROWTH)
    link(model, store, spec(chunks, naive), residency=pool)
    salted = link(model.with_salt("s" * 32), store, spec(chunks, naive), residency=pool)
    assert salted.pool is not None and salted.pool.resident == 0


def test_an_engine_with_a_pool_answers_and_reports(store: Store, tmp_path: Path) -> None:
    model, chunks, policy = subject("llama").model, make_chunks((29, 17)), make_policy("legolink")
    with TorchEngine(model, store, 1 << 22) as engine:
        reports: list[dict[str, Any]] = [
            engine.answer(spec(order, policy)).report() for order in (chunks, chunks[::-1])
        ]
    assert "pool" not in TorchEngine(model, store).answer(spec(chunks, policy)).report()
    head = len(model.encode(HEAD))
    first, second = (report["pool"] for report in reports)
    assert first["loaded"] == second["resident"] == 46 + head and second["stayed"] == head
    assert (second["moves"], second["moved"], second["duplicates"]) == (2, 46, 0) and second["tokens_per_ms"] > 0
    assert 0 < second["scratch"] <= 46


def test_bad_pools_are_refused(store: Store) -> None:
    model = subject("llama").model
    least = (GROWTH + 1) * slot_bytes(model)
    with pytest.raises(InputError, match=f"^a pool of 100 bytes holds no prompt of llama; give it {least} or more$"):
        TorchEngine(model, store, 100)
    with pytest.raises(ModelError, match=r"^phi3-long: its RoPE depends on the prompt's length"):
        TorchEngine(subject("phi3-long").model, store, 1 << 22)


def test_gaps() -> None:
    assert _gap([], 5, 5) == 0 and _gap([], 6, 5) is None
    assert _gap([(0, 2), (6, 8)], 4, 10) == 2 and _gap([(6, 8), (0, 2)], 5, 12) is None and _gap([(0, 2)], 3, 5) == 2
