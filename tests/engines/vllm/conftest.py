"""A tiny model for the modules of the vLLM connector that run without vLLM."""

from __future__ import annotations

import pytest
import tiny

from pictool.runtime.model import Model, wrap_model


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())
