"""From links to traces and back: a replay is the link, under every policy, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from subjects import default_policy, subject

from pictool.api import answer
from pictool.compiler.compile import Compiled
from pictool.core import Chunk
from pictool.engines.base import Answer
from pictool.errors import TraceError
from pictool.linker.policies import make_policy, policies
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model
from pictool.store.codecs import codecs
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.store import Store
from pictool.trace.format import Trace, TracedChunk, read_trace
from pictool.trace.replay import replay, replay_in_full

TEXTS = {
    "a.txt": "The harbour was quiet. It holds a festival in the spring.",
    "b.txt": "Numbers such as 1,024, and words.",
}
ARCHITECTURES = ["llama", "llama-dynamic", "phi3-long", "mistral-window", "gemma2"]


@pytest.fixture
def documents() -> list[str]:
    for name, text in TEXTS.items():
        Path(name).write_text(text)
    return list(TEXTS)


def linked(model: Model, store: Store, documents: Any, policy: str, **more: Any) -> Answer:
    return answer(model, store, Spec("why?", documents, default_policy(policy), max_new_tokens=6, **more))


def objects_of(trace: Trace) -> list[TracedChunk]:
    """The chunks but separators."""
    return [chunk for chunk in trace.chunks if chunk.key]


def through_a_file(one: Answer) -> Trace:
    one.write_trace("link.trace")
    return read_trace(Path("link.trace"))


@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replay_is_the_link(architecture: str, policy: str, store: Store, documents: list[str]) -> None:
    """K and V of every layer, rows and logits; bit for bit on one machine."""
    model = subject(architecture).model
    first = linked(model, store, documents, policy)
    again = replay(model, store, through_a_file(first), "link.trace")
    assert np.array_equal(again.rows, first.linked.rows)
    assert again.image.logits is not None and torch.equal(again.image.logits, first.logits)
    for layer in range(model.geometry.layers):
        end = again.image.num_tokens
        assert torch.equal(again.image.key(layer), first.linked.image.key(layer)[:, :, :end])
        assert torch.equal(again.image.value(layer), first.linked.image.value(layer)[:, :, :end])


@pytest.mark.parametrize("policy", ["naive", "cacheblend"])
def test_in_full_is_full_recompute(policy: str, store: Store, documents: list[str]) -> None:
    model = subject("llama").model
    full = linked(model, store, documents, "full")
    again = replay_in_full(model, store, linked(model, store, documents, policy).trace(), "t")
    assert again.image.logits is not None and torch.equal(again.image.logits, full.logits)


def test_a_trace_says_what_was_linked(store: Store, documents: list[str]) -> None:
    model = subject("llama").model
    one = linked(model, store, documents, "cacheblend", after="none")
    trace = through_a_file(one)
    frame = (model.tokenizer.bos_token, "Question: why?\nAnswer:")
    a, b = TEXTS.values()
    assert trace.texts == (frame[0], a, "\n\n", b, "\n\n" + frame[1])
    assert (trace.num_documents, trace.sources) == (2, ("head", "a.txt", "separator", "b.txt", "tail"))
    assert "".join(trace.pieces) == "".join(trace.texts)
    assert [(chunk.source, chunk.after) for chunk in objects_of(trace)] == [("a.txt", ()), ("b.txt", ())]
    assert all(store.has(chunk.key) for chunk in objects_of(trace))
    assert [token.id for token in trace.generated] == list(one.generated.tokens)
    assert [token.logprob for token in trace.generated] == list(one.generated.logprobs)
    assert "".join(token.text for token in trace.generated) == tiny.tokenizer().decode(one.generated.tokens)
    assert [token.id for token in trace.top] == one.logits.topk(10).indices.tolist()
    assert trace.target == model.target and trace.report == one.report()


def test_objects_of_different_contexts_are_linked_again_as_they_were(store: Store, documents: list[str]) -> None:
    model = subject("llama").model
    key = linked(model, store, documents[:1], "naive").trace().chunks[0].key
    mixed = linked(model, store, [key, "b.txt"], "naive", after="none").trace()
    assert [bool(chunk.after) for chunk in objects_of(mixed)] == [True, False]
    assert np.array_equal(replay(model, store, mixed, "t").rows, mixed.rows)


@pytest.mark.parametrize("codec", codecs())
def test_a_link_of_coded_objects_is_linked_again_from_them(codec: str, store: Store, documents: list[str]) -> None:
    """Its K, V and logits are those of a link of the numbers that the codec's own decoder gives."""
    model = subject("llama").model
    trace = through_a_file(linked(model, store, documents, "naive", codec=codec, after="none"))
    assert [chunk.codec for chunk in objects_of(trace)] == [codec] * 2
    decoded = Store("decoded")
    for chunk in objects_of(trace):
        with store.peek(chunk.key) as file:
            tokens = file.tokens()
            meta = ObjectMeta(model.target.key(tokens, "none"), model.target, len(tokens), "none")
            layers = [(bytes(k), bytes(v)) for k, v in map(file.layer, range(model.geometry.layers))]
            decoded.put(CompiledChunk(meta, file.text(), tokens, layers))
    expected = linked(model, decoded, documents, "naive", after="none")
    for gone in (False, True):  # then compiled again, with its codec
        if gone:
            store.path(objects_of(trace)[1].key).unlink()
        again = replay(model, store, trace, "t")
        assert again.image.logits is not None and torch.allclose(again.image.logits, expected.logits, atol=1e-5)
        for layer in range(model.geometry.layers):
            mine, theirs = (
                one.key(layer)[:, :, : trace.layout.num_tokens] for one in (again.image, expected.linked.image)
            )
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_codecs_of_different_chunks_and_one_that_is_unknown(store: Store, documents: list[str]) -> None:
    model = subject("llama").model
    key = linked(model, store, documents[:1], "naive", codec="int8").trace().chunks[0].key
    mixed = linked(model, store, [key, "b.txt"], "cacheblend").trace()
    assert [chunk.codec for chunk in objects_of(mixed)] == ["int8", "none"]
    assert np.array_equal(replay(model, store, mixed, "t").rows, mixed.rows)
    other = replace(mixed, chunks=(replace(mixed.chunks[0], codec="int1"), *mixed.chunks[1:]))
    with pytest.raises(TraceError, match=r"t: .* int1"):
        replay(model, store, other, "t")


def test_a_trace_that_names_no_codec_is_of_plain_objects(store: Store, documents: list[str]) -> None:
    trace = linked(subject("llama").model, store, documents, "naive").trace()
    assert TracedChunk("a.txt", trace.chunks[0].key, after=trace.chunks[0].after) == trace.chunks[0]


def test_an_object_that_is_gone_is_compiled_again(store: Store, documents: list[str]) -> None:
    model = subject("llama").model
    trace = linked(model, store, documents, "naive").trace()
    store.path(objects_of(trace)[1].key).unlink()
    compiled: list[Compiled] = []
    replay(model, store, trace, "t", compiled.append)
    assert [done.chunk.source for done in compiled] == ["b.txt"]


def test_an_object_that_was_damaged_is_compiled_again(store: Store, documents: list[str]) -> None:
    """The trace has its text."""
    model = subject("llama").model
    trace = linked(model, store, documents, "naive").trace()
    path = store.path(trace.chunks[0].key)
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    whole, _ = path.read_bytes(), replay(model, store, trace, "t")
    assert path.read_bytes() != whole
    with ObjectFile(path) as file:
        file.verify()


def test_another_model_is_refused(store: Store, documents: list[str]) -> None:
    trace = linked(subject("llama").model, store, documents, "naive").trace()
    other = wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed=1), tiny.tokenizer())
    for again in (replay, replay_in_full):
        with pytest.raises(TraceError, match=r"t: .* model [0-9a-f]+, "):
            again(other, store, trace, "t")


def test_a_link_that_was_not_so_is_refused(store: Store, documents: list[str]) -> None:
    """Other rows, other logits, other keys, other texts than those of the link."""
    model = subject("llama").model
    trace, naive = (linked(model, store, documents, policy).trace() for policy in ("legolink", "naive"))
    with pytest.raises(TraceError, match="logits"):
        replay(model, store, replace(trace, rows=naive.rows), "t")
    with pytest.raises(TraceError, match="logits"):
        replay(model, store, replace(trace, logits=trace.logits + 0.1), "t")
    with pytest.raises(TraceError, match=r"a\.txt .* 0000"):
        chunks = (replace(trace.chunks[0], key="0" * 64), *trace.chunks[1:])
        replay(model, store, replace(trace, chunks=chunks), "t")
    with pytest.raises(TraceError, match="texts"):
        replay(model, store, replace(trace, texts=(*trace.texts[:-1], "no?")), "t")


def test_chunks_without_text_of_their_own_are_traced_too(store: Store) -> None:
    """From Python a chunk may be any tokens: its pieces are what they decode to."""
    model = subject("llama").model
    chunk = Chunk("no such text", tuple(range(5, 40)), "a")
    trace = answer(model, store, Spec("why?", [chunk], make_policy("naive", {}), max_new_tokens=2)).trace()
    assert "".join(trace.pieces[1:36]) == tiny.tokenizer().decode(list(range(5, 40)))
    assert replay(model, store, trace, "t").image.logits is not None
