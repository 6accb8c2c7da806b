from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tiny
import torch
from alone import compile, link
from transformers import LlamaConfig

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import Compiled, object_key
from pictool.core import UNNAMED, Chunk, CompileOptions
from pictool.errors import ForeignObjectError, InputError, UnwritableStoreError
from pictool.linker.policies import make_policy
from pictool.runtime.model import Model, load_model, wrap_model
from pictool.store.objects.format import CompiledChunk
from pictool.store.sources import read_sources
from pictool.store.store import Store
from pictool.store.upkeep import verify

TEXTS = ["The harbour was quiet.\n", "It holds a festival.\n", "She asked why.\n", "The harbour was quiet.\n"]


@pytest.fixture
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def test_each_chunk_is_computed_once(model: Model, store: Store) -> None:
    done: list[Compiled] = []
    first = compile(model, store, TEXTS, on_done=done.append)
    assert [one.chunk.text for one in first] == TEXTS
    assert first[0].key == first[3].key
    assert len(store.keys()) == 3
    assert sum(one.is_new for one in done) == 3
    assert not any(one.is_new for one in compile(model, store, TEXTS))


def with_bos(model: Model, bos: str) -> Model:
    """The same model with another token as BOS, which changes neither its fingerprint nor its tokenizer's."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.bos_token = bos
    return wrap_model(model.module, tokenizer)


def test_the_context_is_in_the_key_and_in_the_object(model: Model, store: Store) -> None:
    other = with_bos(model, "<pad>")
    assert other.target == model.target and other.bos_id != model.bos_id
    keys = {
        object_key(each, make_chunk(each, TEXTS[0], "t"), CompileOptions(after=after))
        for each in (model, other)
        for after in ("none", "head")
    }
    assert len(keys) == 3  # without a context, the key is the same
    (mine,) = compile(model, store, TEXTS[:1], after="head")
    (theirs,) = compile(other, store, TEXTS[:1], after="head")
    assert theirs.is_new and theirs.key != mine.key
    with store.open(mine.key) as one, store.open(theirs.key) as two:
        assert (one.meta.after, two.meta.after) == (((model.bos_id,),), ((other.bos_id,),))
        assert bytes(one.layer(2)[0]) != bytes(two.layer(2)[0])
        for file in (one, two):  # whoever has the object can compute its key
            assert file.meta.key_of(file.tokens()) == file.meta.key


def test_an_object_with_sinks_of_version_0_1_is_not_hit(model: Model, store: Store) -> None:
    """It does not say after which tokens it was compiled; its key had no dummy token."""
    (new,) = compile(model, Store("elsewhere"), TEXTS[:1], after="head")
    with Store("elsewhere").open(new.key) as file:
        old = replace(file.meta, after=((UNNAMED,),))
        old = replace(old, key=old.key_of(file.tokens()))
        layers = [(bytes(key), bytes(value)) for key, value in map(file.layer, range(3))]
        store.put(CompiledChunk(old, file.text(), file.tokens(), layers))
    assert verify(store).problems == {}
    assert compile(model, store, TEXTS[:1], after="head")[0].is_new
    with pytest.raises(ForeignObjectError, match=old.key):
        link(model, store, [old.key], "why?", make_policy("naive"))


def test_unchanged_input_costs_no_model_run(model: Model, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    compile(model, store, TEXTS)
    monkeypatch.setattr("pictool.runtime.prefill.prefill_chunks", None)
    monkeypatch.setattr(Model, "stack", None)
    assert len(compile(model, store, TEXTS)) == 4


def test_the_same_input_gives_the_same_bytes(model: Model, store: Store, tmp_path: Path) -> None:
    (one,) = compile(model, store, TEXTS[:1])
    (two,) = compile(model, Store(tmp_path / "other"), TEXTS[:1])
    assert one.key == two.key
    assert one.path.read_bytes() == two.path.read_bytes()


def test_alone_means_one_forward_a_chunk(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bytes are those of chunks that were compiled by commands of their own."""
    rows: list[int] = []
    embed = model.stack.embed

    def spied(ids: torch.Tensor) -> torch.Tensor:
        rows.append(len(ids))
        return embed(ids)

    monkeypatch.setattr(model.stack, "embed", spied)
    together = compile(model, Store(tmp_path / "together"), TEXTS, alone=True)
    assert rows == [1, 1, 1]
    for done in together:
        (one,) = compile(model, Store(tmp_path / "one"), [done.chunk])
        assert one.path.read_bytes() == done.path.read_bytes()


def test_a_damaged_object_is_compiled_again(model: Model, store: Store) -> None:
    (one,) = compile(model, store, TEXTS[:1])
    whole = one.path.read_bytes()
    one.path.write_bytes(whole[:-1])
    (again,) = compile(model, store, TEXTS[:1])
    assert again.is_new and one.path.read_bytes() == whole


def test_force_replaces_what_is_there(model: Model, store: Store) -> None:
    (one,) = compile(model, store, TEXTS[:1])
    whole = bytearray(one.path.read_bytes())
    whole[-1] ^= 1
    one.path.write_bytes(whole)
    assert compile(model, store, TEXTS[:1], force=True)[0].is_new
    with store.open(one.key) as found:
        found.verify()


def test_the_key_depends_on_what_determines_the_content(model: Model, tmp_path: Path) -> None:
    chunk = Chunk("text", (5, 6, 7), "x")
    config = tiny.CONFIGS["llama"]
    others = [
        (model, chunk, "none"),
        (model, Chunk("text", (5, 6, 8), "x"), "none"),
        (model, chunk, "text"),
        (wrap_model(tiny.random_module(config(), seed=1), tiny.tokenizer()), chunk, "none"),
        (wrap_model(tiny.random_module(config()).bfloat16(), tiny.tokenizer()), chunk, "none"),
        (
            wrap_model(tiny.random_module(LlamaConfig(**{**tiny.SIZE, "rms_norm_eps": 1e-5})), tiny.tokenizer()),
            chunk,
            "none",
        ),
    ]
    assert len({object_key(model, chunk, CompileOptions(after=after)) for model, chunk, after in others}) == len(others)
    assert object_key(model, Chunk("other text", (5, 6, 7), "elsewhere")) == object_key(model, chunk)


def test_the_key_does_not_depend_on_the_path(tmp_path: Path) -> None:
    config = tiny.CONFIGS["llama"]()
    here, there = (load_model(str(tiny.save_model(tmp_path / name, config))) for name in ("a", "b"))
    assert here.target == there.target
    (tmp_path / "a" / "model.safetensors").touch()
    assert load_model(str(tmp_path / "a")).target == there.target
    changed = load_model(str(tiny.save_model(tmp_path / "a", config, seed=5)))
    assert changed.fingerprint != there.fingerprint
    assert changed.target.tokenizer == there.target.tokenizer


def test_a_context_needs_no_bos_token(store: Store) -> None:
    module = tiny.random_module(LlamaConfig(**{**tiny.SIZE, "bos_token_id": None}))
    tokenizer = tiny.tokenizer().__class__(tokenizer_object=tiny.tokenizer().backend_tokenizer, eos_token="</s>")
    model = wrap_model(module, tokenizer, "no-bos")
    plain, head, text = (compile(model, store, TEXTS[:1], after=after)[0] for after in ("none", "head", "text"))
    assert plain.key == head.key != text.key


def test_a_text_without_tokens_is_refused(model: Model, store: Store) -> None:
    with pytest.raises(InputError, match=r"^text: "):
        compile(model, store, [""])
    assert store.keys() == []


def test_what_is_stored_when_a_compile_is_interrupted_has_its_source(model: Model, store: Store) -> None:
    def interrupt(_: Compiled) -> NoReturn:
        raise KeyboardInterrupt

    chunks = [make_chunk(model, text, f"{text}.txt") for text in ("harbour", "festival")]
    with pytest.raises(KeyboardInterrupt):
        compile(model, store, chunks, on_done=interrupt)
    sources = read_sources(store.root)
    assert store.keys() and set(store.keys()) == set(sources)
    assert all(source.model == model.name and source.source.endswith(".txt") for source in sources.values())


def test_what_is_put_beside_an_object_that_cannot_be_is_reported_in_order(
    model: Model, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, failing = Store.put, object_key(model, make_chunk(model, TEXTS[1], "text"))

    def put_but_one(self: Store, chunk: CompiledChunk, **named: Any) -> Path:
        if chunk.meta.key == failing:
            raise UnwritableStoreError("the disk is full")
        return put(self, chunk, **named)

    monkeypatch.setattr(Store, "put", put_but_one)
    done: list[Compiled] = []
    with pytest.raises(UnwritableStoreError):
        compile(model, store, TEXTS[:3], on_done=done.append)
    assert [each.chunk.text for each in done] == [TEXTS[0], TEXTS[2]]
    assert {each.key for each in done} == set(store.keys()) == set(read_sources(store.root))


def test_an_object_that_may_be_evicted_is_reported_before_the_next_is_put(model: Model, store: Store) -> None:
    small = Store(store.root, max_bytes=1 << 30)
    stored: list[int] = []
    compile(model, small, TEXTS[:3], on_done=lambda _: stored.append(len(small.keys())))
    assert stored == [1, 2, 3]
