"""`--engine`: what links and compiles, our own runtime or an offline vLLM."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import ModuleType

from pictool.commands.common import UsageError
from pictool.errors import InputError

TORCH, VLLM = "torch", "vllm"


def open_engine(name: str) -> ModuleType:
    """The module whose `answer` and `compile` do it; both engines have the same.

    Raises:
        UsageError: no such engine.
        InputError: vLLM is not installed.
    """
    if name == TORCH:
        from pictool.engines import torch

        return torch
    if name != VLLM:
        raise UsageError(f"--engine {name}: must be {TORCH} or {VLLM}")
    if find_spec("vllm") is None:
        raise InputError("--engine vllm: vLLM is not installed here; pip install 'vllm==0.32.*' (docs/vllm.md)")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the answer
    from pictool.engines.vllm import offline

    return offline
