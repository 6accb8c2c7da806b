"""vLLM's model is found on the call stack of the worker that creates the connector; elsewhere the error says so."""

from __future__ import annotations

import pytest

from pictool.engines.vllm.worker.kv import find_worker
from pictool.errors import ModelError


def test_without_a_worker_the_model_is_not_found() -> None:
    with pytest.raises(ModelError, match="vLLM") as error:
        find_worker()
    assert "\n" not in str(error.value)
