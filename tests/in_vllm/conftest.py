"""These tests need vllm (`make test-vllm`); elsewhere they are not collected, and nothing is reported as skipped."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_matrix import Answered

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["*_test.py"]
if not torch.cpu._is_amx_tile_supported():  # latents are refused there: vLLM computes them by other kernels
    collect_ignore_glob.append("latents_test.py")
    if not torch.cpu._is_avx512_supported():  # vLLM itself refuses caches of fp8 there
        collect_ignore_glob.append("fp8_test.py")

if HAS_VLLM:
    import vllm_rig as rig

    rig.small_environment()

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """From 0.33 on vLLM gives each engine on a CPU a memory node: where there is one, two engines do not start."""
        from vllm.utils.cpu_resource_utils import get_visible_memory_node

        if inspect.signature(get_visible_memory_node).parameters and len(get_visible_memory_node()) < 2:
            items[:] = [item for item in items if item.name != "test_two_engines_behind_two_servers"]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fingerprints, and what vLLM finds out of models' code by a process of its own, are kept for the session."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["VLLM_CACHE_ROOT"] = str(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def answered(request: pytest.FixtureRequest) -> Iterator[Answered]:
    """Counts the answers that tests compare, by cell of the matrix; `make vllm-matrix` writes them down."""
    options = request.config.option
    answered = Answered(options.per_cell)
    yield answered
    if options.matrix is not None:
        answered.write(Path(options.matrix))


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """Starts engines; one runs at a time, the last one until the module ends."""
    running: list[Any] = []

    def stop() -> None:
        while running:
            running.pop().close()
        gc.collect()

    def start(world: rig.World, extra: dict[str, Any] | None = None, **options: Any) -> rig.Engine:
        stop()
        running.append(rig.Engine(world, extra, **options))
        engine: rig.Engine = running[-1]
        return engine

    yield start
    stop()
