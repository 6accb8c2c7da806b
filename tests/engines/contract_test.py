"""The contract of engines, on the torch engine: what it gives is what the functions below it give."""

from __future__ import annotations

from typing import ClassVar

import pytest
import tiny
import torch

from pictool.api import compile, link
from pictool.compiler.compile import Compiled
from pictool.core import Chunk, CompileOptions
from pictool.engines.base import Engine, Feature
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError, TraceError
from pictool.linker.policies import make_policy, policies
from pictool.linker.spec import Spec
from pictool.runtime.decode import generate
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store

CHUNKS = [Chunk("a", tuple(range(5, 40)), "a"), Chunk("b", tuple(range(60, 80)), "b")]


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


@pytest.mark.parametrize("name", [name for name in policies() if not policies()[name]().needs.runs_model])
def test_an_answer_is_a_link_and_its_decoding(model: Model, store: Store, name: str) -> None:
    spec = Spec("nobody knows?", CHUNKS, make_policy(name), max_new_tokens=7, separator="")
    with TorchEngine(model, store) as engine:
        compiled: list[Compiled] = []
        result, answer = engine.link(spec, on_compile=compiled.append), engine.answer(spec)
    frame = spec.frame(model)
    linked = link(model, store, CHUNKS, frame.tail, make_policy(name), head=frame.head)
    assert result.logits is not None and linked.image.logits is not None
    if name != "prefix":  # whose second link computes less
        assert torch.equal(result.logits, linked.image.logits) and result.recomputed == linked.recomputed
    assert bool(compiled) == make_policy(name).needs.objects
    assert answer.generated == generate(model, linked.image, 7)
    assert answer.report()["engine"] == "torch" and answer.report()["answer"] == answer.text


def test_an_engine_compiles_what_the_function_compiles(model: Model, store: Store) -> None:
    with TorchEngine(model, store) as engine:
        done = engine.compile(CHUNKS, CompileOptions("int8", after="text"))
    again = compile(model, store, CHUNKS, after="text", codec="int8")
    assert [one.key for one in done] == [one.key for one in again]
    assert [one.is_new for one in (*done, *again)] == [True, True, False, False]


def test_a_caller_can_end_an_answer_and_ask_for_the_next(model: Model, store: Store) -> None:
    spec = Spec("nobody knows?", CHUNKS, make_policy("naive"), max_new_tokens=30)

    def stop(text: str) -> None:
        raise TimeoutError(text)

    with TorchEngine(model, store) as engine:
        whole = engine.answer(spec).text
        with pytest.raises(TimeoutError):
            engine.answer(spec, on_text=stop)
        pieces: list[str] = []
        assert engine.answer(spec, on_text=pieces.append).text == whole == "".join(pieces).strip()


class Lesser(TorchEngine):
    """An engine without any feature."""

    name: ClassVar[str] = "lesser"
    title: ClassVar[str] = "Lesser"
    supports: ClassVar[frozenset[Feature]] = frozenset()


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        (Spec("why?", CHUNKS, make_policy("naive"), codec="int8"), "--codec int8"),
        (Spec("why?", CHUNKS, make_policy("prefix")), "--algo prefix"),
    ],
)
def test_what_an_engine_does_not_support_is_refused_before_anything_runs(
    model: Model, store: Store, spec: Spec, option: str
) -> None:
    with Lesser(model, store) as engine, pytest.raises(InputError, match=f"^{option}: Lesser "):
        engine.answer(spec)
    assert store.keys() == []


def test_features_are_named_in_refusals(model: Model, store: Store) -> None:
    engine: type[Engine] = Lesser
    with pytest.raises(InputError, match=r"^after mean: Lesser "):
        engine(model, store).require_options(CompileOptions(after="mean"))
    with pytest.raises(InputError, match=r"^--trace t: Lesser "):
        engine.require("trace", "--trace t")


def test_an_answer_without_a_link_to_show_has_no_trace(model: Model, store: Store) -> None:
    from dataclasses import replace

    answer = TorchEngine(model, store).answer(Spec("why?", CHUNKS, make_policy("naive"), max_new_tokens=2))
    with pytest.raises(TraceError, match="torch"):
        replace(answer, link=replace(answer.link, linked=None)).trace()
