"""Exact prefixes on llama.cpp: conversations in random interleavings, against `transformers` and links without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from in_llamacpp.pairs import NAMES, Pair, make_pair

from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk, CompileOptions
from pictool.engines.llamacpp.link import LlamaImage
from pictool.engines.llamacpp.sequences import KeptSequences, from_blocks, to_blocks
from pictool.linker.grid import named_policy
from pictool.linker.link import Linked, link
from pictool.linker.plan import make_plan, plan_without_objects
from pictool.linker.pooled import keep_prefix
from pictool.linker.prefixes import BLOCK
from pictool.linker.spec import Spec
from pictool.recognition.matches import Match
from pictool.runtime import turns
from pictool.runtime.model import Model
from pictool.store.store import Store

LARGE = 1 << 30


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield make_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, tiny.VOCAB) for _ in range(count)]


def ask(
    pair: Pair, tokens: list[int], kept: KeptSequences | None, policy: str = "full", matches: tuple[Match, ...] = (),
    model: Model | None = None,
) -> Linked:  # fmt: skip
    model, ids = model or pair.model, np.asarray(tokens, dtype=np.int32)
    made = named_policy(policy)
    plan = make_plan(made, ids, matches, salt=model.salt) if matches else plan_without_objects(made, ids, model.salt)
    return link(model, pair.store, replace(Spec.planned(plan), is_fresh=kept is None), residents=kept)


def match(key: str, start: int, tokens: tuple[int, ...]) -> Match:
    return Match(key, start, np.asarray(tokens, dtype=np.int32))


def prefix_of(linked: Linked) -> int:
    assert linked.pool is not None
    return linked.pool.prefix


def require_exact(pair: Pair, tokens: list[int], logits: torch.Tensor) -> None:
    """The logits after tokens are those of `transformers`."""
    with torch.inference_mode():
        expected = pair.module(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(logits, expected, atol=pair.tolerance, rtol=0)


@pytest.mark.parametrize("num_bytes", [LARGE, 40_000])
def test_interleaved_conversations_are_exact(pair: Pair, num_bytes: int) -> None:
    """Turns, forks, two tenants and answers that end early; more conversations than contexts wait, in host memory that
    holds all of them, or hardly one."""
    rng, kept = random.Random(1), KeptSequences(pair.model.stack, num_bytes)
    models = {salt: pair.model.with_salt(salt) for salt in ("", "s" * 32)}
    start = drawn(rng, 40)
    talks = [(salt, [*start]) for salt in models for _ in range(3)]
    known = {salt: list[list[int]]() for salt in models}
    for _ in range(30):
        salt, tokens = rng.choice(talks)
        if len(tokens) > 200:
            del tokens[rng.randrange(40, 120) :]
        tokens += drawn(rng, rng.randint(1, 40))
        linked = ask(pair, tokens, kept, model=models[salt])
        most = max((_common(tokens, other) for other in known[salt]), default=0) // BLOCK * BLOCK
        assert prefix_of(linked) == most or (num_bytes < LARGE and prefix_of(linked) < most)
        require_exact(pair, tokens, linked.image.logits)  # type: ignore[arg-type]
        for token in drawn(rng, rng.randint(0, 20)):
            tokens.append(token)
            require_exact(pair, tokens, linked.image.append(token))
        known[salt].append([*tokens])
        del linked
    assert kept.counts.saved_bytes > 0 and kept._memory.num_bytes <= num_bytes
    assert (kept.counts.evicted_bytes > 0) == (num_bytes < LARGE) and (
        kept.counts.restored_bytes > 0 or num_bytes < LARGE
    )


def _common(ours: list[int], theirs: list[int]) -> int:
    """The tokens from the beginning that are the same, but for the last of ours, which is always computed."""
    same = [a == b for a, b in zip(ours[:-1], theirs, strict=False)]
    return [*same, False].index(False)


def test_prompts_under_way_together_share_what_is_linked(pair: Pair) -> None:
    rng, kept = random.Random(2), KeptSequences(pair.model.stack, LARGE)
    start, alive = drawn(rng, 70), list[tuple[list[int], Linked]]()
    alive.append((start, ask(pair, start, kept)))
    for _ in range(20):
        tokens = [*start[: rng.choice((33, 64, 70))], *drawn(rng, rng.randint(1, 60))]
        linked = ask(pair, tokens, kept)
        assert prefix_of(linked) >= 32
        alive.append((tokens, linked))
        if len(alive) > 4:
            tokens, linked = alive.pop(rng.randrange(len(alive)))
            for token in drawn(rng, 5):
                tokens = [*tokens, token]
                require_exact(pair, tokens, linked.image.append(token))
        del linked


def test_a_conversation_grows_out_of_its_context_and_is_taken_back(pair: Pair) -> None:
    """The answer is the next prompt's prefix, and so is a part of it, after windows have long left both."""
    rng, kept = random.Random(3), KeptSequences(pair.model.stack, LARGE)
    tokens = drawn(rng, 50)
    linked = ask(pair, tokens, kept)
    image = linked.image
    cells = image.context.num_cells  # type: ignore[attr-defined]
    answer = drawn(rng, cells + 20)
    for token in answer:
        image.append(token)
    del image, linked
    for length in (len(answer), 200, 70, 3):
        again = [*tokens, *answer[:length], 5]
        linked = ask(pair, again, kept)
        assert prefix_of(linked) == (len(again) - 1) // BLOCK * BLOCK
        require_exact(pair, again, linked.image.logits)  # type: ignore[arg-type]
        del linked


def test_taking_back_gives_the_first_tokens_again(llama: Pair) -> None:
    rng, kept = random.Random(4), KeptSequences(llama.model.stack, LARGE)
    tokens = drawn(rng, 40)
    image = ask(llama, tokens, kept).image
    for token in (7, 8, 9):
        image.append(token)
    image.rewind()
    require_exact(llama, [*tokens, 11], image.append(11))
    del image
    again = ask(llama, [*tokens, 11, *drawn(rng, 30)], kept)
    assert prefix_of(again) == 32


@pytest.mark.parametrize("policy", ["naive", "legolink-4"])
def test_linked_documents_are_those_of_a_fresh_prompt(pair: Pair, policy: str) -> None:
    """Conversations with documents go on in place, after a move to host memory, and with another document."""
    rng, kept = random.Random(5), KeptSequences(pair.model.stack, LARGE)
    chunks = [tuple(drawn(rng, 36)) for _ in range(3)]
    objects = compile_chunks(
        pair.model, pair.store, [Chunk("text", chunk, "text") for chunk in chunks], CompileOptions()
    )
    talks = list[tuple[list[int], tuple[Match, ...]]]()
    for first, second in ((0, 1), (1, 2), (0, 2)):
        tokens, placed = drawn(rng, 20), list[Match]()
        for number in (first, second):
            placed.append(match(objects[number].key, len(tokens), chunks[number]))
            tokens = [*tokens, *chunks[number], *drawn(rng, 9)]
        talks.append((tokens, tuple(placed)))
    found = list[int]()
    for _ in range(3):
        for tokens, matches in talks:
            linked, fresh = (ask(pair, tokens, each, policy, matches) for each in (kept, None))
            torch.testing.assert_close(linked.image.logits, fresh.image.logits, atol=pair.tolerance, rtol=0)
            found.append(prefix_of(linked))
            for token in drawn(rng, 30):
                tokens.append(token)
                ours, theirs = (each.image.append(token) for each in (linked, fresh))
                torch.testing.assert_close(ours, theirs, atol=pair.tolerance, rtol=0)
            del linked, fresh
    assert found[:3] == [0, 0, 0] and all(each > 0 for each in found[3:])


def test_tenants_share_nothing_and_a_fresh_prompt_leaves_nothing(llama: Pair) -> None:
    rng, kept = random.Random(6), KeptSequences(llama.model.stack, LARGE)
    tokens, other = drawn(rng, 60), llama.model.with_salt("b" * 32)
    ask(llama, tokens, None)
    assert prefix_of(ask(llama, tokens, kept)) == 0 == prefix_of(ask(llama, tokens, kept, model=other))
    assert prefix_of(ask(llama, tokens, kept, model=other)) == 48


class Stopped(Exception):
    """Whoever asked has gone."""


def test_a_prompt_that_is_cancelled_leaves_what_was_right(pair: Pair) -> None:
    """At each checkpoint in turn: exact prompts, and linked ones."""
    rng = random.Random(7)
    chunk = tuple(drawn(rng, 36))
    (done,) = compile_chunks(pair.model, pair.store, [Chunk("text", chunk, "text")], CompileOptions())
    start = drawn(rng, 40)
    exact = [*start, *drawn(rng, 900)]
    linked = [*start, *chunk, *drawn(rng, 40)]
    for stop in range(4):
        for tokens, matches in ((exact, ()), (linked, (match(done.key, 40, chunk),))):
            kept, passed = KeptSequences(pair.model.stack, LARGE), list[str]()

            def checkpoint(pause: str, passed: list[str] = passed, stop: int = stop) -> None:
                passed.append(pause)
                if len(passed) > stop:
                    raise Stopped

            ask(pair, start, kept)
            turns.set_checkpoint(checkpoint)
            try:
                ask(pair, tokens, kept, "legolink-4", matches)
            except Stopped:
                pass
            finally:
                turns.set_checkpoint(None)  # type: ignore[arg-type]
            again = ask(pair, tokens, kept, "legolink-4", matches)
            fresh = ask(pair, tokens, None, "legolink-4", matches)
            assert prefix_of(again) >= 32
            torch.testing.assert_close(again.image.logits, fresh.image.logits, atol=pair.tolerance, rtol=0)


def test_prompts_take_turns_within_a_link(pair: Pair) -> None:
    """At each checkpoint of a linked prompt in turn, another one begins like it and is answered."""
    rng = random.Random(10)
    chunk = tuple(drawn(rng, 36))
    (done,) = compile_chunks(pair.model, pair.store, [Chunk("text", chunk, "text")], CompileOptions())
    start, rest = drawn(rng, 40), drawn(rng, 40)
    tokens, matches = [*start, *chunk, *rest], (match(done.key, 40, chunk),)
    fresh = ask(pair, tokens, None, "legolink-4", matches).image.logits
    assert fresh is not None
    for turn in range(2):
        kept, passed = KeptSequences(pair.model.stack, LARGE), list[str]()

        def checkpoint(pause: str, passed: list[str] = passed, turn: int = turn, kept: KeptSequences = kept) -> None:
            passed.append(pause)
            if len(passed) == turn + 1:
                other = [*start, *drawn(rng, 20)]
                with turns.without_checkpoints():
                    linked = ask(pair, other, kept)
                assert prefix_of(linked) == 32
                require_exact(pair, other, linked.image.logits)  # type: ignore[arg-type]

        ask(pair, start, kept)
        turns.set_checkpoint(checkpoint)
        try:
            linked = ask(pair, tokens, kept, "legolink-4", matches)
        finally:
            turns.set_checkpoint(None)  # type: ignore[arg-type]
        assert len(passed) > turn and linked.image.logits is not None
        torch.testing.assert_close(linked.image.logits, fresh, atol=pair.tolerance, rtol=0)


def test_blocks_are_the_rows_bit_for_bit(pair: Pair) -> None:
    rng, kept = random.Random(8), KeptSequences(pair.model.stack, LARGE)
    image = ask(pair, drawn(rng, 70), kept).image
    assert isinstance(image, LlamaImage)
    rows = image._rows(16, 64)
    for ours, theirs in zip(rows, from_blocks(pair.model.format, to_blocks(rows, 3)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_prefixes_on_disk_are_exact_after_a_restart(pair: Pair) -> None:
    rng, disk = random.Random(9), Store(pair.store.root / "prefixes")
    kept = KeptSequences(pair.model.stack, LARGE, disk)
    tokens = drawn(rng, 90)
    linked = ask(pair, tokens, kept)
    tokens += drawn(rng, 20)
    for token in tokens[90:]:
        linked.image.append(token)
    keep_prefix(pair.model, linked.image, kept)
    del linked
    started = KeptSequences(pair.model.stack, LARGE, disk)
    again = ask(pair, [*tokens, 9], started)
    assert prefix_of(again) == 96 and again.bytes_read > 0
    require_exact(pair, [*tokens, 9], again.image.logits)  # type: ignore[arg-type]
    other = KeptSequences(pair.model.stack, LARGE, disk)
    assert prefix_of(ask(pair, [*tokens, 9], other, model=pair.model.with_salt("c" * 32))) == 0
