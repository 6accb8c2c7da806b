"""`--engine`: what compiles and links."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pictool.commands.console.errors import UsageError

if TYPE_CHECKING:
    from pictool.engines.base import Engine, Feature


def find_engine(name: str | None, needed: dict[Feature, str] | None = None, model: str | None = None) -> type[Engine]:
    """The engine of this name, or that of the model; what it logs goes to stderr, since stdout is for the answer.

    Args:
        model: the name of a model; that of a GGUF file chooses the engine that runs it.
        needed: features that the command line needs, each with the option that needs it.

    Raises:
        UsageError: no such engine, or it has no such feature.
        InputError: it is not installed.
    """
    from pictool.engines import engine_class

    name = engine_name(name, model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_COLOR", "0")  # stderr shows escapes, and obeys none
    engine = engine_class(name)
    for feature, option in (needed or {}).items():
        if feature not in engine.supports:
            raise UsageError(f"--engine {name}: has no {option}; use another engine")
    engine.require_installed()
    return engine


def engine_name(name: str | None, model: str | None = None) -> str:
    """The name of an engine, which need not be installed here; by default that of the model. Raises UsageError."""
    from pictool.engines import DEFAULT, GGUF, engine_names
    from pictool.runtime.model import is_gguf

    if name is None:
        return GGUF if is_gguf(model) else DEFAULT
    if name in (DEFAULT, "vllm") and is_gguf(model):
        raise UsageError(f"--engine {name}: does not run GGUF files such as {model}; leave --engine out")
    if name not in engine_names():
        raise UsageError(f"--engine {name}: must be {' or '.join(engine_names())}")
    return name
