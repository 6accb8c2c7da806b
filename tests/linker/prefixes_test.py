"""Exact prefixes in a pool: conversations in random interleavings, against `transformers` and against links without."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import emulated
import numpy as np
import pytest
import tiny
import torch
from subjects import Subject, default_policy, each_kind, make_chunks, subject

from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions, Layout
from pictool.linker.fusor import Fusor
from pictool.linker.link import Linked, link
from pictool.linker.plan import make_plan, plan_without_objects
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.pooled import keep_prefix
from pictool.linker.prefixes import BLOCK, BlockChain, LinkedSpan
from pictool.linker.residency import ResidentObjects, slots_of
from pictool.linker.spec import Spec
from pictool.recognition.matches import Match
from pictool.runtime.decode import generate_steps
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import PooledImage, default_pool_bytes, slot_bytes
from pictool.runtime.model import Model
from pictool.store.memory import LayerMemory
from pictool.store.store import Store

FULL = make_policy("full")


def pool_of(model: Model, tokens: int, memory: LayerMemory | None = None, kept: Store | None = None) -> ResidentObjects:
    return ResidentObjects(model, tokens * slot_bytes(model), keeps_prefixes=True, kept=kept, memory=memory)


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, tiny.VOCAB) for _ in range(count)]


def ask(
    model: Model, store: Store, tokens: list[int], pool: ResidentObjects | None, policy: Policy = FULL,
    matches: tuple[Match, ...] = (), is_fresh: bool = False,
) -> Linked:  # fmt: skip
    ids = np.asarray(tokens, dtype=np.int32)
    plan = make_plan(policy, ids, matches) if matches else plan_without_objects(policy, ids)
    return link(model, store, replace(Spec.planned(plan), is_fresh=is_fresh), residents=pool)


def prefix_of(linked: Linked) -> int:
    assert linked.pool is not None
    return linked.pool.prefix


def slots_used(pool: ResidentObjects) -> int:
    """Slots of the pool that something takes, of which no two overlap."""
    pool.find_prefix("", Layout.of([], [], [1]), [], True)  # settles
    assert not pool._regions and not any(piece.is_held for piece in pool._prefixes.pieces)
    spans = sorted([*slots_of(pool._prefixes.pieces), *slots_of(pool._residents)])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), spans
    assert all(0 <= start < end <= pool.num_slots for start, end in spans)
    return sum(end - start for start, end in spans)


def greedy(one: Subject, tokens: list[int], count: int) -> list[int]:
    """`transformers`' own answer."""
    with torch.inference_mode():
        out = one.reference.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long), do_sample=False,
            max_new_tokens=count,
        )  # fmt: skip
    return [int(token) for token in out[0, len(tokens) :]]


@dataclass
class Talk:
    """A conversation: its tokens so far, and its tenant."""

    salt: str
    tokens: list[int] = field(default_factory=list)


@pytest.mark.parametrize("architecture", each_kind())
def test_interleaved_conversations_answer_as_transformers_does(architecture: str, store: Store) -> None:
    """Turns, forks, cancelled answers and tenants in a pool that holds two or three of them."""
    one, rng = subject(architecture), random.Random(architecture)
    models = {salt: one.model.with_salt(salt) for salt in ("", "s" * 32)}
    pool = pool_of(one.model, 3 * (120 + GROWTH))
    start = drawn(rng, 40)
    talks = [Talk(salt, [*start]) for salt in models for _ in range(3)]
    reused = asked = 0
    for turn in range(24):
        talk = rng.choice(talks)
        if len(talk.tokens) > 200:
            talk.tokens = talk.tokens[: rng.randrange(40, 120)]  # another continuation of the same history
        talk.tokens += drawn(rng, rng.randint(1, 40))
        linked = ask(models[talk.salt], store, talk.tokens, pool)
        reused, asked = reused + prefix_of(linked), asked + len(talk.tokens)
        steps = generate_steps(models[talk.salt], linked.image, 6)
        answer = [step.token for step, _ in zip(steps, range(rng.randint(1, 6)), strict=False)]
        answer = [token for token in answer if token >= 0]
        if turn % 3 == 0:
            assert answer == greedy(one, talk.tokens, 6)[: len(answer)]
        else:
            exact = ask(one.model, store, talk.tokens, None)
            torch.testing.assert_close(linked.image.logits, exact.image.logits, atol=1e-4, rtol=0)
        talk.tokens += answer
        del linked, steps
        assert slots_used(pool) <= pool.num_slots
    assert reused > asked // 4


def test_requests_under_way_together_share_and_leave_nothing_behind(store: Store) -> None:
    """Images that are alive at once, in a pool with room for some: in it, and beside it."""
    one, rng = subject("llama"), random.Random(4)
    pool, start = pool_of(one.model, 3 * (150 + GROWTH)), drawn(rng, 70)
    alive: list[tuple[list[int], Linked]] = []
    rooms = set[bool]()
    ask(one.model, store, start, pool)
    for _ in range(60):
        tokens = [*start[: rng.choice((33, 64, 70))], *drawn(rng, rng.randint(1, 60))]
        linked = ask(one.model, store, tokens, pool)
        assert linked.pool is not None and linked.pool.prefix >= 32
        rooms.add(linked.pool.has_room)
        alive.append((tokens, linked))
        del linked
        if len(alive) > 4:
            tokens, linked = alive.pop(rng.randrange(len(alive)))
            exact = ask(one.model, store, tokens, None)
            for token in drawn(rng, 9):
                torch.testing.assert_close(linked.image.append(token), exact.image.append(token), atol=1e-4, rtol=0)
            for layer in range(3):
                torch.testing.assert_close(linked.image.key(layer), exact.image.key(layer), atol=1e-4, rtol=0)
            del linked
    assert rooms == {True, False}
    alive.clear()
    assert 0 < slots_used(pool) <= pool.num_slots


@pytest.mark.parametrize("room", [24, 6])
def test_24_conversations_in_turn_stay_within_the_budget(room: int, store: Store) -> None:
    """With room for all, each reuses its whole blocks; what was evicted is computed again, and nothing leaks."""
    one, rng = subject("llama"), random.Random(room)
    models = [one.model.with_salt(salt * 32) for salt in ("a", "b")]
    pool, alive = pool_of(one.model, room * (130 + GROWTH)), list[Linked]()
    talks = [Talk("", drawn(rng, rng.randint(30, 50))) for _ in range(24)]
    for turn in range(3):
        for number, talk in enumerate(talks):
            before = len(talk.tokens) if turn else 0
            talk.tokens += drawn(rng, rng.randint(5, 20))
            linked = ask(models[number % 2], store, talk.tokens, pool)
            assert prefix_of(linked) <= before // BLOCK * BLOCK
            assert room < 24 or prefix_of(linked) == before // BLOCK * BLOCK
            if number % 8 == turn:
                exact = ask(one.model, store, talk.tokens, None)
                torch.testing.assert_close(linked.image.logits, exact.image.logits, atol=1e-4, rtol=0)
            answer = [step.token for step, _ in zip(generate_steps(one.model, linked.image, 9), range(4), strict=False)]
            talk.tokens += [token for token in answer[:-1] if token >= 0]  # the client vanished before the last one
            alive = [*alive, linked][-4:]  # as many are under way at once
            del linked
    alive.clear()
    assert slots_used(pool) <= pool.num_slots
    counts = pool.counts
    assert 0 < counts.prefix_bytes <= pool.num_slots * slot_bytes(one.model)
    assert (counts.evicted_bytes > 0) == (room < 24)
    assert pool._pool is not None
    held = sum(part.nbytes for layers in (pool._pool.raw, pool._pool.keys, pool._pool.values) for part in layers)
    assert held == pool.num_slots * slot_bytes(one.model)


def test_the_answer_is_a_prefix_and_a_long_one_grows_in_the_pool(store: Store) -> None:
    model, rng = subject("llama").model, random.Random(2)
    pool, tokens = pool_of(model, 1200), drawn(rng, 50)
    linked, added = ask(model, store, tokens, pool), drawn(rng, GROWTH + 90)
    for token in added[:40]:
        linked.image.append(token)
    linked.image.rewind()
    for token in added:
        linked.image.append(token)
    del linked
    again = ask(model, store, [*tokens, *added, 5], pool)
    assert prefix_of(again) == (len(tokens) + len(added)) // BLOCK * BLOCK
    exact = ask(model, store, [*tokens, *added, 5], None)
    torch.testing.assert_close(again.image.logits, exact.image.logits, atol=1e-4, rtol=0)
    del again
    other = ask(model, store, [*tokens, *added[:40], 5, 6], pool)
    assert prefix_of(other) == (len(tokens) + 40) // BLOCK * BLOCK  # a fork in the answer


def test_salts_share_no_block(store: Store) -> None:
    model, tokens = subject("llama").model, drawn(random.Random(3), 100)
    pool = pool_of(model, 2 * (100 + GROWTH))
    ask(model.with_salt("a" * 32), store, tokens, pool)
    for salt, found in (("", 0), ("b" * 32, 0), ("a" * 32, 96), ("b" * 32, 96)):
        assert prefix_of(ask(model.with_salt(salt), store, tokens, pool)) == found


def test_a_fresh_request_neither_reuses_nor_leaves_anything(store: Store) -> None:
    model, tokens = subject("llama").model, drawn(random.Random(3), 100)
    pool = pool_of(model, 2 * (100 + GROWTH))
    assert prefix_of(ask(model, store, tokens, pool, is_fresh=True)) == 0
    assert prefix_of(ask(model, store, tokens, pool)) == 0
    assert prefix_of(ask(model, store, tokens, pool, is_fresh=True)) == 0


def compiled(model: Model, store: Store, length: int) -> Match:
    (done,) = compile_chunks(model, store, make_chunks((length,)), CompileOptions())
    return Match(done.key, 0, np.asarray(done.chunk.tokens, dtype=np.int32))


def at(match: Match, start: int) -> Match:
    return Match(match.key, start, match.tokens, match.offset)


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("name", ["naive", "legolink", "cacheblend"])
def test_what_a_linked_part_touched_serves_its_own_kind_alone(architecture: str, name: str, store: Store) -> None:
    """Rule 12. Head (40), a document (29), and what follows on it."""
    model, rng = subject(architecture).model, random.Random(name)
    policy = default_policy(name)
    match, pool = compiled(model, store, 29), pool_of(model, 4 * (220 + GROWTH))
    head, tail, more = drawn(rng, 40), drawn(rng, 60), drawn(rng, 30)
    first = [*head, *match.tokens.tolist(), *tail]
    turns = [first, [*first, *more], [*first, *more, 7, 8]]
    for turn, tokens in enumerate(turns):
        own = ask(model, store, tokens, pool, policy, (at(match, 40),))
        plain = ask(model, store, tokens, None, policy, (at(match, 40),))
        touched = {0: 0, 1: len(first), 2: len(first) + len(more)}[turn] // BLOCK * BLOCK
        spared = 80 - 32  # blocks that the document is in
        found = 0 if turn == 0 else touched - spared if policy.needs.is_local else 32
        assert prefix_of(own) == found
        torch.testing.assert_close(own.image.logits, plain.image.logits, atol=1e-4, rtol=0)
        del own
    exact = ask(model, store, turns[1], pool)
    assert prefix_of(exact) == 32  # the head, before anything was linked
    torch.testing.assert_close(exact.image.logits, ask(model, store, turns[1], None).image.logits, atol=1e-4, rtol=0)
    del exact
    other = ask(model, store, turns[2], pool, make_policy("legolink", {"k": 7}), (at(match, 40),))
    assert prefix_of(other) == len(turns[1]) // BLOCK * BLOCK and other.computed == {40}  # it was computed exactly
    del other
    assert slots_used(pool) <= pool.num_slots


def test_a_prefix_that_ends_in_a_document_leaves_it_to_be_linked(store: Store) -> None:
    model, rng, policy = subject("llama").model, random.Random(9), make_policy("legolink", {"k": 4})
    match, pool = compiled(model, store, 40), pool_of(model, 3 * (200 + GROWTH))
    head = drawn(rng, 40)
    ask(model, store, [*head, *match.tokens[:30].tolist()], pool)
    tokens = [*head, *match.tokens.tolist(), *drawn(rng, 9)]
    linked = ask(model, store, tokens, pool, policy, (at(match, 40),))
    assert prefix_of(linked) == 32 and linked.recomputed < 20
    plain = ask(model, store, tokens, None, policy, (at(match, 40),))
    torch.testing.assert_close(linked.image.logits, plain.image.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["naive", "legolink", "cacheblend"])
def test_tokens_between_a_prefix_and_a_document_are_computed(name: str, store: Store) -> None:
    """The prefix ends in the second document; the end of the first one is in the block in which the second begins."""
    model, rng, policy = subject("llama").model, random.Random(9), default_policy(name)
    documents = make_chunks((29, 40))
    one, two = (compiled(model, store, len(document)) for document in documents)
    pool = pool_of(model, 3 * (200 + GROWTH))
    tokens = [*drawn(rng, 40), *documents[0].tokens, *documents[1].tokens, *drawn(rng, 9)]
    ask(model, store, tokens[:97], pool)
    linked = ask(model, store, tokens, pool, policy, (at(one, 40), at(two, 69)))
    assert prefix_of(linked) == 64 and linked.prefix is not None and linked.prefix.exact_end == 64
    exact = ask(model, store, tokens, None)
    for layer in range(3):
        torch.testing.assert_close(linked.image.key(layer)[:, :, :69], exact.image.key(layer)[:, :, :69])


@pytest.mark.parametrize("name", ["naive", "legolink", "cacheblend"])
def test_what_was_computed_after_a_linked_document_is_not_linked_later(name: str, store: Store) -> None:
    """A part that became an object since: the next turn takes it as it was computed, if the rows are the same."""
    model, rng, policy = subject("llama").model, random.Random(9), default_policy(name)
    documents = make_chunks((29, 40))
    one, two = (compiled(model, store, len(document)) for document in documents)
    pool = pool_of(model, 3 * (300 + GROWTH))
    first = [*drawn(rng, 40), *documents[0].tokens, *drawn(rng, 30), *documents[1].tokens, *drawn(rng, 30)]
    ask(model, store, first, pool, policy, (at(one, 40),))
    tokens = [*first, *drawn(rng, 20)]
    linked = ask(model, store, tokens, pool, policy, (at(one, 40), at(two, 99)))
    both, alone = (at(one, 40), at(two, 99)), (at(one, 40),)
    plain = ask(model, store, tokens, None, policy, alone if policy.needs.is_local else both)
    torch.testing.assert_close(linked.image.logits, plain.image.logits, atol=1e-4, rtol=0)
    assert linked.computed == ({99} if policy.needs.is_local else set())
    assert prefix_of(linked) == (len(first) // BLOCK * BLOCK - 48 if policy.needs.is_local else 32)
    del linked
    other = [*tokens[:99], *documents[1].tokens, *drawn(rng, 60)]  # it goes on in another way
    assert ask(model, store, other, pool, policy, both).computed == ({99} if policy.needs.is_local else set())
    other = [*tokens[:80], *drawn(rng, 19), *documents[1].tokens, *drawn(rng, 60)]  # it differs before the document
    assert ask(model, store, other, pool, policy, both).computed == set()


def test_documents_and_prefixes_are_evicted_in_one_order(store: Store) -> None:
    model, rng, naive = subject("llama").model, random.Random(5), make_policy("naive")
    match, pool = compiled(model, store, 40), pool_of(model, GROWTH + 170)
    talk = drawn(rng, 90)
    tokens = [*drawn(rng, 2), *match.tokens.tolist(), *drawn(rng, 3)]
    ask(model, store, tokens, pool, naive, (at(match, 2),))
    ask(model, store, talk, pool)
    assert prefix_of(ask(model, store, talk, pool)) == 80
    assert ask(model, store, tokens, pool, naive, (at(match, 2),)).bytes_read == 0  # both are there
    for _ in range(3):
        ask(model, store, drawn(rng, 150), pool)
    assert pool.counts.evicted_bytes > 0
    assert ask(model, store, tokens, pool, naive, (at(match, 2),)).bytes_read > 0
    assert prefix_of(ask(model, store, talk, pool)) == 0
    assert 0 < pool.counts.prefix_bytes <= pool.num_slots * slot_bytes(model)


def test_a_link_that_is_cancelled_leaves_no_half_computed_block(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = subject("llama").model, drawn(random.Random(3), 100)
    pool, calls, whole = pool_of(model, 2 * (100 + GROWTH)), iter(range(100)), Fusor.prefill_layer

    class Gone(Exception):
        pass

    def prefill_layer(self: Fusor, layer: int) -> None:
        if next(calls) == 1:
            raise Gone
        whole(self, layer)

    plan = plan_without_objects(FULL, np.asarray(tokens, dtype=np.int32))
    with monkeypatch.context() as patched, pytest.raises(Gone):
        patched.setattr(Fusor, "prefill_layer", prefill_layer)
        link(model, store, Spec.planned(plan), residents=pool)
    assert slots_used(pool) == 0
    assert prefix_of(ask(model, store, tokens, pool)) == 0


def test_keys_of_blocks() -> None:
    tokens = list(range(70))
    chain = BlockChain("salt").extend(tokens)
    assert len(chain.keys) == 4 and chain.extend(range(70, 80)).keys == BlockChain("salt").extend(range(80)).keys
    assert BlockChain("").extend(tokens).keys[0] != chain.keys[0]
    marked = BlockChain("salt", [LinkedSpan(20, 40, b"one")]).extend(range(80)).keys
    assert marked[0] == chain.keys[0] and marked[1] == marked[2] == b""
    assert not {*marked[3:]} & {*chain.keys} and all(marked[3:])
    for other in (LinkedSpan(20, 40, b"two"), LinkedSpan(21, 40, b"one"), LinkedSpan(20, 41, b"one")):
        assert not {*BlockChain("salt", [other]).extend(range(80)).keys[3:]} & {*marked[3:]}
    assert BlockChain("salt", [], 33).extend(tokens).extend(range(9)).keys == chain.keys[:2]


def test_a_model_whose_rotation_depends_on_the_length_has_no_pool_by_default() -> None:
    assert default_pool_bytes(subject("phi3-long").model) == default_pool_bytes(subject("llama-dynamic").model) == 0
    assert default_pool_bytes(subject("llama").model) == 16 * (512 + GROWTH) * slot_bytes(subject("llama").model)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("budget", [1 << 26, 1 << 15], ids=["all", "some"])
def test_what_a_device_evicts_comes_back_from_host_memory(
    architecture: str, budget: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of conversations, with and without a document, of which the pool holds one: no race, and exact answers."""
    one, rng, memory = subject(architecture), random.Random(architecture), LayerMemory(budget)
    legolink, match = make_policy("legolink", {"k": 4}), compiled(one.model, store, 29)
    talks = [Talk("", drawn(rng, 40)) for _ in range(4)]
    missed, rooms, alive = 0, set[bool](), list[Linked]()
    with monkeypatch.context() as patch, emulated.emulated(patch):
        pool = pool_of(one.model, 250 + GROWTH, memory)
        for turn, (number, talk) in itertools.product(range(4), enumerate(talks)):
            policy, matches = (legolink, (at(match, 40),)) if number == 3 else (FULL, ())
            talk.tokens += match.tokens.tolist() if number == 3 and not turn else []
            before, talk.tokens = len(talk.tokens), [*talk.tokens, *drawn(rng, 35)]
            linked = ask(one.model, store, talk.tokens, pool, policy, matches)
            most = before // BLOCK * BLOCK - (48 if number == 3 else 0)
            missed += max(0, most - prefix_of(linked)) if turn in (1, 2) else 0
            rooms.add(linked.pool is not None and linked.pool.has_room)
            plain = ask(one.model, store, talk.tokens, None, policy, matches)
            torch.testing.assert_close(linked.image.logits, plain.image.logits, atol=1e-4, rtol=0)
            alive = [linked] if turn == 2 else []  # the next one's image is not in the pool
            del linked
            assert memory.num_bytes <= budget
        alive.clear()
        assert slots_used(pool) <= pool.num_slots
    assert rooms == {True, False} and (missed > 0) == (budget == 1 << 15)
    assert pool.counts.restored_bytes > 0 and 0 < pool.counts.saved_bytes <= pool.counts.evicted_bytes


def test_blocks_from_host_memory_are_bit_for_bit_those_that_were_evicted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the keys before rotation, of which chains on disk are made, and in runs longer than one copy."""

    def blocks(image: Image, layer: int) -> list[torch.Tensor]:
        assert isinstance(image, PooledImage)
        parts = image.key(layer)[0], image.value(layer)[0], *image.raw(layer, 0, 384)
        return [part[:, :384] for part in parts]

    model, rng = subject("llama").model, random.Random(8)
    monkeypatch.setattr("pictool.linker.residency.LARGE", 10)
    kept, tokens, more = Store(store.root / "kept"), drawn(rng, 400), drawn(rng, 450)
    with monkeypatch.context() as patch, emulated.emulated(patch):
        pool = pool_of(model, 500 + GROWTH, LayerMemory(1 << 26), kept)
        first = ask(model, store, tokens, pool).image
        expected = [[part.clone() for part in blocks(first, layer)] for layer in range(3)]
        del first
        ask(model, store, more, pool)
        again = ask(model, store, tokens, pool)
        assert prefix_of(again) == 384 and pool.counts.restored_bytes == 384 * slot_bytes(model)
        for layer in range(3):
            assert all(map(torch.equal, blocks(again.image, layer), expected[layer]))
        keep_prefix(model, again.image, pool)
    on_disk = ask(model, store, tokens, pool_of(model, 500 + GROWTH, kept=kept))
    assert on_disk.prefix is not None and on_disk.prefix.restored == (0, 384)
    torch.testing.assert_close(on_disk.image.logits, again.image.logits, atol=1e-4, rtol=0)


def test_the_cpu_whose_memory_is_the_host_copies_nothing(store: Store) -> None:
    model, rng, memory = subject("llama").model, random.Random(8), LayerMemory(1 << 26)
    pool = pool_of(model, 200 + GROWTH, memory)
    for _ in range(4):
        ask(model, store, drawn(rng, 150), pool)
    assert pool.counts.evicted_bytes > 0 == memory.num_bytes == pool.counts.saved_bytes
