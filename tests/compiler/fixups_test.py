"""Compiling with probes: what the object then says, and when it is compiled again."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from subjects import make_chunks

from pictool.api import compile
from pictool.compiler.compile import Compiled
from pictool.errors import InputError
from pictool.runtime.model import Model, wrap_model
from pictool.store.format import ObjectFile
from pictool.store.store import Store

CHUNKS = make_chunks((5, 30, 17))


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer(), "tiny")


def new(done: list[Compiled]) -> list[bool]:
    return [one.is_new for one in done]


def recipe(done: Compiled) -> str | None:
    with ObjectFile(done.path) as file:
        file.verify()
        return file.meta.fixups


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
    assert [recipe(one) for one in compile(model, store, CHUNKS)] == ["self-4x60"] * 3
    assert new(compile(model, store, CHUNKS, probes=2)) == [True] * 3


def test_the_same_bytes_in_another_store(model: Model, store: Store) -> None:
    first = [one.path.read_bytes() for one in compile(model, store, CHUNKS, probes=4)]
    second = compile(model, Store(store.root.with_name("other")), CHUNKS, probes=4)
    assert [one.path.read_bytes() for one in second] == first


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
    with pytest.raises(InputError, match=f"probes {probes}: must be 0, or 2 or more"):
        compile(model, store, CHUNKS, probes=probes)
    assert store.keys() == []


def test_a_chunk_without_room_behind_a_probe_is_refused_by_name(model: Model, store: Store) -> None:
    (long,) = make_chunks((480,))
    assert new(compile(model, store, [long])) == [True]
    with pytest.raises(InputError, match=r"test: 480 tokens behind a probe of 60, but .* 512 positions"):
        compile(model, store, [long], probes=8)
