"""Span queries on vLLM: the answers of the torch engine, call by call."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vllm_rig as rig

from pictool.engines.base import Answer, Engine
from pictool.engines.torch import TorchEngine
from pictool.engines.vllm.client.offline import VllmEngine
from pictool.spans.dsl import fragment, g, par, plus, repeat, system
from pictool.spans.execute import Executor, Hooks, QueryBudget, RunOptions
from pictool.spans.outcome import QueryError
from pictool.spans.query import Path as NodePath

OPTIONS = {
    name: value for name, value in rig.default_options().items() if name not in ("max_model_len", "disable_log_stats")
}
TEXTS = (fragment("The harbour was quiet. "), fragment("It holds a festival in the spring; nobody knows why. "))
QUERY = g(
    system("You judge. "),
    plus(*TEXTS, repeat(2, g(plus(*TEXTS), "One?", temperature=0, max_tokens=5)), g("Two?", temperature=0)),
    "Which one?",
    temperature=0,
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def engine(world: rig.World) -> Iterator[VllmEngine]:
    with VllmEngine(world.model, world.store, max_model_len=512, options=OPTIONS) as engine:
        yield engine
    gc.collect()


def test_it_keeps_no_output_and_says_so(engine: VllmEngine) -> None:
    with pytest.raises(QueryError, match="vLLM"):
        Executor(lambda name: engine, RunOptions(rig.policy_of("naive"))).run(QUERY)


def test_calls_that_are_ready_at_once_run_in_one_batch(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a sampled answer, one that fails, which stops no other."""
    running: list[int] = []
    steps = engine._steps_together

    def watched(requests: Any) -> Any:
        running.append(len(requests))
        return steps(requests)

    monkeypatch.setattr(engine, "_steps_together", watched)
    options = RunOptions(rig.policy_of("full"), max_new_tokens=4, keeps_outputs=False)
    texts = ("One?", "Two?", "Three?")
    query = par(*(g(plus(*TEXTS), text, temperature=0.8, max_tokens=4 + index) for index, text in enumerate(texts)))
    together = Executor(lambda name: engine, options).run(query)
    assert running == [3]
    alone = Executor(lambda name: engine, replace(options, budget=QueryBudget(tokens=99))).run(query)
    assert running == [3, 1, 1, 1]
    assert sorted((done.path, done.tokens) for done in together.done) == [(d.path, d.tokens) for d in alone.done]
    with pytest.raises(QueryError, match=r"^par\[1\]: ") as error:
        Executor(lambda name: engine, options).run(par(g("a"), g("word " * 999), g("b")))
    assert len(error.value.done) == 2


def answers(engine: Engine, policy: str) -> list[Answer]:
    """By path: vLLM runs the inner calls side by side."""
    found: dict[NodePath, Answer] = {}

    def keep(path: NodePath, answer: Answer) -> None:
        found[path] = answer

    options = RunOptions(rig.policy_of(policy), max_new_tokens=8, base=Path(), keeps_outputs=False)
    Executor(lambda name: engine, options, Hooks(on_answer=keep)).run(QUERY)
    return [found[path] for path in sorted(found, key=repr)]


@pytest.mark.parametrize("policy", ["full", "naive", "legolink-4", "cacheblend-30"])
def test_every_call_answers_as_on_the_torch_engine(world: rig.World, engine: VllmEngine, policy: str) -> None:
    theirs, ours = answers(engine, policy), answers(TorchEngine(world.model, world.store), policy)
    assert len(theirs) == len(ours) == 3
    for given, wanted in zip(theirs, ours, strict=True):
        assert given.link.layout.tokens.tolist() == wanted.link.layout.tokens.tolist()
        assert given.generated.tokens == wanted.generated.tokens
        assert given.generated.logprobs == pytest.approx(wanted.generated.logprobs, abs=rig.TOLERANCE)
        if given.link.layout.chunks:  # a prompt without any is not linked there
            assert given.link.recomputed == pytest.approx(wanted.link.recomputed)
