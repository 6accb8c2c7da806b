"""A server that recognises documents links prompts that say nothing; only whole documents, whatever surrounds them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import vllm_rig as rig
from vllm_matrix import Answered, Count

from pictool.api import compile
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import object_key
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, CompileOptions, PromptText

HEAD = "<s>"  # a longer one would be recognised too, once it was linked


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]) -> tuple[rig.World, rig.Engine]:
    world = rig.make_world(tmp_path_factory.mktemp("recognise"), "llama")
    compile(world.model, world.store, rig.random_chunks(rig.LENGTHS))
    extra = {"recognise": True, "policy": "legolink-4", "min_tokens": 5, "refresh_s": 0.2}
    return world, start(world, extra, enable_prefix_caching=True)


def unsaid(case: rig.Case, params: dict[str, Any] | None = None) -> rig.Case:
    return rig.Case(case.tokens, params, case.linked)


def test_stored_chunks_are_linked(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    case = world.case("legolink-4", head=HEAD)
    (answer,) = engine.ask(unsaid(case))
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None
    assert (answer.report["state"], answer.report["chunks"], answer.report["policy"]) == ("linked", 5, "legolink-4")


def beams_of(make: Callable[..., rig.Case], width: int, length: int) -> list[tuple[list[int], float]]:
    """Beam search over a reference: its best sequences, and their log-probabilities."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(length):
        longer: list[tuple[list[int], float]] = []
        for tokens, total in beams:
            best = make().logprobs([*tokens, 0])[-1].topk(2 * width)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            longer += [([*tokens, token], total + value) for token, value in pairs]
        beams = sorted(longer, key=lambda beam: -beam[1])[:width]
    return beams


def wait_until_recognised(engine: rig.Engine, make: Callable[[], rig.Case]) -> None:
    """Ask until both documents of a prompt are in the index."""
    until = time.monotonic() + 60
    while True:
        (answer,) = engine.ask(unsaid(make()), num_tokens=1)
        if answer.report is not None and answer.report["chunks"] == 2:
            return
        assert time.monotonic() < until
        time.sleep(0.1)


def test_beam_search(pair: tuple[rig.World, rig.Engine], answered: Answered) -> None:
    """vLLM makes a request of every beam and token, without fields: documents in them are recognised each time."""
    from vllm.sampling_params import BeamSearchParams

    world, engine = pair
    count, params = Count(), BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    for seed in range(answered.per_cell):
        is_linked = seed % 5 < 4
        make = partial(world.case, "legolink-4" if is_linked else "full", (41, 38), seed=500 + seed, head=HEAD)
        wanted, tokens = beams_of(make, 2, 3), make().tokens
        if is_linked:
            wait_until_recognised(engine, partial(make, tail=" Why?"))
        else:
            for chunk in rig.random_chunks((41, 38), 500 + seed):
                world.store.path(object_key(world.model, chunk, rig.OPTIONS)).unlink()
        before = engine.metric("pic_linked_requests")
        (output,) = engine.llm.beam_search([{"prompt_token_ids": tokens}], params)
        got = [(beam.tokens[len(tokens) :], beam.cum_logprob) for beam in output.sequences]
        assert [beam for beam, _ in got] == [beam for beam, _ in wanted]
        assert (engine.metric("pic_linked_requests") > before) == is_linked
        count.add(is_linked, max(abs(a - b) for (_, a), (_, b) in zip(got, wanted, strict=True)))
    assert count.difference <= rig.TOLERANCE
    answered.record("beam search", count)


def test_a_request_may_choose_the_policy_or_opt_out(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    chosen, exact = world.case("cacheblend-15", head=HEAD), world.exact(head=HEAD)
    linked, out = engine.ask(
        unsaid(chosen, {"pic": {"recognise": True, "policy": "cacheblend-15"}}), unsaid(exact, {"pic": False})
    )
    assert rig.difference(chosen, linked) <= rig.TOLERANCE
    assert rig.difference(exact, out) <= rig.TOLERANCE and out.report is None


def test_what_is_not_whole_is_not_linked(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    (chunk,) = rig.random_chunks((70,))
    head, tail = world.model.encode(PromptText(HEAD)), world.model.encode(rig.TAIL)
    for middle in (chunk.tokens[1:], chunk.tokens[:-1], (*chunk.tokens[:30], 7, *chunk.tokens[31:])):
        exact = world.case("full", chunks=[Chunk("", middle, "cut")], head=HEAD)
        world.store.path(object_key(world.model, Chunk("", middle, "cut"), rig.OPTIONS)).unlink(missing_ok=True)
        time.sleep(0.5)
        (answer,) = engine.ask(rig.Case([*head, *middle, *tail], None, exact.linked))
        assert rig.difference(exact, answer) <= rig.TOLERANCE
        assert answer.report is None


PASTED = "e harbour was quiet. It holds a festival in the spring; nobody know"
BEFORE, AFTER = "<s>Th", "s why. Numbers?"  # whose letters the tokenizer joins with those of the document


@pytest.mark.parametrize("spec", ["naive", "legolink-4", "legolink-1000", "legolink-1", "cacheblend-15"])
@pytest.mark.parametrize("way", ["recognise", "keys", "chunks"])
def test_a_document_is_linked_from_its_first_to_its_last_token_that_is_the_same(
    pair: tuple[rig.World, rig.Engine], spec: str, way: str
) -> None:
    """The rest is computed: the answer is that of the torch engine with an object of just these tokens and their KV."""
    world, engine = pair
    policy, document = rig.policy_of(spec), make_chunk(world.model, PASTED, "pasted")
    parts = rig.part_of(world, document, slice(1, -1))
    chunk = Chunk("part", document.tokens[1:-1], "part")
    case = parts.case(policy, chunks=[chunk], head=f"{BEFORE}e", tail=f"w{AFTER}")
    assert case.tokens == list(world.model.encode(PromptText(f"{BEFORE}{PASTED}{AFTER}")))
    key = object_key(world.model, document, CompileOptions(after=PREVIOUS))
    ways = {"recognise": True, "keys": [key], "chunks": [{"key": key, "start": 1}]}
    time.sleep(0.5 if way == "recognise" else 0)
    params = {"pic": {way: ways[way], "policy": {"algo": policy.name, **policy.params}}}
    (answer,) = engine.ask(rig.Case(case.tokens, params, case.linked))
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None and (answer.report["chunks"], answer.report["problem"]) == (1, None)
    assert answer.report["context"] == case.linked.image.layout.num_context


def test_a_new_object_is_found_and_a_removed_one_is_not(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    lengths = (41, 42)
    exact = world.exact(lengths, seed=5, head=HEAD)  # the policy full stores no chunk
    for path in paths(world, lengths):
        path.unlink(missing_ok=True)
    time.sleep(0.5)
    (before,) = engine.ask(exact)
    case = world.case("legolink-4", lengths, head=HEAD, seed=5)
    time.sleep(0.5)
    (after,) = engine.ask(unsaid(case))
    assert before.report is None and after.report is not None and after.report["chunks"] == 2
    assert rig.difference(case, after) <= rig.TOLERANCE
    paths(world, lengths)[0].unlink()
    (half,) = engine.ask(unsaid(case))
    assert half.report is not None and half.report["chunks"] == 1


def test_the_sinks_are_those_of_the_policy(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    case = world.case("legolink-1", (53, 54), head=HEAD, seed=6)
    world.case("naive", (53, 54), head=HEAD, seed=6)
    time.sleep(0.5)
    (answer,) = engine.ask(unsaid(case, {"pic": {"recognise": True, "policy": "legolink-1"}}))
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None and answer.report["chunks"] == 2


def paths(world: rig.World, lengths: tuple[int, ...]) -> list[Path]:
    return [world.store.path(object_key(world.model, chunk, rig.OPTIONS)) for chunk in rig.random_chunks(lengths, 5)]
