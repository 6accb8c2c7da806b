"""What requests may ask of vLLM beside a link: their answers are still those of their exact and linked references.

All on one engine, which orders requests by priority, and has so few blocks that they push each other out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm_rig as rig
from vllm_matrix import Answered, Count

Pair = tuple[rig.World, rig.Engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Any]) -> Pair:
    world = rig.make_world(tmp_path_factory.mktemp("features"), "llama")
    options = {"scheduling_policy": "priority", "enable_prompt_embeds": True, "max_model_len": 384}
    return world, start(world, enable_prefix_caching=True, num_gpu_blocks_override=36, **options)


def twice(world: rig.World, number: int) -> list[rig.Case]:
    """Every request two times in succession: a reference is computed as its answer is compared."""
    pairs = zip(rig.mixed(world, number), rig.mixed(world, number), strict=True)
    return [case for equal in pairs for case in equal]


def test_several_answers_to_a_request(pair: Pair, answered: Answered) -> None:
    world, engine = pair
    cases = twice(world, answered.per_cell)
    answers = engine.ask(*cases[::2], n=2, temperature=1.0, seed=5)
    assert any(first.tokens != second.tokens for first, second in zip(answers[::2], answers[1::2], strict=True))
    answered.check("n > 1", cases, answers)


def test_requests_of_a_high_priority_push_out_others(pair: Pair, answered: Answered) -> None:
    """The last ones are the most urgent."""
    world, engine = pair
    cases, before = rig.mixed(world, answered.per_cell + 3), engine.metric("num_preemptions")
    answers = engine.ask(*cases, num_tokens=90, options={"priority": [-number for number in range(len(cases))]})
    assert engine.metric("num_preemptions") > before
    answered.check("--scheduling-policy priority", cases, answers)


def test_answers_of_a_given_structure(pair: Pair, answered: Answered) -> None:
    """vLLM takes what is not allowed out of the distribution, which is otherwise that of the reference."""
    from vllm.sampling_params import StructuredOutputsParams

    world, engine = pair
    words, count = ("spring", "harbour"), Count()
    for case in rig.mixed(world, answered.per_cell):
        (answer,) = engine.ask(
            case, num_tokens=12, ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=list(words))
        )
        assert world.model.tokenizer.decode(answer.tokens, skip_special_tokens=True) in words
        allowed = answer.logprobs.isfinite()
        reference = torch.where(allowed, case.logprobs(answer.tokens), -torch.inf).log_softmax(-1)
        assert (answer.report and answer.report["state"]) == (None if case.params is None else "linked")
        count.add(case.params is not None, float((reference - answer.logprobs)[allowed].abs().max()))
    assert count.difference <= rig.TOLERANCE
    answered.record("structured output", count)


def test_a_prompt_of_embeddings_is_computed_and_says_so(pair: Pair) -> None:
    world, engine = pair
    case, exact = world.case("naive", seed=65), world.exact(seed=65)
    embedded = world.model.module.get_input_embeddings()(torch.tensor(case.tokens)).detach()
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": case.params})
    (output,) = engine.llm.generate([{"prompt_embeds": embedded}], params, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == int(exact.logprobs([0])[0].argmax())
    report = output.kv_transfer_params["pic"]
    assert (report["state"], report["problem"]) == ("exact", "a prompt of embeddings has no tokens to link")
