"""What failed elsewhere, as scenarios over this connector (docs/guides/vllm.md): threads of LMCache and vLLM.

The engine's backend keeps V before K, which is another layout than vLLM's own (LMCache #4463: on a layout that had
changed, KV was written to wrong places, and answers were wrong without a word). What assumes a layout fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest
import vllm_rig as rig

from pictool.core import Chunk

Pair = tuple[rig.World, rig.Engine]
SPEC, K = "legolink-4", 4


@pytest.fixture(scope="module")
def writes() -> Iterator[list[int]]:
    """Makes the backend keep V before K; how many tokens each of its writes had."""
    from vllm.v1.attention.backends import cpu_attn

    write, attend, counts = (
        cpu_attn.ops.cpu_attn_reshape_and_cache,
        cpu_attn.ops.cpu_attention_with_kv_cache,
        list[int](),
    )

    def write_swapped(key: Any, value: Any, key_cache: Any, value_cache: Any, *rest: Any, **options: Any) -> None:
        counts.append(len(key))
        write(key, value, value_cache, key_cache, *rest, **options)

    def attend_swapped(*, key_cache: Any, value_cache: Any, **options: Any) -> None:
        attend(key_cache=value_cache, value_cache=key_cache, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attn.ops, "cpu_attn_reshape_and_cache", write_swapped)
        patch.setattr(cpu_attn.ops, "cpu_attention_with_kv_cache", attend_swapped)
        yield counts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any], writes: list[int]) -> Pair:
    world = rig.make_world(tmp_path_factory.mktemp("peers"), "llama")
    return world, start(world, enable_prefix_caching=True)


def with_gaps(world: rig.World, parts: Sequence[tuple[Chunk, bool]], **options: Any) -> rig.Case:
    """A prompt of which some parts have objects; the request names these, and the reference computes the others.

    LegoLink computes the first K tokens of a chunk: all of one that is no longer.
    """
    chunks = [
        Chunk("", part.tokens[at : at + size], "part")
        for part, has_object in parts
        for size in [len(part.tokens) if has_object else K]
        for at in range(0, len(part.tokens), size)
    ]
    case = world.case(SPEC, chunks=chunks, **options)
    assert case.params is not None
    places = case.params["pic"]["chunks"]
    kept = [place for place, chunk in zip(places, chunks, strict=True) if len(chunk.tokens) > K]
    case.params["pic"]["chunks"] = kept
    return case


def require_linked(cases: Sequence[rig.Case], answers: Sequence[rig.Answer], num_documents: int | None = None) -> None:
    for case, answer in zip(cases, answers, strict=True):
        assert rig.difference(case, answer) <= rig.TOLERANCE
        assert answer.report is not None and answer.report["state"] == "linked"
        assert num_documents is None or answer.report["chunks"] == num_documents


def test_a_layout_that_has_changed(pair: Pair, writes: list[int]) -> None:
    """LMCache #4463."""
    world, engine = pair
    cases = [case for case in rig.mixed(world, 6) if case.params is not None]
    require_linked(cases, engine.ask(*cases))
    assert sum(writes) > sum(len(case.tokens) for case in cases)


def test_a_document_after_another_question(pair: Pair) -> None:
    """LMCache #3238: of 2,451 tokens 24 were found, those before the question that comes before the document."""
    world, engine = pair
    (document,) = rig.random_chunks((70,))
    before = engine.metric("pic_reused_tokens")
    for question in (
        "Why?",
        "Who holds a festival?",
        "Where is the harbour, and whose is it?",
        "1,024?",
        "When, then?",
    ):
        case = world.case(SPEC, chunks=[document], head=f"<s>You are a harbour. {question}")
        rig.forget_head(world, case)
        (answer,) = engine.ask(case)
        assert rig.difference(case, answer) <= rig.TOLERANCE
        assert answer.report is not None and (answer.report["state"], answer.report["chunks"]) == ("linked", 1)
        assert (answer.report["document_tokens"], answer.report["document_rows"]) == (70, K)
    assert engine.metric("pic_reused_tokens") - before == 5 * (70 - K)


def test_documents_in_another_order(pair: Pair) -> None:
    """LMCache #5101: chunks with separators, sent as token ids, took as long reordered (0.709 s) as cold (0.728 s).

    Here the work is counted: in every order the rows between the documents and the first ones of each document.
    """
    world, engine = pair
    separator = Chunk(" # # ", tuple(world.model.encode(" # # "))[:K], "separator")
    documents = rig.random_chunks((37, 33, 70), seed=7)
    cases = [
        with_gaps(world, [part for document in order for part in ((document, True), (separator, False))])
        for order in permutations(documents)
    ]
    answers = engine.ask(*cases)
    require_linked(cases, answers, len(documents))
    for case, answer in zip(cases, answers, strict=True):
        assert answer.report is not None
        assert answer.report["recomputed"] == 3 * K + 2 * len(separator.tokens) < len(case.tokens) / 4


def test_any_subset_of_the_documents(pair: Pair) -> None:
    """vLLM #25950: reuse KV of any subset of tokens, not of a prefix alone."""
    world, engine = pair
    documents = rig.random_chunks((37, 33, 26, 21), seed=8)
    subsets = [[bool(number >> i & 1) for i in range(4)] for number in range(1, 16)]
    cases = [with_gaps(world, list(zip(documents, subset, strict=True))) for subset in subsets]
    for subset, case, answer in zip(subsets, cases, engine.ask(*cases), strict=True):
        require_linked([case], [answer], sum(subset))
