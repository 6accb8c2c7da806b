"""Linking inside vLLM gives what our own engine's link gives, on the same objects, for every supported architecture.

All of it for some; for the others, `rig.MORE`, every policy in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import vllm_rig as rig
from vllm_matrix import Answered

from pictool.api import link
from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions
from pictool.linker.policies import policies
from pictool.runtime.model import embedded_path


@pytest.fixture(
    scope="module", params=[name for name in rig.CONFIGS if name not in (*rig.REFUSED, *rig.MORE, *rig.LATENTS)]
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> Iterator[tuple[rig.World, rig.Engine]]:
    world = rig.make_world(tmp_path_factory.mktemp(request.param), request.param)
    yield world, start(world)


def test_the_cell(pair: tuple[rig.World, rig.Engine], answered: Answered, request: pytest.FixtureRequest) -> None:
    world, engine = pair
    cases = rig.mixed(world, answered.per_cell)
    answered.check(request.node.callspec.params["pair"], cases, engine.ask(*cases))


@pytest.mark.parametrize("name", rig.MORE)
def test_a_family(tmp_path: Path, name: str, start: Callable[..., Any], answered: Answered) -> None:
    world = rig.make_world(tmp_path, name)
    engine = start(world)
    cases = [world.case(spec, seed=seed) for seed, spec in enumerate((*rig.POLICIES, "legolink-1000"))]
    cases += [world.exact(), world.case("naive", seed=60, head=""), *rig.mixed(world, answered.per_cell - len(cases))]
    answered.check(name, cases, engine.ask(*cases))


@pytest.mark.parametrize("spec", rig.POLICIES)
def test_it_is_our_own_link(pair: tuple[rig.World, rig.Engine], spec: str) -> None:
    world, engine = pair
    case = world.case(spec)
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None and answer.report["state"] == "linked"
    assert answer.report["recomputed"] == pytest.approx(case.linked.recomputed)


def test_linking_changes_the_answer(pair: tuple[rig.World, rig.Engine]) -> None:
    """Otherwise agreement would say nothing."""
    world, engine = pair
    exact, naive, lego = engine.ask(world.exact(), world.case("naive"), world.case("legolink-16"))
    assert (exact.logprobs[0] - naive.logprobs[0]).abs().max() > 0.1
    assert (lego.logprobs[0] - naive.logprobs[0]).abs().max() > 0.1


def test_k_of_the_longest_chunk_is_vllms_own_full_prefill(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    exact, every = engine.ask(world.exact(), world.case("legolink-1000"))
    assert every.report is not None and every.report["state"] == "linked"
    assert (exact.logprobs - every.logprobs).abs().max() <= rig.TOLERANCE
    assert exact.tokens == every.tokens


@pytest.mark.parametrize("spec", ["naive", "legolink-4", "cacheblend-15"])
def test_without_a_head_the_first_chunk_is_the_head(pair: tuple[rig.World, rig.Engine], spec: str) -> None:
    world, engine = pair
    case = world.case(spec, head="")
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE


@pytest.mark.parametrize("small", ["own", "embedded-small"])
def test_speccache(pair: tuple[rig.World, rig.Engine], small: str, tmp_path: Path) -> None:
    """With a small model of the same tokenizer, and of another."""
    world, engine = pair
    spec_model = str(tiny.save_model(tmp_path / "small", rig.CONFIGS["llama"](), seed=7))
    if small == "embedded-small":
        spec_model = str(embedded_path(small))
    policy = rig.policy_of("speccache-15").with_default_model(spec_model)
    case = world.case(policy, chunks=rig.text_chunks(world.model))
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None and 0 < answer.report["recomputed"] < answer.report["context"]


def test_every_policy_is_covered() -> None:
    """But for those that vLLM refuses: it has a prefix cache of its own."""
    covered = {rig.policy_of(spec).name for spec in rig.POLICIES} | {"speccache"}
    needs = {name: policy().needs for name, policy in policies().items()}
    assert covered == {name for name, need in needs.items() if not (need.chain_block or need.attention)}


def test_objects_of_any_other_context_are_linked_too(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    chunks = rig.random_chunks(rig.LENGTHS)
    head = CompileOptions(after="head")
    compile_chunks(world.model, world.store, chunks, head)
    linked = link(world.model, world.store, chunks, rig.TAIL, rig.policy_of("legolink-4"), head=rig.HEAD, after="head")
    case = rig.case_of(world, linked, chunks, head)
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE


def test_prompts_in_which_not_all_is_of_objects(pair: tuple[rig.World, rig.Engine]) -> None:
    """Tokens between objects are computed, as a policy that always selects them would."""
    world, engine = pair
    assert make_chunk(world.model, tiny.TEXT, "text").tokens
    case = world.case("legolink-70", rig.LENGTHS)  # longer than any chunk: all but the first
    assert case.params is not None
    del case.params["pic"]["chunks"][1:4]
    case.params["pic"]["policy"] = "legolink-1000"
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert answer.report is not None and answer.report["chunks"] == 2
