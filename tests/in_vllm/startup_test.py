"""The check at start-up: it passes on this vLLM, and where vLLM has changed under the connector nothing is linked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_rig as rig
from vllm.forward_context import is_forward_context_available
from vllm.v1.attention.backends import cpu_attn

from pictool.engines.vllm.needs import CONNECTOR, WORKER
from pictool.engines.vllm.worker import check, forward
from pictool.needs import missing

Patch = pytest.MonkeyPatch
DECLINED = "declined"


@pytest.fixture
def world(tmp_path: Path) -> rig.World:
    return rig.make_world(tmp_path, "llama")


@pytest.fixture
def deviations(monkeypatch: Patch) -> list[float]:
    """What the check found, by start."""
    found: list[float] = []
    measured = check.link_deviation

    def measure(*arguments: Any) -> float:
        found.append(measured(*arguments))
        return found[-1]

    monkeypatch.setattr(check, "link_deviation", measure)
    return found


@pytest.fixture
def start(monkeypatch: Patch) -> Iterator[Callable[..., rig.Engine]]:
    running: list[rig.Engine] = []

    def start(world: rig.World, **options: Any) -> rig.Engine:
        running.append(rig.Engine(world, **options))
        return running[-1]

    yield start
    monkeypatch.undo()
    for engine in running:
        engine.close()


def test_this_vllm_has_what_is_needed() -> None:
    assert missing(CONNECTOR) == [] and missing(WORKER) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_link_at_start_up_is_full(
    world: rig.World, start: Callable[..., rig.Engine], deviations: list[float], dtype: str
) -> None:
    start(world, dtype=dtype)
    assert len(deviations) == 1 and deviations[0] <= (1e-5 if dtype == "float32" else 0.02)


def outside_of_forwards(monkeypatch: Patch, change: Callable[..., tuple[Any, ...]]) -> None:
    """What attention writes stays as it is; what is written between forwards, as links do, is changed."""
    kind = cpu_attn.CPUAttentionBackendImpl
    written = kind.do_kv_cache_update

    def write(self: Any, layer: Any, *arguments: Any) -> None:
        arguments = arguments if is_forward_context_available() else change(layer, *arguments)
        written(self, layer, *arguments)

    monkeypatch.setattr(kind, "do_kv_cache_update", write)


def of_second_layer(change: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def changed(layer: Any, *arguments: Any) -> tuple[Any, ...]:
        return change(*arguments) if ".1." in layer.layer_name else arguments

    return changed


def heads_elsewhere(key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> tuple[Any, ...]:
    return key.flip(1).contiguous(), value.flip(1).contiguous(), cache, slots


def values_first(key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> tuple[Any, ...]:
    return value, key, cache, slots


def slots_elsewhere(key: torch.Tensor, value: torch.Tensor, cache: Any, slots: torch.Tensor) -> tuple[Any, ...]:
    return key, value, cache, slots - 1


def metadata_of_whole_prompts(monkeypatch: Patch) -> None:
    """Runs of rows are told to be one."""
    common = forward.RowForward._common_metadata

    def told(self: Any, *arguments: Any) -> Any:
        metadata = common(self, *arguments)
        metadata.seq_lens.fill_(int(metadata.seq_lens.max()))
        return metadata

    monkeypatch.setattr(forward.RowForward, "_common_metadata", told)


def without_a_name(monkeypatch: Patch) -> None:
    monkeypatch.setattr(check, "WORKER", {**WORKER, "vllm.forward_context:set_context_of_1999": ()})


CHANGES: dict[str, Callable[[Patch], None]] = {
    "the layout of a layer": lambda patch: outside_of_forwards(patch, of_second_layer(heads_elsewhere)),
    "the order of keys and values": lambda patch: outside_of_forwards(patch, of_second_layer(values_first)),
    "where blocks begin": lambda patch: outside_of_forwards(patch, of_second_layer(slots_elsewhere)),
    "what attention is told": metadata_of_whole_prompts,
    "a name": without_a_name,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_where_vllm_has_changed_nothing_is_linked(
    world: rig.World, start: Callable[..., rig.Engine], monkeypatch: Patch, change: str
) -> None:
    CHANGES[change](monkeypatch)
    engine = start(world)
    monkeypatch.undo()  # vLLM itself computes as ever
    for _ in range(2):  # the first job is declined by a worker, the second request by the scheduler
        linked, full, ordinary = world.case("legolink-4"), world.case("full"), world.exact(seed=1)
        answer, other = engine.ask(linked, ordinary)
        assert answer.report is not None and answer.report["state"] == "exact" and DECLINED in answer.report["problem"]
        assert other.report is None and rig.difference(ordinary, other) < rig.TOLERANCE
        assert rig.difference(full, answer) < rig.TOLERANCE
