"""A request's `cache_salt` is its tenant's: objects of another salt are never linked, named or recognised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import vllm_rig as rig

from pictool.api import compile
from pictool.core import Chunk
from pictool.runtime.model import load_model

HEAD = "<s>"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp("salt"), "llama")


def salted(world: rig.World, salt: str) -> rig.World:
    return replace(world, model=load_model(str(world.directory), "cpu", "float32", salt))


@pytest.fixture(scope="module")
def engine(world: rig.World, start: Callable[..., Any]) -> rig.Engine:
    extra = {"recognise": True, "policy": "legolink-4", "min_tokens": 5, "refresh_s": 0.2}
    engine: rig.Engine = start(world, extra, enable_prefix_caching=True)
    return engine


def test_what_a_tenant_compiles_is_its_own(world: rig.World, start: Callable[..., Any]) -> None:
    engine = start(world, {"compile": True})
    mine, chunks = salted(world, "mine"), rig.text_chunks(world.model)
    for chunk in chunks:
        params = {"pic": {"compile": {"text": chunk.text, "before": 0}}}
        (answer,) = engine.ask(rig.Case([*chunk.tokens, 5], params, None, "mine"), num_tokens=1)  # type: ignore[arg-type]
        assert answer.report is not None and answer.report["state"] == "compiled"
    assert all(world.store.has(mine.model.key(chunk.tokens, "none")) for chunk in chunks)
    assert not any(world.store.has(world.model.key(chunk.tokens, "none")) for chunk in chunks)


@pytest.mark.parametrize("salt", ["other", None])
def test_named_objects_are_linked_for_their_tenant_only(world: rig.World, engine: rig.Engine, salt: str | None) -> None:
    case, exact = salted(world, "mine").case("legolink-4", seed=1), world.exact(seed=1)
    own, foreign = engine.ask(replace(case, salt="mine"), replace(case, salt=salt))
    assert own.report is not None and own.report["state"] == "linked"
    assert rig.difference(case, own) <= rig.TOLERANCE
    assert foreign.report is not None and foreign.report["state"] == "exact"
    assert "no usable object" in foreign.report["problem"]  # as if it were absent
    assert rig.difference(exact, foreign) <= rig.TOLERANCE


def test_an_unsalted_object_is_none_of_a_tenant(world: rig.World, engine: rig.Engine) -> None:
    case, exact = world.case("legolink-4", seed=2), world.exact(seed=2)
    (answer,) = engine.ask(replace(case, salt="mine"))
    assert answer.report is not None and answer.report["state"] == "exact"
    assert rig.difference(exact, answer) <= rig.TOLERANCE


def test_only_a_tenant_s_own_objects_are_recognised(world: rig.World, engine: rig.Engine) -> None:
    """Another tenant's longer object over the same tokens neither is linked nor hides one's own."""
    mine, (chunk,) = salted(world, "mine"), rig.random_chunks((70,), seed=3)
    case = mine.case(
        "legolink-4", chunks=[Chunk("", chunk.tokens[:40], ""), Chunk("", chunk.tokens[40:], "")], head=HEAD
    )
    compile(salted(world, "other").model, world.store, [chunk])
    time.sleep(0.6)
    unsaid = rig.Case(case.tokens, None, case.linked)
    own, nobody = engine.ask(replace(unsaid, salt="mine"), replace(unsaid, salt="third"))
    assert own.report is not None and own.report["chunks"] == 2
    assert rig.difference(case, own) <= rig.TOLERANCE
    assert nobody.report is None


def test_vllm_has_a_prefix_cache_of_its_own(world: rig.World, engine: rig.Engine) -> None:
    case = world.case("naive", seed=4)
    assert case.params is not None
    params = {"pic": {**case.params["pic"], "policy": "prefix"}}
    (refused,) = engine.ask(replace(case, params=params))
    assert refused.report is None or refused.report["state"] == "exact"
