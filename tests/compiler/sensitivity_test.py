"""Compiling with probes: what objects then carry, when they are compiled again, and tables by another model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
from subjects import make_chunks

from pictool.api import compile, link
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled
from pictool.core import Chunk, FixupTable
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.runtime.sensitivity import fixup_tables, probes_of
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

CHUNKS = make_chunks((5, 30, 17))
TEXT = "Gadwick holds the Vulry festival. The next page is about Dusdale.\nIt lies on the river Temmere.\n"


def tiny_model(seed: int) -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"](), seed), tiny.tokenizer(), f"tiny {seed}")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(0)


@pytest.fixture(scope="module")
def embedded() -> Model:
    return load_model("embedded", device="cpu")


@pytest.fixture(scope="module")
def small() -> Model:
    return load_model("embedded-small", device="cpu")


def new(done: list[Compiled]) -> list[bool]:
    return [compiled.is_new for compiled in done]


def recipe(done: Compiled) -> str | None:
    with ObjectFile(done.path) as file:
        file.verify()
        return file.meta.fixups


def table_of(done: Compiled) -> tuple[str | None, FixupTable]:
    with ObjectFile(done.path) as file:
        file.verify()
        table = file.fixups()
        assert table is not None
        return file.meta.fixups, table


def own_table(model: Model, tokens: list[int], probes: int) -> FixupTable:
    ((_, table),) = fixup_tables(model, probes_of(model, probes, 60), [tokens])
    return table


def spans(model: Model) -> list[tuple[int, int]]:
    """Characters of each token, by the tokenizer's own offsets: byte-level ones leave no character out here."""
    encoded = model.tokenizer(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    ends = [0, *(end for _, end in encoded["offset_mapping"])]
    return list(itertools.pairwise(ends))  # a space belongs to the token after it


def test_an_object_carries_its_table_beside_the_same_kv(model: Model, store: Store) -> None:
    (plain,) = compile(model, store, CHUNKS[:1])
    with ObjectFile(plain.path) as file:
        assert file.fixups() is None
        before = [tuple(map(bytes, file.layer(layer))) for layer in range(3)]
    (measured,) = compile(model, store, CHUNKS[:1], probes=4)
    assert measured.is_new and measured.key == plain.key
    with ObjectFile(measured.path) as file:
        table = file.fixups()
        assert table is not None and len(table) == 5 and float(table.max()) > 0
        assert [tuple(map(bytes, file.layer(layer))) for layer in range(3)] == before


def test_it_is_compiled_again_only_for_another_table(model: Model, store: Store) -> None:
    assert new(compile(model, store, CHUNKS)) == [True] * 3
    assert new(compile(model, store, CHUNKS[:1], probes=4)) == [True]
    assert new(compile(model, store, CHUNKS, probes=4)) == [False, True, True]
    assert new(compile(model, store, CHUNKS)) == [False] * 3
    assert [recipe(done) for done in compile(model, store, CHUNKS)] == ["self-4x60-3"] * 3
    assert new(compile(model, store, CHUNKS, probes=2)) == [True] * 3


def test_the_same_bytes_in_another_store_by_the_model_itself(model: Model, store: Store) -> None:
    first = [done.path.read_bytes() for done in compile(model, store, CHUNKS, probes=4)]
    second = compile(model, Store(store.root.with_name("other")), CHUNKS, probes=4)
    assert [done.path.read_bytes() for done in second] == first


def test_sinks_change_the_kv_and_not_the_table(model: Model, store: Store) -> None:
    tables = []
    for sinks in (0, 4):
        (done,) = compile(model, store, CHUNKS[1:2], probes=4, sinks=sinks)
        with ObjectFile(done.path) as file:
            tables.append(file.fixups())
    assert tables[0] is not None and tables[1] is not None
    assert np.array_equal(tables[0], tables[1])


@pytest.mark.parametrize("probes", [1, -2])
def test_what_cannot_vary_is_refused(model: Model, store: Store, probes: int) -> None:
    with pytest.raises(InputError, match=f"^probes {probes}: "):
        compile(model, store, CHUNKS, probes=probes)
    assert store.keys() == []


def test_a_chunk_without_room_behind_a_probe_is_refused_by_name(model: Model, store: Store) -> None:
    (long,) = make_chunks((480,))
    assert new(compile(model, store, [long])) == [True]
    with pytest.raises(InputError, match=r"^test: 480 .* 60, .* 512 "):
        compile(model, store, [long], probes=8)


def test_the_small_models_scores_by_the_characters_that_tokens_share(small: Model, store: Store) -> None:
    model = tiny_model(0)
    (done,) = compile(model, store, [make_chunk(model, TEXT, "test")], probes=4, probe_model=small)
    _, table = table_of(done)
    scores, measured_spans, target_spans = own_table(small, list(small.encode(TEXT)), 4), spans(small), spans(model)
    assert len(measured_spans) != len(target_spans), "the tokenizers cut the text alike: nothing is mapped"
    for (start, end), score in zip(target_spans, table, strict=True):
        assert score == max(each for each, (a, b) in zip(scores, measured_spans, strict=True) if a < end and b > start)


def test_the_recipe_names_who_measured(embedded: Model, small: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    recipe_of_small = f"{small.target.model[:12]}.{small.target.tokenizer[:12]}-4x60-3"
    assert table_of(compile(embedded, store, [chunk], probes=4, probe_model=small)[0])[0] == recipe_of_small
    by_default = compile(embedded, store, [chunk], probes=4)[0]  # by the speculative model, where it is known
    assert table_of(by_default)[0] == recipe_of_small
    assert table_of(compile(embedded, store, [chunk], probes=4, probe_model=embedded)[0])[0] == "self-4x60-3"
    own = compile(small, store, [make_chunk(small, TEXT, "test")], probes=4)  # the small one has none
    assert table_of(own[0])[0] == "self-4x60-3"


def test_the_model_itself_is_known_by_what_it_is(embedded: Model, store: Store) -> None:
    again = load_model("embedded", device="cpu")
    (done,) = compile(embedded, store, [make_chunk(embedded, TEXT, "test")], probes=4, probe_model=again)
    assert table_of(done)[0] == "self-4x60-3"


def test_only_another_recipe_is_compiled_again_and_the_key_stays(embedded: Model, small: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    measurers = (small, small, embedded, small)
    compiled = [compile(embedded, store, [chunk], probes=4, probe_model=measurer)[0] for measurer in measurers]
    assert [done.is_new for done in compiled] == [True, False, True, True]
    assert len({done.key for done in compiled}) == 1
    assert not compile(embedded, store, [chunk])[0].is_new


def test_the_same_bytes_in_another_store_by_another_model(embedded: Model, store: Store) -> None:
    chunk = make_chunk(embedded, TEXT, "test")
    (first,) = compile(embedded, store, [chunk], probes=4)
    before = first.path.read_bytes()
    (second,) = compile(embedded, Store(store.root.with_name("other")), [chunk], probes=4)
    assert second.path.read_bytes() == before


def test_with_the_same_tokenizer_tokens_are_measured_as_they_are(store: Store) -> None:
    """Also those of a chunk whose text is another."""
    model, other = tiny_model(0), tiny_model(7)
    (chunk,) = make_chunks((30,))
    recipe, table = table_of(compile(model, store, [chunk], probes=4, probe_model=other)[0])
    assert recipe == f"{other.target.model[:12]}.{other.target.tokenizer[:12]}-4x60-3"
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
    with pytest.raises(InputError, match=r"a\.txt: .*--probe-model embedded"):
        compile(embedded, store, [chunk], probes=4, probe_model=small)
    assert store.keys() == []


def test_a_chunk_without_room_in_the_probe_model_is_refused_by_name(embedded: Model, store: Store) -> None:
    few = tiny_model(0)  # of 512 positions
    chunk = make_chunk(embedded, TEXT * 12, "a.txt")
    with pytest.raises(InputError, match=r"a\.txt: .* 60, .* tiny 0 .* 512 "):
        compile(embedded, store, [chunk], probes=4, probe_model=few)
    assert store.keys() == []
