"""What vLLM does on a GPU only, as far as its own code can be made to do it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import vllm_rig as rig

SPECS = ("naive", "legolink-4", "legolink-1", "cacheblend-15")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> rig.World:
    return rig.make_world(tmp_path_factory.mktemp("gpu"), "llama")


@pytest.fixture
def in_the_order_of_runner_v2(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Connectors are called by model runner V2's own code; returns the calls. The runner itself needs Triton."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    calls: list[str] = []

    @contextmanager
    def run(scheduler_output: Any, defer_finalize: bool = False) -> Iterator[Any]:
        connector = get_kv_transfer_group()
        config = connector._vllm_config
        active = object.__new__(ActiveKVConnector)  # its constructor would register the caches again
        active.vllm_config, active.kv_connector = config, connector
        active._pending_load_kwargs, active._disabled = None, False
        active.pre_forward(scheduler_output)
        output = KVConnectorOutput()
        yield output
        active.finish_forward()
        after = active.post_forward(scheduler_output.finished_req_ids)
        calls.append("post_forward")
        vars(output).update(vars(after))

    monkeypatch.setattr(KVConnectorModelRunnerMixin, "_get_kv_connector_output", staticmethod(run))
    return calls


def test_loads_in_the_order_of_model_runner_v2(
    world: rig.World, start: Callable[..., Any], in_the_order_of_runner_v2: list[str]
) -> None:
    engine = start(world)
    cases = [world.case(spec, seed=seed) for seed, spec in enumerate(SPECS)] + [world.exact()]
    for case, answer in zip(cases, engine.ask(*cases), strict=True):
        assert rig.difference(case, answer) <= rig.TOLERANCE
        assert case.params is None or (answer.report is not None and answer.report["state"] == "linked")
    case, exact = world.case("legolink-4", seed=9), world.exact(seed=9)
    assert case.params is not None
    world.store.path(case.params["pic"]["chunks"][2]["key"]).unlink()
    (answer,) = engine.ask(case)
    assert rig.difference(exact, answer) <= rig.TOLERANCE
    assert answer.report is not None and answer.report["state"] == "exact"
    assert in_the_order_of_runner_v2


@pytest.mark.parametrize(
    ("spec", "backend"),
    [("legolink-4", "FLASHINFER"), ("cacheblend-15", "FLEX_ATTENTION"), ("legolink-1000", "FLASHINFER")],
)
def test_passes_of_a_backend_that_holds_so_many_sequences(
    world: rig.World, start: Callable[..., Any], spec: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their metadata have room for `max_num_seqs` sequences, and a pass may have a sequence for each row."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    monkeypatch.setattr("pictool.engines.vllm.worker.kv.AttentionLayer.backend", backend)
    engine, passes = start(world, max_num_seqs=6), list[int]()
    forward = get_kv_transfer_group()._worker_side._forward
    make = forward._common_metadata

    def note(*arguments: Any) -> Any:
        common = make(*arguments)
        passes.append(common.num_reqs)
        return common

    monkeypatch.setattr(forward, "_common_metadata", note)
    case = world.case(spec)
    (answer,) = engine.ask(case)
    assert rig.difference(case, answer) <= rig.TOLERANCE
    assert len(passes) > 1 and max(passes) <= 6
