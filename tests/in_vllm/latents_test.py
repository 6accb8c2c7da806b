"""Latent attention: linked, and compiled, by vLLM's kernels for AMX, which compute in bfloat16.

The reference is the torch engine in bfloat16. Where a CPU has no AMX this file is not collected (conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import vllm_rig as rig
from vllm_matrix import CELLS, Answered

from pictool.api import compile
from pictool.compiler.contexts import PREVIOUS, contexts_of
from pictool.core import CompileOptions
from pictool.store.store import Store

SPECS = ("full", "naive", "legolink-4", "legolink-1", "legolink-1000", None)


@pytest.fixture(scope="module", params=rig.LATENTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> Iterator[tuple[rig.World, rig.Engine]]:
    world = rig.make_world(tmp_path_factory.mktemp(request.param), request.param, dtype="bfloat16")
    yield world, start(world, {"compile": True}, dtype="bfloat16", enable_prefix_caching=True)


def test_the_cell(pair: tuple[rig.World, rig.Engine], answered: Answered, request: pytest.FixtureRequest) -> None:
    world, engine = pair
    chosen = [(seed, SPECS[seed % len(SPECS)]) for seed in range(max(len(SPECS), answered.per_cell))]
    cases = [world.case(spec, seed=seed) if spec else world.exact(seed=seed) for seed, spec in chosen]
    answered.check(request.node.callspec.params["pair"], cases, engine.ask(*cases))


def test_a_policy_that_compares_kv(pair: tuple[rig.World, rig.Engine]) -> None:
    """Rounding may choose another row than the reference has: one more or less is up to 0.2 apart."""
    world, engine = pair
    cases = [world.case(spec, seed=seed) for seed in range(3) for spec in ("cacheblend-15", "cacheblend-30:on=kv")]
    for case, answer in zip(cases, engine.ask(*cases), strict=True):
        assert answer.report is not None and answer.report["state"] == "linked"
        assert rig.difference(case, answer) <= 2 * CELLS["deepseek_v3"].tolerance


def test_what_is_linked_is_not_an_ordinary_answer(pair: tuple[rig.World, rig.Engine]) -> None:
    """Else the tolerance of bfloat16 would hide a link that went wrong."""
    world, engine = pair
    for seed, spec in enumerate(("naive", "legolink-4", "legolink-1", "cacheblend-15")):
        case, exact = world.case(spec, seed=seed), world.exact(seed=seed)
        (answer,) = engine.ask(case)
        assert rig.difference(exact, answer) > 10 * CELLS["deepseek_v3"].tolerance


def test_prompts_in_parts_and_the_next_question(pair: tuple[rig.World, rig.Engine]) -> None:
    """The tail is longer than a step's part of 512 tokens; then its context is in vLLM's own cache."""
    world, engine = pair
    for tail in (" Numbers such as 1,024 or 3.14 stand here too, and words." * 20, " Why?"):
        case = world.case("legolink-4", seed=3, tail=tail)
        (answer,) = engine.ask(case)
        assert rig.difference(case, answer) <= CELLS["deepseek_v3"].tolerance


def test_what_vllm_compiles_is_the_torch_engine_s_object(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    chunk = rig.text_chunks(world.model)[0]
    (reference,) = compile(world.model, Store(world.store.root.with_name("own")), [chunk])
    (before,) = contexts_of(world.model, chunk, CompileOptions(after=PREVIOUS))
    tokens = [*before, *chunk.tokens, 5]
    params = {"pic": {"compile": {"text": chunk.text, "before": len(before)}}}
    (answer,) = engine.ask(rig.Case(tokens, params, None), num_tokens=1)  # type: ignore[arg-type]
    assert answer.report is not None and answer.report["state"] == "compiled"
    with world.store.peek(reference.key) as file, Store(world.store.root.with_name("own")).peek(reference.key) as own:
        for layer in range(world.model.geometry.layers):
            for part, expected in zip(file.layer(layer), own.layer(layer), strict=True):
                numbers, of_torch = (torch.frombuffer(data, dtype=torch.bfloat16).float() for data in (part, expected))
                assert float((numbers - of_torch).abs().max()) < 0.03 * float(of_torch.abs().max())
