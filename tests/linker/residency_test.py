"""Links from a pool of KV on the device, against links without one: bit for bit, whatever was linked before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import flip
from subjects import HEAD, TAIL, default_policy, each_kind, make_chunks, subject

from pictool.core import Chunk, CompileOptions, PromptText
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError, ModelError, ObjectError, PicError
from pictool.linker import batch
from pictool.linker.batch import link_batches
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy, policies
from pictool.linker.policies.base import Policy
from pictool.linker.residency import PoolUse, ResidentObjects, first_gap
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.runtime.model import Model
from pictool.store.store import Store

LENGTHS = (1, 3, 29, 17, 23, 40, 8)


def residents(model: Model, tokens: int) -> ResidentObjects:
    return ResidentObjects(model, tokens * slot_bytes(model))


def spec(chunks: list[Chunk], policy: Policy, tail: str = TAIL) -> Spec:
    return Spec.raw(chunks, tail, policy, HEAD)


def same(a: Linked, b: Linked) -> bool:
    """Bit for bit, but where keys are complex products: torch rounds those by their place in memory."""
    layers = range(a.image.stack.num_layers)
    assert a.image.logits is not None and b.image.logits is not None
    is_complex = any(table.is_complex() for table in a.image.stack.rotary_tables(torch.arange(1)).parts())
    atol = 1e-5 if is_complex else 0
    pairs = [(a.image.logits, b.image.logits)]
    pairs += [(a.image.key(layer), b.image.key(layer)) for layer in layers]
    pairs += [(a.image.value(layer), b.image.value(layer)) for layer in layers]
    return bool((a.rows == b.rows).all()) and all(torch.allclose(x, y, atol=atol, rtol=0) for x, y in pairs)


def drawn(rng: random.Random, chunks: list[Chunk]) -> list[Chunk]:
    """Documents in any order, some twice."""
    return rng.choices(chunks, k=rng.randint(1, 6))


@pytest.mark.parametrize("architecture", each_kind())
def test_any_stream_of_batches_is_linked_as_without_a_pool(architecture: str, store: Store) -> None:
    """Moves, duplicates, cycles and parts that are loaded for several, under all kinds of policies."""
    model, chunks, rng = subject(architecture).model, make_chunks(LENGTHS), random.Random(5)
    pool = residents(model, 2 * (170 + GROWTH))
    kinds = [default_policy(name) for name in ("naive", "legolink", "cacheblend", "full")]
    uses: list[PoolUse] = []
    for size in (1, 1, 3, 4, 2):
        specs = [spec(drawn(rng, chunks), rng.choice(kinds)) for _ in range(size)]
        outcomes = link_batches(model, store, specs, pool)
        for wanted in specs:
            index, own = next(outcomes)
            assert isinstance(own, Linked) and wanted is specs[index] and own.pool is not None
            plain = link(model, store, wanted)
            assert same(own, plain)
            assert generate(model, own.image, 5).tokens == generate(model, plain.image, 5).tokens
            uses.append(own.pool)
            del own
        assert next(outcomes, None) is None
    assert max(use.requests for use in uses) > 1 and all(use.has_room for use in uses)
    assert all(sum(getattr(use, name) for use in uses) for name in ("resident", "stayed", "shared", "loaded"))
    assert any(use.moved.duplicates and use.requests > 1 for use in uses)


def batches(model: Model, store: Store, specs: list[Spec], pool: ResidentObjects) -> list[tuple[PoolUse, int]]:
    """What each link of a batch got of the pool, and read; it is the ordinary link."""
    got = []
    for index, linked in link_batches(model, store, specs, pool):
        assert isinstance(linked, Linked) and linked.pool is not None
        assert same(linked, link(model, store, specs[index]))
        got.append((linked.pool, linked.bytes_read))
        del linked
    return got


def test_a_batch_has_one_plan_of_duplicates_and_cycles(store: Store) -> None:
    model, lego = subject("llama").model, make_policy("legolink", {"k": 3})
    one, two = make_chunks((29, 17))
    pool, head = residents(model, 3 * (100 + GROWTH)), len(model.encode(PromptText(HEAD)))
    batches(model, store, [spec([one, two], lego)], pool)
    (first, _), (second, read) = batches(model, store, [spec([one, two], lego), spec([two, one], lego)], pool)
    assert first.requests == second.requests == 2 and first.moved == second.moved and read == 0
    assert first.stayed == first.resident == second.resident == 46 + head and second.stayed == 0
    assert (first.moved.moves, first.moved.tokens, first.moved.duplicates) == (3, 46 + head, 3)
    assert 0 < first.moved.scratch_bytes < (46 + head) * slot_bytes(model) and first.moved.tokens_per_ms > 0
    # Both orders are there, so both stay; and a swap of the two in their regions is one plan, too.
    assert all(
        use.moved.moves == 0 for use, _ in batches(model, store, [spec([two, one], lego), spec([one, two], lego)], pool)
    )


def test_what_several_of_a_batch_want_is_loaded_once(store: Store) -> None:
    model, naive = subject("qwen3").model, make_policy("naive")
    one, two = make_chunks((29, 17))
    head = len(model.encode(PromptText(HEAD)))
    (first, read), (second, again) = batches(
        model, store, [spec([one, two], naive), spec([two, one, two], naive)], residents(model, 3 * (100 + GROWTH))
    )
    assert (first.loaded, first.shared, first.resident) == (46 + head, 0, 0) and read > 0
    assert (second.loaded, second.shared, second.resident) == (0, 63 + head, 0) and again == 0


def test_prompts_with_the_same_documents_in_the_same_places_take_turns_there(store: Store) -> None:
    model, chunks, lego = subject("llama").model, make_chunks((29, 17)), make_policy("legolink", {"k": 3})
    specs = [spec(chunks, lego, f" {word}?") for word in ("why", "who", "where")]
    uses = [use for use, _ in batches(model, store, specs, residents(model, 3 * (100 + GROWTH)))]
    assert [use.requests for use in uses] == [1, 1, 1] and [use.moved.moves for use in uses] == [0, 0, 0]
    assert uses[1].stayed == uses[2].stayed == uses[0].loaded == 46 + len(model.encode(PromptText(HEAD)))


@pytest.mark.parametrize(("tokens", "requests", "has_room"), [(400, 1, True), (800, 2, True), (260, 1, False)])
def test_a_batch_is_as_large_as_the_pool_has_room_for(store: Store, tokens: int, requests: int, has_room: bool) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17)), make_policy("naive")
    specs = [spec(order, naive) for order in (chunks, chunks[::-1], chunks[:1], chunks[1:])]
    pool = residents(model, tokens)
    uses = [use for use, _ in batches(model, store, specs, pool)]
    assert {(use.requests, use.has_room) for use in uses} == {(requests, has_room)}
    assert (pool.counts.resident_bytes > 0) == has_room and pool.counts.loaded_bytes > 0


def test_a_batch_is_as_large_as_files_may_be_open(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17)), make_policy("naive")
    specs = [spec(order, naive) for order in (chunks, chunks[::-1], chunks[:1], chunks[1:])]
    monkeypatch.setattr(batch, "_OPEN_FILES", 5)  # a head and two documents, and some of the next
    uses = [use for use, _ in batches(model, store, specs, residents(model, 4 * (100 + GROWTH)))]
    assert [use.requests for use in uses] == [2, 2, 2, 2]


def test_an_image_that_is_held_over_a_batch_is_never_touched(store: Store) -> None:
    model, chunks, policy = subject("llama").model, make_chunks(LENGTHS), make_policy("legolink", {"k": 4})
    pool, specs = residents(model, 3 * (150 + GROWTH)), [spec(chunks[at:], policy) for at in range(5)]
    held = [linked for _, linked in link_batches(model, store, specs, pool)]
    for wanted, linked in zip(specs, held, strict=True):
        assert isinstance(linked, Linked) and same(linked, link(model, store, wanted))
    assert [linked.pool.has_room for linked in held if isinstance(linked, Linked) and linked.pool] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_what_one_of_a_batch_cannot_load_the_others_do_themselves(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17, 40)), make_policy("naive")
    pool = residents(model, 4 * (150 + GROWTH))
    good, other, bad = (done.path for done in TorchEngine(model, store).compile(chunks, CompileOptions()))
    whole = bad.read_bytes()
    flip(bad, len(whole) - 3)  # in the last layer's values
    specs = [Spec.raw([str(path) for path in paths], TAIL, naive, HEAD)
             for paths in ((good, bad), (other, good), (good, Path("no.kvo")), (good, other))]  # fmt: skip
    outcomes = dict(link_batches(model, store, specs, pool))
    assert isinstance(outcomes[0], ObjectError) and isinstance(outcomes[2], PicError)
    for index in (1, 3):
        own = outcomes[index]
        assert isinstance(own, Linked) and own.pool is not None and own.pool.shared == 0 < own.pool.loaded
        assert same(own, link(model, store, specs[index]))
    outcomes.clear()
    assert same(link(model, store, specs[1], residents=pool), link(model, store, specs[1]))


def test_a_batch_that_nobody_wants_any_more_ends(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17)), make_policy("naive")
    pool, specs = residents(model, 3 * (100 + GROWTH)), [spec(order, naive) for order in (chunks, chunks[::-1])]
    outcomes = link_batches(model, store, specs, pool)
    next(outcomes)
    outcomes.close()
    (use, read), _ = batches(model, store, specs, pool)
    assert use.requests == 2 and use.stayed == use.resident == 46 + len(model.encode(PromptText(HEAD))) and read == 0


def test_streams_that_take_turns_stay_where_they_are(store: Store) -> None:
    """A prompt gets the slots where most of its documents are in their places."""
    model, naive = subject("llama").model, make_policy("naive")
    one, two = make_chunks((29, 17, 23, 40)), make_chunks((31, 19, 8), seed=1)
    pool = residents(model, 2 * (150 + GROWTH))
    batches(model, store, [spec(one, naive), spec(two, naive)], pool)
    uses = [batches(model, store, [spec(chunks, naive)], pool)[0][0] for chunks in (one, two, one, two)]
    assert all(use.stayed == use.resident and not use.loaded for use in uses)


@pytest.mark.parametrize("policy", policies())
def test_every_policy_leaves_documents_as_they_were_compiled(policy: str, store: Store) -> None:
    """What it wrote over them is undone before the next link, in another order and under naive reuse."""
    model, chunks = subject("llama").model, make_chunks(LENGTHS)
    pool = residents(model, 200 + GROWTH)
    link(model, store, spec(chunks, default_policy(policy)), residents=pool)
    wanted = spec(chunks[::-1], make_policy("naive"))
    again = link(model, store, wanted, residents=pool)
    assert same(again, link(model, store, wanted)) and again.pool is not None
    linked = default_policy(policy).needs
    if linked.objects:  # else these are other objects
        assert again.pool.resident > 100 and again.bytes_read < 10_000


def test_documents_that_stay_cost_nothing(store: Store) -> None:
    model, chunks = subject("llama").model, make_chunks((29, 17, 40))
    pool, naive = residents(model, 200 + GROWTH), make_policy("naive")
    first = link(model, store, spec(chunks, naive), residents=pool)
    total = first.image.layout.num_context
    assert first.pool is not None and (first.pool.loaded, first.pool.resident) == (total, 0) and first.bytes_read > 0
    del first
    second = link(model, store, spec(chunks, naive, " who?"), residents=pool)
    assert second.pool is not None and second.bytes_read == 0 == second.pool.moved.moves
    assert second.pool.stayed == second.pool.resident == total


def test_documents_that_make_room_are_parked_and_come_back(store: Store) -> None:
    model, naive = subject("qwen3").model, make_policy("naive")
    one, two, three, four = make_chunks((29, 17, 40, 23))
    pool = residents(model, 160 + GROWTH)
    for chunks in ([one, two], [three, four], [two, three, one]):
        linked = link(model, store, spec(chunks, naive), residents=pool)
        assert same(linked, link(model, store, spec(chunks, naive))) and linked.pool is not None
        loaded = linked.pool.loaded
        del linked
    assert loaded == 0


def test_the_least_recently_used_are_evicted(store: Store) -> None:
    model, naive = subject("llama").model, make_policy("naive")
    one, two, three = make_chunks((40, 41, 42))
    pool = residents(model, 110 + GROWTH)  # one prompt, and one document beside
    for chunk in (one, two, three):
        link(model, store, spec([chunk], naive), residents=pool)
    assert link(model, store, spec([two], naive), residents=pool).bytes_read == 0
    assert link(model, store, spec([one], naive), residents=pool).bytes_read > 0


def test_an_image_that_is_held_is_never_touched(store: Store) -> None:
    model, chunks, policy = subject("llama").model, make_chunks(LENGTHS), make_policy("legolink", {"k": 4})
    pool = residents(model, 3 * (150 + GROWTH))
    held = [link(model, store, spec(chunks[at:], policy), residents=pool) for at in range(4)]
    uses = [linked.pool for linked in held]
    assert all(use is not None and not use.resident for use in uses)  # each has documents of its own
    assert [use is not None and use.has_room for use in uses] == [True, True, True, False]
    for at, linked in enumerate(held):
        plain = link(model, store, spec(chunks[at:], policy))
        assert same(linked, plain)
        assert generate(model, linked.image, 9).tokens == generate(model, plain.image, 9).tokens
    held.clear()
    assert link(model, store, spec(chunks, policy), residents=pool).bytes_read == 0


def test_an_answer_longer_than_its_room_goes_on_elsewhere(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17)), make_policy("naive")
    pool = residents(model, 2 * GROWTH)
    own, plain = link(model, store, spec(chunks, naive), residents=pool), link(model, store, spec(chunks, naive))
    for token in range(5, GROWTH + 9):
        assert torch.equal(own.image.append(token), plain.image.append(token))
    del own
    assert same(link(model, store, spec(chunks, naive), residents=pool), link(model, store, spec(chunks, naive)))


def test_a_link_that_fails_leaves_nothing_half_loaded(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29, 17, 40)), make_policy("naive")
    pool, engine = residents(model, 200 + GROWTH), TorchEngine(model, store)
    compiled = engine.compile(chunks, CompileOptions())
    good, bad = compiled[0].path, compiled[2].path
    link(model, store, Spec.raw([str(good)], TAIL, naive, HEAD), residents=pool)
    data = bad.read_bytes()
    flip(bad, len(data) - 3)  # in the last layer's values
    with pytest.raises(ObjectError):
        link(model, store, Spec.raw([str(bad), str(good)], TAIL, naive, HEAD), residents=pool)
    bad.write_bytes(data)
    wanted = Spec.raw([str(bad), str(good)], TAIL, naive, HEAD)
    linked = link(model, store, wanted, residents=pool)
    assert same(linked, link(model, store, wanted)) and linked.pool is not None
    assert (linked.pool.resident, linked.pool.loaded) == (29 + len(model.encode(PromptText(HEAD))), 40)


def test_a_salt_finds_no_object_of_another(store: Store) -> None:
    model, chunks, naive = subject("llama").model, make_chunks((29,)), make_policy("naive")
    pool = residents(model, 200 + GROWTH)
    link(model, store, spec(chunks, naive), residents=pool)
    salted = link(model.with_salt("s" * 32), store, spec(chunks, naive), residents=pool)
    assert salted.pool is not None and salted.pool.resident == 0


def test_an_engine_with_a_pool_answers_and_reports(store: Store, tmp_path: Path) -> None:
    model, chunks, policy = subject("llama").model, make_chunks((29, 17)), make_policy("legolink")
    with TorchEngine(model, store, 1 << 22) as engine:
        reports: list[dict[str, Any]] = [
            engine.answer(spec(order, policy)).report() for order in (chunks, chunks[::-1])
        ]
    assert "pool" not in TorchEngine(model, store).answer(spec(chunks, policy)).report()
    head = len(model.encode(PromptText(HEAD)))
    first, second = (report["pool"] for report in reports)
    assert first["loaded"] == second["resident"] == 46 + head and second["stayed"] == head
    assert (second["moves"], second["moved"], second["duplicates"]) == (2, 46, 0) and second["tokens_per_ms"] > 0
    assert 0 < second["scratch"] <= 46


def test_bad_pools_are_refused(store: Store) -> None:
    model = subject("llama").model
    least = (GROWTH + 1) * slot_bytes(model)
    with pytest.raises(InputError, match=f" 100 .* llama.* {least} "):
        TorchEngine(model, store, 100)
    with pytest.raises(ModelError, match=r"^phi3-long: "):
        TorchEngine(subject("phi3-long").model, store, 1 << 22)


def test_gaps() -> None:
    assert first_gap([], 5, 5) == 0 and first_gap([], 6, 5) is None
    assert (
        first_gap([(0, 2), (6, 8)], 4, 10) == 2
        and first_gap([(6, 8), (0, 2)], 5, 12) is None
        and first_gap([(0, 2)], 3, 5) == 2
    )
