"""An object that cannot be used, a request that makes no sense: exact answer, one warning, one count."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_rig as rig

from pictool.api import compile
from pictool.compiler.compile import object_key
from pictool.core import Chunk
from pictool.runtime.model import Model
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta

Damage = Callable[[rig.World, Path], object]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-caching", "no-prefix-caching"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> tuple[rig.World, rig.Engine]:
    world = rig.make_world(tmp_path_factory.mktemp("failure"), "llama")
    return world, start(world, {"any_model": False}, enable_prefix_caching=request.param)


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the connector warns of."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.pictool")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def of_another_model(world: rig.World, path: Path) -> None:
    """The object of the same tokens of a model with other weights, under this key."""
    with ObjectFile(path) as file:
        tokens, meta = file.tokens(), file.meta
        layers = [tuple(bytes(part) for part in file.layer(i)) for i in range(4)]
    target = replace(meta.target, model="0" * 64)
    foreign = ObjectMeta(meta.key, target, meta.num_tokens, meta.codec)
    world.store.put(CompiledChunk(foreign, "text", tokens, layers))  # type: ignore[arg-type]


def of_other_tokens(world: rig.World, path: Path) -> None:
    """An object that is whole and of this model, whose tokens are not those of its key."""
    with ObjectFile(path) as file:
        tokens, meta = np.array(file.tokens()), file.meta
        layers = [tuple(bytes(part) for part in file.layer(i)) for i in range(4)]
    tokens[0] += 1
    world.store.put(CompiledChunk(meta, "text", tokens, layers))  # type: ignore[arg-type]


def of_another_key(world: rig.World, path: Path) -> None:
    other = Chunk("", (5, 6, 7), "other")
    compile(world.model, world.store, [other])
    shutil.copy(world.store.path(object_key(world.model, other, rig.OPTIONS)), path)


DAMAGES: dict[str, Damage] = {
    "missing": lambda world, path: path.unlink(),
    "empty": lambda world, path: path.write_bytes(b""),
    "truncated": lambda world, path: path.write_bytes(path.read_bytes()[:-1000]),
    "header": lambda world, path: flip(path, 200),
    "first layer": lambda world, path: flip(path, len(path.read_bytes()) - 4 * 2 * 2 * 70 * 32 * 4 + 500),
    "last layer": lambda world, path: flip(path, len(path.read_bytes()) - 2000),
    "foreign": of_another_model,
    "other tokens": of_other_tokens,
    "another object": of_another_key,
}


def broken(world: rig.World, case: rig.Case, damage: Damage, which: int = 2) -> tuple[Path, bytes]:
    """Damage the object of one chunk; returns it as it was."""
    assert case.params is not None
    path = world.store.path(case.params["pic"]["chunks"][which]["key"])
    whole = path.read_bytes()
    damage(world, path)
    return path, whole


@pytest.mark.parametrize("spec", ["naive", "cacheblend-15"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_an_object_that_cannot_be_used(
    pair: tuple[rig.World, rig.Engine], damage: str, spec: str, warnings: list[str]
) -> None:
    world, engine = pair
    seed = 100 + list(DAMAGES).index(damage)
    case, exact, other = world.case(spec, seed=seed), world.exact(seed=seed), world.case(spec, seed=50)
    path, whole = broken(world, case, DAMAGES[damage])
    before = engine.metric("pic_failed_requests")
    answer, beside = engine.ask(case, other)
    path.write_bytes(whole)

    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert rig.difference(other, beside) <= rig.TOLERANCE, "a request beside it was touched"
    assert engine.metric("pic_failed_requests") == before + 1
    assert len(warnings) == 1 and path.stem[:12] in warnings[0]
    assert answer.report is not None and answer.report["state"] == "exact"
    assert path.stem[:12] in answer.report["problem"]

    again = world.case(spec, seed=seed)
    (mended,) = engine.ask(again)
    assert mended.report is not None and mended.report["state"] == "linked"
    assert rig.difference(again, mended) <= rig.TOLERANCE, "what failed was taken for linked"
    (ordinary,) = engine.ask(exact, num_tokens=1)
    assert (ordinary.logprobs[0] - answer.logprobs[0]).abs().max() <= rig.TOLERANCE


@pytest.mark.parametrize("spec", ["legolink-4", "cacheblend-15"])
@pytest.mark.parametrize("damage", ["missing", "last layer"])
def test_an_object_that_breaks_between_two_questions(
    pair: tuple[rig.World, rig.Engine], damage: str, spec: str, warnings: list[str]
) -> None:
    """Most of the context is in the prefix cache, linked; the exact answer must not reuse it."""
    world, engine = pair
    first = world.case(spec, (33, 37, 70), seed=60)
    engine.ask(first)
    second = world.case(spec, (33, 37, 70), seed=60, tail=" Why so?")
    exact = world.exact((33, 37, 70), seed=60, tail=" Why so?")
    path, whole = broken(world, second, DAMAGES[damage])
    (answer,) = engine.ask(second)
    path.write_bytes(whole)
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert len(warnings) == 1


def test_many_requests_over_one_damaged_object(pair: tuple[rig.World, rig.Engine], warnings: list[str]) -> None:
    """All at once, equal ones among them: they share blocks, and none may reuse what was not computed."""
    world, engine = pair
    cases = [world.case("legolink-4", seed=61, tail=tail) for tail in (rig.TAIL, rig.TAIL, " Why?")]
    exact = [world.exact(seed=61, tail=tail) for tail in (rig.TAIL, rig.TAIL, " Why?")]
    path, whole = broken(world, cases[0], DAMAGES["last layer"])
    answers = engine.ask(*cases, *exact)
    path.write_bytes(whole)
    for case, answer in zip([*exact], answers[:3], strict=True):
        assert rig.difference(case, answer) <= rig.TOLERANCE
    assert len(warnings) == 3


KEY = "0" * 64
BAD_PARAMS: dict[str, tuple[Any, str]] = {
    "no way": ({}, "one of"),
    "two ways": ({"keys": [KEY], "chunks": []}, "one of"),
    "unknown field": ({"keys": [KEY], "k": 3}, "'k'"),
    "unknown policy": ({"keys": [KEY], "policy": "magic-3"}, "magic"),
    "two policies": ({"keys": [KEY], "policy": "legolink:k=1,2"}, "2 values"),
    "bad policy field": ({"keys": [KEY], "policy": {"algo": "legolink", "k": "x"}}, "k="),
    "not a key": ({"keys": ["../../etc/passwd"]}, "object key"),
    "a number as key": ({"keys": [7]}, "object key"),
    "no such object": ({"keys": [KEY]}, KEY[:12]),
    "no such prefix": ({"keys": ["0000"]}, "0000"),
    "no chunks": ({"chunks": []}, "1 to 1024"),
    "too many chunks": ({"chunks": [{"key": KEY, "start": 0}] * 5000}, "1 to 1024"),
    "a grid without end": (
        {
            "keys": [KEY],
            "policy": "speccache:" + ":".join(f"{f}={'0.1,' * 300}0.1" for f in ("ratio", "deep", "budget")),
        },
        "301 values",
    ),
    "no end to a budget": ({"keys": ["REAL"], "policy": "speccache-15:budget=inf"}, "budget"),
    "not a number": ({"keys": ["REAL"], "policy": {"algo": "cacheblend", "ratio": float("nan")}}, "ratio"),
    "beyond all numbers": ({"keys": ["REAL"], "policy": {"algo": "legolink", "k": 2**62}}, "k="),
    "a start beyond all numbers": ({"chunks": [{"key": KEY, "start": 2**62}]}, "start"),
    "another type in every place": ({"keys": {"a": 1}}, "1 to 1024"),
    "chunk without start": ({"chunks": [{"key": KEY}]}, "start"),
    "negative start": ({"chunks": [{"key": KEY, "start": -1}]}, "start"),
    "a list": ([KEY], "chunks, keys or recognise"),
    "layers beyond the model": ({"keys": ["REAL"], "policy": {"algo": "cacheblend", "layers": "1,9"}}, "layers"),
    "a model of the client's": (
        {"keys": ["REAL"], "policy": {"algo": "speccache", "spec_model": "any/model"}},
        "is not the model",
    ),
    "compile where it is off": ({"compile": {"text": "a", "before": 0}}, "compile"),
}


@pytest.mark.parametrize("name", list(BAD_PARAMS))
def test_parameters_that_make_no_sense(pair: tuple[rig.World, rig.Engine], name: str, warnings: list[str]) -> None:
    world, engine = pair
    fields, message = BAD_PARAMS[name]
    case = world.case("naive", seed=62)
    assert case.params is not None
    if isinstance(fields, dict) and fields.get("keys") == ["REAL"]:
        fields = {**fields, "keys": [case.params["pic"]["chunks"][0]["key"]]}
    exact = world.exact(seed=62)
    (answer,) = engine.ask(rig.Case(exact.tokens, {"pic": fields}, exact.linked))
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert len(warnings) == 1 and message in warnings[0]
    assert answer.report is not None and message in answer.report["problem"]


@pytest.mark.parametrize("params", ["", 0, []])
def test_parameters_of_another_type(pair: tuple[rig.World, rig.Engine], params: Any, warnings: list[str]) -> None:
    """They reach the connector by vLLM's `vllm_xargs`; its front end refuses those that are true."""
    world, engine = pair
    exact = world.exact(seed=62)
    (answer,) = engine.ask(rig.Case(exact.tokens, params, exact.linked))
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert len(warnings) == 1 and "must be an object" in warnings[0]


def test_what_goes_wrong_in_a_policy_is_for_the_log(pair: tuple[rig.World, rig.Engine], warnings: list[str]) -> None:
    world, engine = pair
    case, exact = world.case("naive", seed=62), world.exact(seed=62)
    assert case.params is not None
    case.params["pic"]["policy"] = "speccache-15"
    (answer,) = engine.ask(case)
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert len(warnings) == 1 and "spec_model" in warnings[0] and str(world.directory) in warnings[0]
    assert answer.report is not None and str(world.directory) not in answer.report["problem"]


def test_a_client_is_not_told_what_exists(pair: tuple[rig.World, rig.Engine]) -> None:
    """A key of another tenant, one of another model, a damaged one, and one that does not exist: the same words."""
    world, engine = pair
    case = world.case("naive", seed=66)
    assert case.params is not None
    told = set()
    for salt, damage in (("another tenant", None), (None, "missing"), (None, "foreign"), (None, "last layer")):
        path, whole = broken(world, case, DAMAGES[damage]) if damage else (Path(), b"")
        (answer,) = engine.ask(rig.Case(case.tokens, case.params, case.linked, salt))
        if damage:
            path.write_bytes(whole)
        assert answer.report is not None and rig.difference(world.exact(seed=66), answer) <= rig.TOLERANCE
        told.add(re.sub("[0-9a-f]{12}", "KEY", answer.report["problem"]))
    assert len(told) == 1 and told.pop().startswith("object KEY: no usable object")


FAULTS: dict[str, tuple[str, str]] = {
    "planning": ("pictool.engines.vllm.scheduler.planning.Planner.plan", "naive"),
    "selecting": ("pictool.engines.vllm.scheduler.planning.Planner.select", "naive"),
    "salting": ("pictool.engines.vllm.scheduler.scheduler.SaltFactory.salt_of", "naive"),
    "making the job": ("pictool.engines.vllm.scheduler.scheduler.SchedulerSide._make_job", "naive"),
    "loading": ("pictool.engines.vllm.worker.kv.ObjectReader.read", "naive"),
    "rows": ("pictool.engines.vllm.worker.forward.RowForward.run", "legolink-4"),
    "rows that are narrowed": ("pictool.engines.vllm.worker.forward.NarrowingForward.run", "cacheblend-15"),
}


@pytest.mark.parametrize("error", [MemoryError, KeyError, OSError, torch.OutOfMemoryError])
@pytest.mark.parametrize("name", list(FAULTS))
def test_any_exception_makes_one_request_exact(
    pair: tuple[rig.World, rig.Engine], name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, engine = pair
    where, spec = FAULTS[name]
    seed = 200 + 10 * list(FAULTS).index(name) + len(error.__name__)
    case, exact = world.case(spec, seed=seed), world.exact(seed=seed)
    before = engine.metric("pic_failed_requests")

    def fail(*_: object) -> None:
        raise error("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        (answer,) = engine.ask(case)
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert answer.report is not None and answer.report["state"] == "exact"
    assert "a fault" not in answer.report["problem"]
    assert engine.metric("pic_failed_requests") == before + 1
    again = world.case(spec, seed=seed)
    (mended,) = engine.ask(again)
    assert mended.report is not None and mended.report["state"] in ("linked", "cached")
    assert rig.difference(again, mended) <= rig.TOLERANCE


@pytest.mark.parametrize("shift", [1, -1, 5, 17, 10_000])
def test_an_object_at_the_wrong_place(pair: tuple[rig.World, rig.Engine], shift: int, warnings: list[str]) -> None:
    """One that is a few tokens beside is linked where it is."""
    world, engine = pair
    case, exact = world.case("naive", seed=63), world.exact(seed=63)
    assert case.params is not None
    case.params["pic"]["chunks"][2]["start"] += shift
    (answer,) = engine.ask(case)
    assert rig.difference(case if shift < 16 else exact, answer) <= rig.TOLERANCE
    assert len(warnings) == (shift > 16)


def test_other_connectors_parameters_are_none_of_ours(pair: tuple[rig.World, rig.Engine], warnings: list[str]) -> None:
    world, engine = pair
    for params in ({"do_remote_decode": False}, {"pic": False}, {"pic": None}, {}):
        exact = world.exact(seed=64)
        (answer,) = engine.ask(rig.Case(exact.tokens, params, exact.linked))
        assert rig.difference(exact, answer) <= rig.TOLERANCE and answer.report is None
    assert not warnings


def test_log_probabilities_of_the_prompt_are_exact(pair: tuple[rig.World, rig.Engine], warnings: list[str]) -> None:
    """They need every row; vLLM then takes nothing from a cache, nor from us."""
    from vllm import SamplingParams

    world, engine = pair
    case, exact = world.case("naive", seed=65), world.exact(seed=65)
    params = SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=1, extra_args={"kv_transfer_params": case.params}
    )
    (output,) = engine.llm.generate([{"prompt_token_ids": case.tokens}], params, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == int(exact.logprobs([0])[0].argmax())
    assert len(warnings) == 1 and "log-probabilities of the prompt" in warnings[0]
    assert output.kv_transfer_params["pic"]["problem"] in warnings[0]


def test_models_of_other_weights_are_other_targets(tmp_path: Path) -> None:
    a, b = (rig.make_world(tmp_path / name, "llama", seed=seed).model for name, seed in (("a", 0), ("b", 1)))
    assert isinstance(a, Model) and a.target != b.target
