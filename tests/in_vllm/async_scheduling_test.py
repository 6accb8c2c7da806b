"""Asynchronous scheduling, the default on GPUs, which vLLM's CPU platform switches off: forced on here.

vLLM's own scheduler, batch queue and model runner of asynchronous scheduling run; streams and events, which a CPU has
not, are placeholders, so what is shown is the order of the connector's calls: a step is scheduled before the last one's
tokens are known, and links go on over steps that overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import vllm_rig as rig

SPECS = ("naive", "legolink-4", "legolink-1", "cacheblend-15", "legolink-1000")


class _Placeholder:
    """A stream, or an event, of a device that does all at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@pytest.fixture(scope="module")
def forced() -> Iterator[list[int]]:
    """vLLM schedules asynchronously on this CPU; the lengths of its queue of batches, at each step."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCore

    check, step, lengths = CpuPlatform.check_and_update_config, EngineCore.step_with_batch_queue, list[int]()

    def check_and_force(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    def counting(self: Any) -> Any:
        out = step(self)
        lengths.append(len(self.batch_queue))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(check_and_force))
        patch.setattr(EngineCore, "step_with_batch_queue", counting)
        patch.setattr(torch.cuda, "Stream", _Placeholder)
        patch.setattr(torch.cuda, "Event", _Placeholder)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda *_: _Placeholder())
        yield lengths


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp("async"), "llama")


def test_links_beside_others_are_exact(world: rig.World, start: Callable[..., Any], forced: list[int]) -> None:
    engine = start(world)
    config = engine.llm.llm_engine.vllm_config
    assert config.scheduler_config.async_scheduling
    cases = [world.case(spec, seed=seed) for seed, spec in enumerate(SPECS)] + [world.exact(), world.exact(seed=3)]
    for case, answer in zip(cases, engine.ask(*cases, num_tokens=8), strict=True):
        assert rig.difference(case, answer) <= rig.TOLERANCE
        assert case.params is None or (answer.report is not None and answer.report["state"] == "linked")
    assert max(forced) > 0  # a step was scheduled while another one was under way


def test_a_lost_object_is_computed(world: rig.World, start: Callable[..., Any], forced: list[int]) -> None:
    engine = start(world)
    case, exact = world.case("legolink-4", seed=9), [world.exact(seed=9) for _ in range(2)]
    assert case.params is not None
    world.store.path(case.params["pic"]["chunks"][2]["key"]).unlink()
    for own, answer in zip(exact, engine.ask(case, case, num_tokens=8), strict=True):
        assert rig.difference(own, answer) <= rig.TOLERANCE
        assert answer.report is not None and answer.report["state"] == "exact"
