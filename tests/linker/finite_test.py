"""Numbers that overflowed are refused where they arise: by compiling, linking, decoding, and for every policy."""

from __future__ import annotations

import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from alone import compile, link
from hostile.surfaces.objects import Anatomy

from pictool.api import answer
from pictool.core import Chunk, Sampling
from pictool.errors import ModelError, ObjectError
from pictool.linker.link import Linked
from pictool.linker.policies import make_policy, policies
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store
from pictool.store.upkeep import verify

CHUNK = Chunk("a", tuple(range(5, 40)), "a.txt")
SAYS = "float16.*--dtype"


def overflowing(name: str) -> Model:
    """A model in float16, one of whose weights is too large for it."""
    module = tiny.random_module(tiny.CONFIGS["llama"]())
    with torch.no_grad():
        dict(module.named_parameters())[name].fill_(6e4)
    return wrap_model(module.half(), tiny.tokenizer())


@pytest.fixture(scope="module")
def in_layers() -> Model:
    return overflowing("model.layers.0.mlp.down_proj.weight")


@pytest.fixture(scope="module")
def in_logits() -> Model:
    return overflowing("model.norm.weight")


def test_a_chunk_that_overflows_is_not_compiled(in_layers: Model, store: Store) -> None:
    with pytest.raises(ModelError, match=rf"a\.txt: in-memory: .*{SAYS}"):
        compile(in_layers, store, [CHUNK])
    assert store.keys() == []


@pytest.mark.parametrize("name", [name for name in policies() if name != "speccache"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
def test_logits_that_overflow_are_no_answer(in_logits: Model, store: Store, name: str, sampling: Sampling) -> None:
    spec = Spec("why?", [CHUNK], make_policy(name), max_new_tokens=3, sampling=sampling)
    with pytest.raises(ModelError, match=SAYS):
        answer(in_logits, store, spec, compare=True)


def test_tokens_whose_logits_overflow_end_in_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
    linked = link(model, store, [CHUNK], " why?", make_policy("naive"))
    append = type(linked.image).append
    monkeypatch.setattr(type(linked.image), "append", lambda *given: append(*given) * math.nan)
    with pytest.raises(ModelError, match=r"^in-memory: .* float32"):
        generate(model, linked.image, 3)


@pytest.fixture(scope="module")
def sound() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def put_nan(path: Path) -> None:
    """NaN among the values of an object, whose checksums hold."""
    anatomy = Anatomy.of(path.read_bytes())
    values = anatomy.parts["layers.001.value"]
    anatomy.parts["layers.001.value"] = struct.pack("<f", math.nan) + values[4:]
    path.write_bytes(anatomy.build())


def logits(linked: Linked) -> np.ndarray[Any, Any]:
    assert linked.image.logits is not None
    return np.asarray(linked.image.logits)


NAN = "layer 1 contains numbers that are not finite"


@pytest.mark.parametrize("name", ["naive", "prefix"])
def test_stored_numbers_that_are_not_finite_are_computed_again(sound: Model, store: Store, name: str) -> None:
    warnings: list[str] = []
    store = Store(store.root, on_warning=warnings.append)
    policy = make_policy(name, {"block": 8} if name == "prefix" else {})
    honest = link(sound, store, [CHUNK], " why?", policy)
    for path in store.root.glob("objects/*/*.kvo"):
        put_nan(path)
    healed = link(sound, store, [CHUNK], " why?", policy)
    assert np.array_equal(logits(healed), logits(honest))
    assert warnings and all(NAN in warning for warning in warnings)
    warnings.clear()
    assert verify(store).problems == {}
    link(sound, store, [CHUNK], " why?", policy)
    assert warnings == []


def test_an_object_whose_numbers_are_not_finite_is_named(sound: Model, store: Store, tmp_path: Path) -> None:
    (done,) = compile(sound, store, [CHUNK])
    path = Path(shutil.copy(done.path, tmp_path / "x.kvo"))
    put_nan(path)
    with pytest.raises(ObjectError, match=rf"x\.kvo: {NAN}"):
        link(sound, store, [path], " why?", make_policy("naive"))


def test_a_remote_object_whose_numbers_are_not_finite_is_left_out(sound: Model, store: Store, tmp_path: Path) -> None:
    far, warnings = Store(tmp_path / "far"), list[str]()
    honest = link(sound, far, [CHUNK], " why?", make_policy("naive"))
    for path in far.root.glob("objects/*/*.kvo"):
        put_nan(path)
    near = Store(store.root, remote=str(far.root), on_warning=warnings.append)
    assert np.array_equal(logits(link(sound, near, [CHUNK], " why?", make_policy("naive"))), logits(honest))
    assert any(NAN in warning for warning in warnings)
    near.drain()
    assert verify(near).problems == {}
