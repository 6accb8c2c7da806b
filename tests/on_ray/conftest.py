"""These tests start a Ray cluster of several nodes (`make test-ray`); without --require-all they are not collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name.endswith("_test.py") and not config.getoption("--require-all") else None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes of two CPUs each, as far as Ray knows."""
    # What workers import, and what they say: nothing.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error", "TRANSFORMERS_VERBOSITY": "error"}
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
    running = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(2):
            running.add_node(**node)
        yield running
    finally:
        running.shutdown()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as a model directory."""
    return tiny.save_model(tmp_path_factory.mktemp("tiny") / "model", tiny.CONFIGS["llama"]())
