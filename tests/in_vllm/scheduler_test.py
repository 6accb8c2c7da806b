"""Whatever vLLM's scheduler does with linked requests, their answers stay the same, and ordinary ones stay exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import vllm_rig as rig
from vllm_matrix import Answered

from pictool.engines.vllm.worker.forward import RowForward
from pictool.engines.vllm.worker.worker import WorkerSide

LONG = " Numbers such as 1,024 or 3.14 stand here too, and words." * 4  # a tail of more than 64 tokens
SPECS = ("naive", "legolink-4", "legolink-16", "legolink-1", "cacheblend-15")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "prefix caching": {"enable_prefix_caching": True},
    "no prefix caching": {"enable_prefix_caching": False},
    "chunked prefill": {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 8},
    "torch.compile": {"enable_prefix_caching": True, "enforce_eager": False},
}


@pytest.fixture(scope="module", params=list(CONFIGURATIONS))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> tuple[rig.World, rig.Engine]:
    world = rig.make_world(tmp_path_factory.mktemp(request.param), "llama")
    return world, start(world, **CONFIGURATIONS[request.param])


def require_same(cases: list[rig.Case], answers: list[rig.Answer]) -> None:
    for case, answer in zip(cases, answers, strict=True):
        assert rig.difference(case, answer) <= rig.TOLERANCE


def test_the_cell(pair: tuple[rig.World, rig.Engine], answered: Answered, request: pytest.FixtureRequest) -> None:
    world, engine = pair
    cases = rig.mixed(world, answered.per_cell, tail=LONG)
    answered.check(request.node.callspec.params["pair"], cases, engine.ask(*cases))


def test_a_mixed_batch(pair: tuple[rig.World, rig.Engine]) -> None:
    """Linked and ordinary requests of the same and of other tokens."""
    world, engine = pair
    cases = [world.case(spec, seed=seed, tail=LONG) for seed in (0, 1) for spec in SPECS]
    cases += [world.exact(seed=seed, tail=LONG) for seed in (0, 1, 2)]
    order = np.random.default_rng(0).permutation(len(cases))
    shuffled = [cases[i] for i in order]
    require_same(shuffled, engine.ask(*shuffled))


def test_a_common_head(pair: tuple[rig.World, rig.Engine]) -> None:
    """The same long head before documents in another order, and before an ordinary prompt."""
    world, engine = pair
    head = rig.HEAD + LONG
    cases = [world.case("legolink-4", order, head=head) for order in ((37, 70, 33), (70, 33, 37), (33, 70))]
    cases += [world.exact((70, 37), head=head), world.case("cacheblend-15", (33, 37, 70), head=head)]
    for case in cases:
        require_same([case], engine.ask(case))


@pytest.mark.parametrize("spec", SPECS)
def test_another_question_about_the_same_documents(pair: tuple[rig.World, rig.Engine], spec: str) -> None:
    """Its context is found in the prefix cache as far as whole blocks go; what comes after is linked again."""
    world, engine = pair
    for tail in (rig.TAIL, " Why?", LONG):
        case = world.case(spec, seed=3, tail=tail)
        require_same([case], engine.ask(case))


@pytest.mark.parametrize("spec", ["legolink-16", "cacheblend-15"])
def test_the_next_turn_of_a_conversation(pair: tuple[rig.World, rig.Engine], spec: str) -> None:
    world, engine = pair
    first = world.case(spec, seed=4)
    (answer,) = engine.ask(first, num_tokens=40)
    assert rig.difference(first, answer) <= rig.TOLERANCE
    again = world.case(spec, seed=4)
    for token in answer.tokens:
        logits = again.linked.image.append(token)
    (said,) = engine.ask(rig.Case([*first.tokens, *answer.tokens], first.params, first.linked), num_tokens=1)
    assert (logits.double().log_softmax(-1) - said.logprobs[0]).abs().max() <= rig.TOLERANCE


def test_every_policy_after_text_that_has_no_object(pair: tuple[rig.World, rig.Engine], tmp_path: Path) -> None:
    world, engine = pair
    small = str(tiny.save_model(tmp_path / "small", rig.CONFIGS["llama"](), seed=7))
    policies = [*map(rig.policy_of, rig.POLICIES), rig.make_policy("speccache", {"spec_model": small})]
    cases = [world.case(policy, head=rig.HEAD + LONG, seed=11) for policy in policies]
    rig.forget_head(world, cases[0])
    answers = engine.ask(*cases, num_tokens=2)
    states = {spec: answer.report and answer.report["state"] for spec, answer in zip(policies, answers, strict=True)}
    assert set(states.values()) == {"linked"}, states
    require_same(cases, answers)


def test_seeded_answers_do_not_depend_on_how_their_prompts_are_split(pair: tuple[rig.World, rig.Engine]) -> None:
    """The prompt is computed in parts, beside others or alone, and then found in vLLM's cache."""
    from vllm import SamplingParams

    world, engine = pair
    cases = [world.exact(seed=12), world.case("legolink-4", seed=13)]

    def ask(*which: int) -> list[tuple[int, ...]]:
        extra = [{"kv_transfer_params": cases[i].params} for i in which]
        params = [
            SamplingParams(max_tokens=12, temperature=1, seed=5, ignore_eos=True, extra_args=each) for each in extra
        ]
        prompts = [{"prompt_token_ids": cases[i].tokens} for i in which]
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    together, again = ask(0, 1, 0), ask(0, 1)
    assert together[0] == together[2] and together[:2] == again == ask(0) + ask(1)
    assert together[0] != together[1]


def test_one_hundred_random_interleavings(pair: tuple[rig.World, rig.Engine]) -> None:
    """Of requests with the same tokens: an ordinary one is always exact, a linked one always its own link."""
    world, engine = pair
    cases = [
        world.exact(),
        world.exact(tail=LONG),
        *(world.case(spec) for spec in SPECS),
        world.case("naive", tail=LONG),
    ]
    references = [case.logprobs([0]) for case in cases]
    draw = np.random.default_rng(1)
    for _ in range(100):
        chosen = draw.integers(0, len(cases), draw.integers(1, 4)).tolist()
        for which, answer in zip(chosen, engine.ask(*(cases[i] for i in chosen), num_tokens=1), strict=True):
            assert (answer.logprobs - references[which]).abs().max() <= rig.TOLERANCE
    apart = [float((references[0] - linked).abs().max()) for linked in references[2:7]]
    assert min(apart) > 0.1, "the interleavings would not have shown a poisoned cache"


def test_the_prefix_cache_is_used_and_not_shared(
    tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]
) -> None:
    world = rig.make_world(tmp_path_factory.mktemp("shared"), "llama")
    engine = start(world, enable_prefix_caching=True)
    case, exact = world.case("naive", tail=LONG), world.exact(tail=LONG)

    def hits(case: rig.Case) -> float:
        before = engine.metric("prefix_cache_hits")
        engine.ask(case, num_tokens=1)
        return float(engine.metric("prefix_cache_hits") - before)

    assert [hits(exact), hits(case)] == [0, 0]
    assert min(hits(exact), hits(case)) >= 192
    assert hits(world.case("legolink-4", tail=LONG)) == 0
    before = engine.metric("pic_shared_tokens")
    (answer,) = engine.ask(case)
    assert answer.report is not None and answer.report["state"] == "cached"
    assert engine.metric("pic_shared_tokens") - before == answer.report["shared"] == answer.report["context"]


def test_preemption_and_resume(
    tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any], answered: Answered
) -> None:
    """So few blocks that requests push each other out while they decode."""
    world = rig.make_world(tmp_path_factory.mktemp("preempt"), "llama")
    for caching in (True, False):
        engine = start(world, enable_prefix_caching=caching, num_gpu_blocks_override=36, max_model_len=384)
        cases = rig.mixed(world, max(answered.per_cell, 6))
        answers = engine.ask(*cases, num_tokens=90)
        assert engine.metric("num_preemptions") > 0
        answered.check("preemption", cases, answers)


def test_passes_that_are_cut_between_and_within_layers(
    tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that has other work does one piece of a link: a few rows of a layer, or a part of a layer's bytes."""
    world = rig.make_world(tmp_path_factory.mktemp("cut"), "llama")
    engine = start(world, {"step_ms": 1e-6, "step_rows": 3, "step_bytes": 5000}, enable_prefix_caching=True)
    cases = [world.case(spec, (33, 37, 5), seed=seed) for seed, spec in enumerate(SPECS)] + [world.exact(seed=9)]
    num_rows: list[int] = []
    run, step = RowForward._run_layer, WorkerSide.step

    def counted(self: RowForward, batch: Any, micro_batch: Any, *rest: Any) -> Any:
        num_rows.append(len(micro_batch.index))
        return run(self, batch, micro_batch, *rest)

    def never_idle(self: WorkerSide, jobs: Any, target: Any, _: bool) -> Any:
        return step(self, jobs, target, False)

    monkeypatch.setattr(RowForward, "_run_layer", counted)
    monkeypatch.setattr(WorkerSide, "step", never_idle)
    answers = engine.ask(*cases, num_tokens=3)
    assert max(num_rows) <= 3 * 4 and len(num_rows) > 50
    require_same(cases, answers)


def test_more_requests_than_can_run(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    cases = [world.case(SPECS[i % 5], (37, 33), seed=i, tail=LONG) for i in range(24)]
    require_same(cases, engine.ask(*cases, num_tokens=2))


def test_a_chunk_that_ends_the_prompt_leaves_its_last_token(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    whole = world.case("naive", (37, 70))
    cut = rig.Case(whole.tokens[: whole.linked.image.layout.num_context], whole.params, whole.linked)
    chunks = rig.random_chunks((37, 70))
    linked = rig.link_tokens(world, chunks[:1], chunks[1])
    (answer,) = engine.ask(cut, num_tokens=1)
    assert (linked - answer.logprobs[0]).abs().max() <= rig.TOLERANCE


def test_what_the_response_says(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    ordinary, linked = engine.ask(world.exact(seed=7), world.case("legolink-4", seed=7))
    assert ordinary.report is None
    assert linked.report is not None
    assert {name: linked.report[name] for name in ("state", "policy", "chunks", "problem")} == {
        "state": "linked", "policy": "legolink-4", "chunks": 5, "problem": None
    }  # fmt: skip
    assert linked.report["timing"]["load_s"] > 0
    assert torch.isfinite(linked.logprobs).all()


def test_the_store_is_not_written_to(pair: tuple[rig.World, rig.Engine]) -> None:
    world, engine = pair
    case = world.case("cacheblend-15", seed=8)
    files = {path: path.read_bytes() for path in Path(world.store.root).rglob("*.kvo")}
    engine.ask(case)
    assert {path: path.read_bytes() for path in Path(world.store.root).rglob("*.kvo")} == files
