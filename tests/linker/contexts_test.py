"""Documents that are compiled after contexts: their KV against transformers' own, links against the dense reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny
import torch
from subjects import (
    HEAD,
    LENGTH_DEPENDENT,
    LENGTHS,
    PLACED,
    SCALED,
    TAIL,
    each_kind,
    families,
    make_chunks,
    parts_of,
    subject,
)
from torch import Tensor

from pictool.api import compile, link
from pictool.compiler.chunking import last_tokens
from pictool.compiler.compile import compile_chunks
from pictool.compiler.contexts import LEAST, NAMES, contexts_of
from pictool.compiler.recompute import find_difference
from pictool.core import Chunk, CompileOptions
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.recognition.index import ContentIndex
from pictool.runtime.model import Model, load_model
from pictool.store.store import Store

AFTER = [name for name in NAMES if name != "none"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def model() -> Model:
    return subject("llama").model


def pieces(lengths: tuple[int, ...] = LENGTHS) -> list[Chunk]:
    """Chunks of one text."""
    chunks: list[Chunk] = []
    for chunk in make_chunks(lengths):
        chunks.append(replace(chunk, continues=bool(chunks), before=last_tokens(chunks)))
    return chunks


def mean(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    keys, values = zip(*pairs, strict=True)
    return sum(keys) / len(keys), sum(values) / len(values)


def joined(pieces: Sequence[reference.KV], layer: int) -> tuple[Tensor, Tensor]:
    return torch.cat([piece[layer][0] for piece in pieces], 2), torch.cat([piece[layer][1] for piece in pieces], 2)


@pytest.mark.parametrize(
    ("architecture", "after"),
    [
        *((name, after) for name in each_kind(*PLACED, *SCALED) for after in AFTER),
        # Of a family, how it computes a document after something: which text that is, and a mean, are not its own.
        *((name, "previous") for name in families(*each_kind(), *LENGTH_DEPENDENT, *PLACED, *SCALED, *tiny.HYBRIDS)),
    ],
)
def test_a_link_equals_the_dense_reference(architecture: str, after: str, compiled: Store) -> None:
    """Every chunk's KV is the mean over its contexts of the model's own forward, less the context's rows."""
    one, chunks, options = subject(architecture), pieces(), CompileOptions(after=after)
    linked = link(one.model, compiled, chunks, TAIL, make_policy("legolink", {"k": 2}), head=HEAD, after=after)
    parts, starts = parts_of(linked), linked.image.layout.starts
    kv: list[reference.KV] = [reference.isolated(one.reference, parts[0], 0)]
    for chunk, start in zip(chunks, starts[1:], strict=False):
        contexts = contexts_of(one.model, chunk, options)
        found = [reference.isolated(one.reference, list(chunk.tokens), start, own) for own in contexts]
        kv.append([mean(layer) for layer in zip(*found, strict=True)])
    kv.append(reference.isolated(one.reference, parts[-1], starts[-1]))
    cached = [joined(kv, layer) for layer in range(len(kv[0]))]
    rows = torch.from_numpy(linked.rows[0])
    dense = reference.forward_over(one.reference, sum(parts, []), 0, reference.Splice(cached, ~rows))
    image = linked.image
    for layer, (key, value) in enumerate(dense.kv):
        torch.testing.assert_close(image.key(layer), key, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(image.value(layer), value, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(image.logits, dense.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("after", AFTER)
def test_a_context_begins_as_prompts_do_and_is_cut_to_the_room(model: Model, after: str) -> None:
    for length in (1, 400, model.max_positions - 1, model.max_positions):
        chunk = Chunk("", tuple([5] * length), "test", before=tuple([6] * 300))
        for context in contexts_of(model, chunk, CompileOptions(after=after)):
            assert context[0] == model.bos_id and len(context) + length <= model.max_positions
            assert after != "previous" or set(context[1:]) <= {6}


def test_a_fixed_context_is_as_long_as_most_windows() -> None:
    model = load_model("embedded-small")
    for name in ("text", "code", "records", "mean"):
        found = contexts_of(model, Chunk("", (5, 6), "test"), CompileOptions(after=name))
        assert len(found) == (3 if name == "mean" else 1) and all(len(each) >= LEAST for each in found)


def test_previous_is_the_text_before_a_piece_and_else_a_paragraph(model: Model) -> None:
    first, second, third = pieces((29, 17, 12))
    options = CompileOptions(after="previous")
    assert contexts_of(model, first, options) == contexts_of(model, first, CompileOptions(after="text"))
    assert contexts_of(model, second, options)[0][-29:] == first.tokens
    assert contexts_of(model, third, options)[0][-46:] == (*first.tokens, *second.tokens)


def test_each_context_is_another_object_and_none_is_as_ever(model: Model, compiled: Store) -> None:
    chunk = pieces((29, 17))[1]
    keys = {
        name: compile_chunks(model, compiled, [chunk], CompileOptions(after=name))[0].key for name in NAMES
    }  # fmt: skip
    assert len(set(keys.values())) == len(NAMES)
    assert keys["none"] == model.target.key(chunk.tokens, "none")
    with compiled.peek(keys["previous"]) as file:
        assert file.meta.after == contexts_of(model, chunk, CompileOptions(after="previous"))
        assert file.meta.own_key(file.tokens()) == file.meta.key


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_an_object_is_computed_again_after_what_it_says(model: Model, salt: str, tmp_path: Path) -> None:
    own, store = model.with_salt(salt), Store(tmp_path)
    for done in compile_chunks(own, store, pieces((29, 17)), CompileOptions(after="mean")):
        with store.peek(done.key) as file:
            assert find_difference(own, file) is None


def test_a_hybrid_has_none(compiled: Store) -> None:
    one = subject("qwen3_next").model
    (chunk,) = pieces((29,))
    plain, after = (compile(one, compiled, [chunk], after=name)[0].key for name in ("none", "previous"))
    assert plain == after


def test_what_makes_no_sense_is_refused(model: Model, compiled: Store) -> None:
    for one, after in ((model, "nothing"), (subject("qwen3_next").model, "text")):
        with pytest.raises(InputError, match=after):
            compile(one, compiled, pieces((29,)), after=after)


def test_a_document_is_recognised_with_its_context(model: Model, tmp_path: Path) -> None:
    """Of several objects of the same tokens the one that was computed after something is linked."""
    store, (chunk,) = Store(tmp_path), pieces((29,))
    plain = compile_chunks(model, store, [chunk])[0].key
    index = ContentIndex(store, model.target, 8, model.tokenizer.decode)
    tokens = np.asarray([7, 8, *chunk.tokens, 9], dtype=np.int32)
    index.refresh()
    assert [match.key for match in index.find(tokens)] == [plain]
    after = compile_chunks(model, store, [chunk], CompileOptions(after="text"))[0].key
    index.refresh()
    assert [match.key for match in index.find(tokens)] == [after]
