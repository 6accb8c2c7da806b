"""What cannot be linked is refused by name, before work; damaged and foreign files end no process."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import gguf_files
import pytest
import tiny
from hostile.surfaces.gguf import damage

from pictool.api import compile
from pictool.core import Chunk
from pictool.engines.llamacpp.engine import LlamaCppEngine
from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.engines.torch import TorchEngine
from pictool.errors import ForeignObjectError, InputError, ModelError, ObjectError, PicError
from pictool.linker.grid import named_policy
from pictool.linker.link import link
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.store.store import Store

CHUNKS = [Chunk("a", tuple(range(5, 40)), "a"), Chunk("b", tuple(range(60, 80)), "b")]
NUM_DAMAGED = 60


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> GgufModel:
    return open_gguf(str(tiny_gguf), dtype="float32")


@pytest.mark.parametrize("name", ["cacheblend-15", "speccache-15", "prophet-10"])
def test_policies_that_need_what_llama_cpp_does_not_show(model: GgufModel, store: Store, name: str) -> None:
    policy = named_policy(name)
    with pytest.raises(InputError, match=f"--algo {policy.name}: "):
        LlamaCppEngine(model, store).answer(Spec("Really?", CHUNKS, policy))
    with pytest.raises(InputError, match=f"--algo {policy.name}: "):
        link(model, store, Spec.raw(CHUNKS, "Really?", policy))
    assert not store.keys()


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
def test_kv_that_llama_cpp_does_not_rotate_exactly(tiny_gguf: Path, dtype: str) -> None:
    with pytest.raises(InputError, match=f"--dtype {dtype}: "):
        open_gguf(str(tiny_gguf), dtype=dtype)


def test_transformers_models(store: Store) -> None:
    with pytest.raises(InputError, match="runs GGUF files"):
        LlamaCppEngine(load_model("embedded-small"), store)
    with pytest.raises(ModelError):
        load_model("a.gguf")


def test_more_documents_than_llama_cpp_moves(model: GgufModel, store: Store) -> None:
    chunks = [Chunk(str(i), (3 + i % 300, 3 + i // 300), str(i)) for i in range(300)]
    with pytest.raises(InputError, match=r" 301 .*llama\.cpp"):
        link(model, store, Spec.raw(chunks, "Really?", named_policy("naive"), "<s>"))


def test_objects_of_other_files_dtypes_and_engines_are_foreign(
    model: GgufModel, tiny_gguf: Path, store: Store, tmp_path: Path
) -> None:
    (own,) = compile(model, store, CHUNKS[:1])
    other = gguf_files.write_gguf(tmp_path / "b.gguf", gguf_files.random_module("llama", seed=1), tiny.tokenizer())
    for foreign in (open_gguf(str(other), dtype="float32"), open_gguf(str(tiny_gguf), dtype="float16")):
        with pytest.raises(ForeignObjectError):
            link(foreign, store, Spec.raw([own.path], "Really?", named_policy("naive")))
    with pytest.raises(ForeignObjectError, match="architecture"):
        ours = load_model("embedded-small")
        TorchEngine(ours, store).link(Spec.raw([own.path], "Really?", named_policy("naive")))


def test_a_damaged_object_is_refused(model: GgufModel, store: Store, tmp_path: Path) -> None:
    (own,) = compile(model, store, CHUNKS[:1])
    data = bytearray(own.path.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "damaged.kvo").write_bytes(data)
    with pytest.raises(ObjectError):
        link(model, store, Spec.raw([tmp_path / "damaged.kvo"], "Really?", named_policy("naive")))


def test_a_file_that_changes_is_noticed(tiny_gguf: Path, store: Store, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_gguf, path)
    model = open_gguf(str(path), dtype="float32")
    link(model, store, Spec.raw(CHUNKS, "Really?", named_policy("naive")))
    with path.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\1" * 50)
    with pytest.raises(ModelError):
        link(model, store, Spec.raw(CHUNKS, "Really?", named_policy("naive")))


@pytest.mark.parametrize("group", range(6))
def test_damaged_files_are_refused_or_answer(tiny_gguf: Path, tmp_path: Path, group: int) -> None:
    """Whatever llama.cpp does with a file, this process goes on, and says what is wrong in one line."""
    data, refused = tiny_gguf.read_bytes(), 0
    for number in range(group, NUM_DAMAGED, 6):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damage(data, random.Random(number)))
        try:
            model = open_gguf(str(path), dtype="float32")
            link(model, Store(tmp_path / str(number)), Spec.raw(CHUNKS, "Really?", named_policy("naive")))
        except PicError as error:
            assert "\n" not in str(error) and str(error)
            refused += 1
    assert refused
