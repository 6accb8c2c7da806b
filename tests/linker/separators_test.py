"""What is between the documents of a prompt: rows of the prompt, which no object has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import tiny
import torch
from alone import compile
from flips import difference_but_at_ties
from subjects import HEAD, TAIL, default_policy, is_linkable, linkable, make_chunks, max_difference, parts_of, subject

from pictool.compiler.chunking import make_chunk
from pictool.compiler.chunking import make_chunks as cut
from pictool.compiler.splitters import split
from pictool.compiler.splitters.base import Splitter
from pictool.core import Chunk, PromptText, Separator, Text
from pictool.errors import ModelError
from pictool.linker.link import Linked, link
from pictool.linker.policies import make_policy, policies
from pictool.linker.policies.base import Policy
from pictool.linker.resolve import Part, separated
from pictool.linker.spec import Spec
from pictool.runtime.chat.template import separator_between
from pictool.runtime.model import Model, wrap_model
from pictool.store.objects.bundles import ListMember, read_object_list, write_object_list
from pictool.store.store import Store

ARCHITECTURES = ("llama", "gemma3", "qwen3_next", "bamba")
LENGTHS = (3, 29, 17)
EVERYTHING: list[tuple[str, dict[str, Any]]] = [
    ("full", {}), ("legolink", {"k": 1000}), ("cacheblend", {"ratio": 1}), ("speccache", {"ratio": 1}),
    ("prophet", {"ratio": 1}), ("prefix", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "separator", "after", "between"),
    [
        ("x", "\n\n", "", "\n\n"), ("x\n", "\n\n", "", "\n"), ("x\n\n", "\n\n", "", ""), ("x\n\n\n", "\n\n", "", ""),
        ("x", "\n\n", "\n\nq", ""), ("x\n", "\n\n", "\nq", ""), ("x", "\n\n", "\nq", "\n"), ("x", "", "q", ""),
        ("x\n", "\n---\n", "q", "---\n"), ("x", "\n", "", "\n"), ("x\n", "\n", "", ""),
    ],
)  # fmt: skip
def test_what_is_there_is_not_said_twice(before: str, separator: str, after: str, between: str) -> None:
    assert separator_between(before, separator, after) == between


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("compiled"))


def run(architecture: str, store: Store, policy: Policy, separator: str = "\n\n") -> Linked:
    spec = replace(Spec.raw(make_chunks(LENGTHS), TAIL, policy, HEAD), separator=separator, after="none")
    return link(subject(architecture).model, store, spec)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_is_the_model_on_the_texts_with_separators(architecture: str, compiled: Store) -> None:
    one, encode = subject(architecture), subject(architecture).model.encode
    linked, (first, second, third) = run(architecture, compiled, make_policy("full")), make_chunks(LENGTHS)
    apart = encode("\n\n")
    wanted = [
        *encode(PromptText(HEAD)),
        *first.tokens,
        *apart,
        *second.tokens,
        *apart,
        *third.tokens,
        *encode("\n\n" + TAIL),
    ]
    assert linked.image.layout.tokens.tolist() == wanted
    with torch.no_grad():
        logits = one.reference(torch.tensor([wanted])).logits[0, -1]
    assert float((linked.image.logits - logits).abs().max()) <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "policy", "fields"),
    [(name, policy, fields) for name in ARCHITECTURES for policy, fields in EVERYTHING if is_linkable(name, policy)],
)
def test_recomputing_everything_is_full(
    architecture: str, policy: str, fields: dict[str, Any], compiled: Store
) -> None:
    apart, _ = difference_but_at_ties(
        subject(architecture), lambda: run(architecture, compiled, make_policy(policy, fields))
    )
    assert apart <= 1e-4


@pytest.mark.parametrize(("architecture", "policy"), linkable(ARCHITECTURES, policies()))
def test_separators_are_computed_under_every_policy(architecture: str, policy: str, compiled: Store) -> None:
    chosen = default_policy(policy)
    full, linked = run(architecture, compiled, make_policy("full")), run(architecture, compiled, chosen)
    assert [part.chunk.text for part, _ in linked.documents] == [chunk.text for chunk in make_chunks(LENGTHS)]
    spans = [
        span for part, span in zip(linked.parts, linked.image.layout.chunks, strict=True)
        if isinstance(part.chunk, Separator)
    ]  # fmt: skip
    assert len(spans) == 2
    if not chosen.needs.chain_block:  # which may have stored them in their place
        assert all(linked.rows[:, start:end].all() for start, end in spans)
    if not subject(architecture).model.stack.kv_layers[0]:
        assert float((linked.image.key(0) - full.image.key(0)).abs().max()) <= 1e-5


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_link_equals_the_dense_reference(architecture: str, compiled: Store) -> None:
    """Of documents and separators as they are: the KV of these is that of their place."""
    linked = run(architecture, compiled, make_policy("naive"))
    rows = torch.zeros(linked.image.layout.num_tokens, dtype=torch.bool)
    for start, end in (*linked.image.layout.chunks[1::2], linked.image.layout.tail):
        rows[start:end] = True
    assert np.array_equal(linked.rows, np.tile(rows.numpy(), (len(linked.rows), 1)))
    assert linked.recomputed == 2 * len(subject(architecture).model.encode("\n\n"))
    wanted = reference.link(subject(architecture).reference, parts_of(linked), rows, ())  # type: ignore[arg-type]
    assert max_difference(linked, wanted) <= 1e-4


def test_no_object_is_another_and_none_is_made_of_a_separator(store: Store) -> None:
    model, texts = subject("llama").model, ["The harbour.", "It holds\n", "a festival.\n\n"]
    keys = [compile(model, store, [make_chunk(model, text, "text")])[0].key for text in texts]
    compiled: list[Any] = []
    linked = link(model, store, Spec("Why?", [Text(text) for text in texts], after="none"), on_compile=compiled.append)
    assert [part.key(model) for part, _ in linked.documents] == keys
    assert [done.chunk.source for done in compiled] == ["head"]
    joined = "".join(linked.texts)
    assert joined == "<s>The harbour.\n\nIt holds\n\na festival.\n\nQuestion: Why?\nAnswer:"


def test_an_empty_separator_joins_texts_as_a_raw_prompt_does(store: Store) -> None:
    model, texts = subject("llama").model, [Text("The harbour."), Text("It holds")]
    for spec in (
        Spec("Why?", texts, separator=""),
        Spec.raw(texts, "Question: Why?\nAnswer:", make_policy("naive"), "<s>"),
    ):
        assert "".join(link(model, store, spec).texts) == "<s>The harbour.It holdsQuestion: Why?\nAnswer:"


def test_pieces_of_one_text_follow_one_another(store: Store, tmp_path: Path) -> None:
    """Those of --chunk-tokens, also from a list of objects; a splitter's pieces only where nothing is between them."""
    model, text = subject("llama").model, "The harbour was quiet. It holds a festival in the spring; nobody knows why."
    (tmp_path / "a.txt").write_text(text)
    spec = Spec("Why?", [tmp_path / "a.txt", Text("Numbers.")], chunk_tokens=7)
    linked = link(model, store, spec)
    assert len(linked.documents) > 3 and "".join(linked.texts[1:]).startswith(text + "\n\nNumbers.\n\nQuestion")

    class Stripping(Splitter):
        name, reference = "stripping", "here"

        def pieces(self, model: Model, text: str) -> list[str]:
            return ["The harbour", " was quiet.", "It holds a festival"]

    chunks = split(model, text, "a", Stripping())
    assert [chunk.continues for chunk in chunks] == [False, True, False]
    assert [chunk.continues for chunk in cut(model, text, "a", 7)][:3] == [False, True, True]
    members = []
    for number, chunk in enumerate(chunks):
        (done,) = compile(model, store, [chunk])
        path = tmp_path / f"{number}.kvo"
        path.write_bytes(done.path.read_bytes())
        members.append(ListMember(path, chunk.continues))
    write_object_list(tmp_path / "list.kvo", members)
    assert read_object_list(tmp_path / "list.kvo") == members
    texts = link(model, store, Spec("Why?", [tmp_path / "list.kvo"])).texts
    assert "".join(texts[1:]).startswith("The harbour was quiet.\n\nIt holds a festival\n\nQuestion")


def test_a_separator_follows_no_separator() -> None:
    model = subject("llama").model
    given = [Chunk("a", (5,), "a"), Separator("\n", (9,), "separator"), Chunk("b", (6,), "b")]
    parts = [Part.of(chunk, Spec().objects) for chunk in given]
    assert [part.chunk for part in separated(model, parts, "\n\n")] == given


def test_a_model_says_what_it_reads_between_documents() -> None:
    from pictool import load_model

    assert load_model("embedded").separator == load_model("embedded-small").separator == "\n"
    module, tokenizer = tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer.__wrapped__()
    assert wrap_model(module, tokenizer).separator == "\n\n"
    tokenizer.init_kwargs["document_separator"] = 5
    with pytest.raises(ModelError, match="document_separator"):
        wrap_model(module, tokenizer)
