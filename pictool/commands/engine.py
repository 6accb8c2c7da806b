"""`--engine`: what links and compiles, our own runtime or an offline vLLM."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pictool.commands.common import UsageError
from pictool.engines import engine_class, engine_names

if TYPE_CHECKING:
    from pictool.engines.base import Engine, Feature


def find_engine(name: str, needed: dict[Feature, str] | None = None) -> type[Engine]:
    """The engine of this name; what it logs goes to stderr, since stdout is for the answer.

    Args:
        needed: features that the command line needs, each with the option that does.

    Raises:
        UsageError: no such engine, or it has no such feature.
        InputError: it is not installed.
    """
    if name not in engine_names():
        raise UsageError(f"--engine {name}: must be {' or '.join(engine_names())}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    engine = engine_class(name)
    for feature, option in (needed or {}).items():
        if feature not in engine.supports:
            raise UsageError(f"--engine {name}: has no {option}; use that of another engine")
    engine.require_installed()
    return engine
