"""Policy fixup: which rows its fields choose, what it composes with, and that it answers what naive loses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import reference
import torch
from subjects import HEAD, LENGTHS, TAIL, Subject, make_chunks, max_difference, parts_of, run, subject

from pictool.api import compile, link
from pictool.core import Chunk, Layout, PromptText, Sampling
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Prompt
from pictool.runtime.chat.template import make_frame
from pictool.runtime.decode import generate
from pictool.runtime.model import load_model
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from training.world.generate import PageShape, write_prompt

A, B = np.asarray([0.5, 3.0, 0.1, 0.0], np.float16), np.asarray([2.0, 0.2, 1.0], np.float16)


def chosen(fields: dict[str, Any], head: int = 1, tables: tuple[Any, ...] = (A, B, A)) -> list[list[int]]:
    """Chosen tokens of each of three chunks of 4, 3 and 4 tokens; none may be of the head."""
    layout = Layout.of([0] * head, [[5] * 4, [6] * 3, [5] * 4], [1])
    prompt = Prompt(subject("llama").model, layout, ("", "a", "b", "a", "?"), tables)
    rows = make_policy("fixup", fields).select(prompt).rows
    assert not rows[:head].any()
    return [np.flatnonzero(rows[start:end]).tolist() for start, end in layout.chunks]


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"ratio": 0}, [[], [], []]),
        ({"ratio": 0.1}, [[1], [], [1]]),  # ⌈0.1 · 12⌉
        ({"ratio": 0.25}, [[1], [0], [1]]),
        ({"ratio": 0.34}, [[0, 1], [0, 2], [1]]),  # of equal scores the first
        ({"ratio": 1}, [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]),
        ({"ratio": 0.5, "budget": "chunk"}, [[0, 1], [0, 2], [0, 1]]),
        ({"budget": "auto", "threshold": 0.9}, [[1], [0, 2], [1]]),
        ({"budget": "auto", "threshold": 4}, [[], [], []]),
        ({"ratio": 0.1, "first": 1}, [[0, 1], [0], [0, 1]]),
    ],
)  # fmt: skip
def test_what_the_fields_choose(fields: dict[str, Any], rows: list[list[int]]) -> None:
    assert chosen(fields) == rows


def test_the_first_chunk_behind_an_empty_head_is_exact() -> None:
    assert chosen({"ratio": 1}, head=0) == [[], [0, 1, 2], [0, 1, 2, 3]]
    assert chosen({"ratio": 0.1}, head=0, tables=(None, B, A)) == [[], [0], [1]]


def test_without_a_table_the_first_tokens_or_a_message() -> None:
    assert chosen({"ratio": 0.1, "fallback": "legolink"}, tables=(A, None, A)) == [[1], [0, 1, 2], [1]]
    with pytest.raises(InputError, match=r'^fixup: .*"b…".*--probes 8.*fixup:fallback=legolink'):
        chosen({}, tables=(A, None, A))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"budget": "all"}, "budget='all'"),
        ({"fallback": "naive"}, "fallback='naive'"),
        ({"threshold": -1}, "threshold=-1.0"),
        ({"first": -1}, "first=-1"),
        ({"threshold": float("nan")}, "threshold=nan"),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"^fixup: {named} "):
        make_policy("fixup", fields)


@pytest.fixture(scope="module")
def one() -> Subject:
    return subject("llama")


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_link_equals_the_dense_reference(one: Subject, store: Store, sinks: int) -> None:
    """The rows are those that the objects' tables tell, and everything else is as under any static policy."""
    chunks = make_chunks(LENGTHS)
    linked = link(one.model, store, chunks, TAIL, make_policy("fixup", {"ratio": 0.2}), head=HEAD, sinks=sinks)
    layout = linked.image.layout
    scores = np.full(layout.num_tokens, -1.0)
    for part, (start, end) in zip(compile(one.model, store, chunks, sinks=sinks), layout.chunks, strict=True):
        with ObjectFile(part.path) as file:
            scores[start:end] = file.fixups()
    rows = torch.zeros(layout.num_tokens, dtype=torch.bool)
    rows[np.argsort(-scores, kind="stable")[: int(np.ceil(0.2 * layout.num_context))].tolist()] = True
    rows[layout.tail[0] :] = True
    assert np.array_equal(linked.rows, np.tile(rows.numpy(), (3, 1)))
    prefix = (one.model.bos_id,) * sinks
    assert max_difference(linked, reference.link(one.reference, parts_of(linked), rows, prefix)) <= 1e-4  # type: ignore[arg-type]
    assert linked.scores is not None
    np.testing.assert_array_equal(linked.scores[: layout.num_context], np.maximum(scores, 0)[: layout.num_context])


def test_texts_are_compiled_with_a_table_and_only_once(one: Subject, store: Store) -> None:
    chunks, policy = make_chunks(LENGTHS), make_policy("fixup", {})
    compile(one.model, store, chunks[:2])  # without
    compiled: list[str] = []
    for _ in range(2):
        link(one.model, store, chunks, TAIL, policy, head=HEAD, on_compile=lambda done: compiled.append(done.key))
    assert len(compiled) == len(set(compiled)) == 5  # a chunk stands twice in the prompt; the head is compiled too
    with store.open(
        compile(one.model, store, [Chunk(HEAD, one.model.encode(PromptText(HEAD)), "head")])[0].key
    ) as file:
        assert file.meta.fixups is None


def test_a_document_of_the_heads_tokens_has_its_table(one: Subject, store: Store) -> None:
    """They share one object, which is compiled once; and again for its table, if only the head's was there."""
    chunks = [*make_chunks((29,)), Chunk(HEAD, one.model.encode(PromptText(HEAD)), "same")]
    for _ in range(2):
        compiled: list[str] = []
        policy = make_policy("fixup", {"ratio": 0.2})
        link(one.model, store, chunks, TAIL, policy, head=HEAD, on_compile=lambda done: compiled.append(done.key))  # noqa: B023
        assert sorted(compiled) == store.keys()
        for path in (done.path for done in compile(one.model, store, chunks, force=True)):
            with ObjectFile(path) as file:
                assert file.fixups() is None


def test_an_object_without_a_table(one: Subject, store: Store) -> None:
    (done,) = compile(one.model, store, make_chunks((29,)))
    with pytest.raises(InputError, match=r"^fixup: .*--probes 8"):
        run(one, store, make_policy("fixup", {}), [done.path])
    rows = run(one, store, make_policy("fixup", {"fallback": "legolink"}), [done.path]).rows
    assert np.array_equal(rows, run(one, store, make_policy("legolink", {"k": 16}), [done.path]).rows)


def test_other_policies_do_not_see_the_table(one: Subject, store: Store) -> None:
    chunks = make_chunks(LENGTHS)
    policy = make_policy("legolink", {"k": 4})
    before = run(one, store, policy, chunks)
    compile(one.model, store, chunks, probes=4)
    after = run(one, store, policy, chunks)
    assert torch.equal(before.image.logits, after.image.logits)  # type: ignore[arg-type]
    assert after.scores is None


def test_it_answers_what_naive_loses(store: Store) -> None:
    """Of the embedded model's carried facts, with a twentieth of the rows."""
    model = load_model("embedded", device="cpu")
    right = dict.fromkeys(("full", "naive", "fixup"), 0)
    for index in range(3):
        prompt = write_prompt(random.Random(f"fixup-test-{index}"), 6, PageShape())
        chunks = [Chunk(page, model.encode(page), "page") for page in prompt.pages]
        for question in [one for one in prompt.questions if one.kind == "carried"][:5]:
            frame = make_frame(model, question.text)
            for algo in right:
                policy = make_policy(algo, {"ratio": 0.05} if algo == "fixup" else {})
                linked = link(model, store, chunks, frame.tail, policy, head=frame.head)
                text = generate(model, linked.image, 8, Sampling(stop=("\n",))).text
                right[algo] += text.strip() == question.answer
    assert right["full"] >= 9 and right["naive"] <= 3
    assert right["fixup"] >= right["full"] - 2
