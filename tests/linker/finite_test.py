"""Numbers that overflowed are refused where they arise: by compiling, linking, decoding, and for every policy."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from pictool.api import answer, compile, link
from pictool.core import Chunk, Sampling
from pictool.errors import ModelError
from pictool.linker.policies import make_policy, policies
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

CHUNK = Chunk("a", tuple(range(5, 40)), "a.txt")
SAYS = "not finite in float16; use another --dtype"


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


@pytest.mark.parametrize("name", [name for name in policies() if name not in ("fixup", "speccache")])
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
    with pytest.raises(ModelError, match="not finite"):
        generate(model, linked.image, 3)


def test_a_table_that_overflows_is_not_made(store: Store) -> None:
    with pytest.raises(ModelError, match=SAYS):
        compile(overflowing("lm_head.weight"), store, [CHUNK], probes=2)
