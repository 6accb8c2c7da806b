"""Tables by another model: what the object tells of them, that they are the smaller model's by characters, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
from subjects import make_chunks

from pictool.api import compile, link
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled
from pictool.core import Chunk
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.runtime.sensitivity import Table, fixup_tables, probes_of
from pictool.store.format import ObjectFile
from pictool.store.store import Store

TEXT = "Gadwick holds the Vulry festival. The next page is about Dusdale.\nIt lies on the river Temmere.\n"


def tiny_model(seed: int) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed), tiny.tokenizer(), f"tiny {seed}")


@pytest.fixture(scope="module")
def embedded() -> Model:
    return load_model("embedded", device="cpu")


@pytest.fixture(scope="module")
def small() -> Model:
    return load_model("embedded-small", device="cpu")


def table_of(done: Compiled) -> tuple[str | None, Table]:
    with ObjectFile(done.path) as file:
        file.verify()
        table = file.fixups()
        assert table is not None
        return file.meta.fixups, table


def own_table(model: Model, tokens: list[int], probes: int) -> Table:
    ((_, table),) = fixup_tables(model, probes_of(model, probes, 60), [tokens])
    return table


def spans(model: Model) -> list[tuple[int, int]]:
    """Characters of each token, by the tokenizer's own offsets: byte-level ones leave no character out here."""
    encoded = model.tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    ends = [0, *(end for _, end in encoded["offset_mapping"])]
    return list(itertools.pairwise(ends))  # a space belongs to the token after it


def test_the_small_models_scores_by_the_characters_that_tokens_share(small: Model, store: Store) -> None:
    model = tiny_model(0)
    (done,) = compile(model, store, [make_chunk(model, TEXT, "test")], probes=4, probe_model=small)
    _, table = table_of(done)
    scores, theirs, mine = own_table(small, list(small.encode(TEXT)), 4), spans(small), spans(model)
    assert len(theirs) != len(mine), "the tokenizers cut the text alike: nothing is mapped"
    for (start, end), score in zip(mine, table, strict=True):
        assert score == max(one for one, (a, b) in zip(scores, theirs, strict=True) if a < end and b > start)


def test_the_recipe_names_who_measured(embedded: Model, small: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    theirs = f"{small.target.model[:12]}.{small.target.tokenizer[:12]}-4x60"
    assert table_of(compile(embedded, store, [chunk], probes=4, probe_model=small)[0])[0] == theirs
    assert table_of(compile(embedded, store, [chunk], probes=4)[0])[0] == theirs  # the default, where one is known
    assert table_of(compile(embedded, store, [chunk], probes=4, probe_model=embedded)[0])[0] == "self-4x60"
    own = compile(small, store, [make_chunk(small, TEXT, "test")], probes=4)  # none is known for the small one
    assert table_of(own[0])[0] == "self-4x60"


def test_the_model_itself_is_known_by_what_it_is(embedded: Model, store: Store) -> None:
    again = load_model("embedded", device="cpu")
    (done,) = compile(embedded, store, [make_chunk(embedded, TEXT, "test")], probes=4, probe_model=again)
    assert table_of(done)[0] == "self-4x60"


def test_only_another_recipe_is_compiled_again_and_the_key_stays(embedded: Model, small: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    seen = [compile(embedded, store, [chunk], probes=4, probe_model=by)[0] for by in (small, small, embedded, small)]
    assert [one.is_new for one in seen] == [True, False, True, True]
    assert len({one.key for one in seen}) == 1
    assert not compile(embedded, store, [chunk])[0].is_new


def test_the_same_bytes_in_another_store(embedded: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    (first,) = compile(embedded, store, [chunk], probes=4)
    before = first.path.read_bytes()
    (second,) = compile(embedded, Store(store.root.with_name("other")), [chunk], probes=4)
    assert second.path.read_bytes() == before


def test_with_the_same_tokenizer_tokens_are_measured_as_they_are(store: Store) -> None:
    """Also those of a chunk whose text is not theirs."""
    model, other = tiny_model(0), tiny_model(7)
    (chunk,) = make_chunks((30,))
    recipe, table = table_of(compile(model, store, [chunk], probes=4, probe_model=other)[0])
    assert recipe == f"{other.target.model[:12]}.{other.target.tokenizer[:12]}-4x60"
    np.testing.assert_array_equal(table, own_table(other, list(chunk.tokens), 4))
    assert not np.array_equal(table, own_table(model, list(chunk.tokens), 4))


def test_policy_fixup_takes_the_table_of_any_recipe(embedded: Model, small: Model, store: Store) -> None:
    chunk, policy = make_chunk(embedded, TEXT, "test"), make_policy("fixup", {"ratio": 0.2})
    for by in (small, embedded):
        (done,) = compile(embedded, store, [chunk], probes=4, probe_model=by)
        compiled: list[str] = []
        linked = link(embedded, store, [chunk], "Why?", policy, head="<s>", on_compile=lambda c: compiled.append(c.key))  # noqa: B023
        assert done.key not in compiled
        assert linked.scores is not None
        np.testing.assert_array_equal(linked.scores[1 : 1 + len(chunk)], table_of(done)[1].astype(np.float32))


def test_a_text_that_is_not_that_of_the_tokens_is_refused(embedded: Model, small: Model, store: Store) -> None:
    chunk = Chunk("Another text.", embedded.encode(TEXT), "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: its text is not that of its tokens.*--probe-model embedded"):
        compile(embedded, store, [chunk], probes=4, probe_model=small)
    assert store.keys() == []


def test_a_chunk_without_room_in_the_probe_model_is_refused_by_name(embedded: Model, store: Store) -> None:
    few = tiny_model(0)  # of 512 positions
    chunk = make_chunk(embedded, TEXT * 12, "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: \d+ tokens behind a probe of 60, but the probe model tiny 0 takes"):
        compile(embedded, store, [chunk], probes=4, probe_model=few)
    assert store.keys() == []
