"""`--engine`: what compiles and links."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pictool.commands.console.errors import UsageError

if TYPE_CHECKING:
    from pictool.engines.base import Engine, Feature


def find_engine(name: str | None, needed: dict[Feature, str] | None = None) -> type[Engine]:
    """The engine of this name, or the default one; what it logs goes to stderr, since stdout is for the answer.

    Args:
        needed: features that the command line needs, each with the option that needs it.

    Raises:
        UsageError: no such engine, or it has no such feature.
        InputError: it is not installed.
    """
    from pictool.engines import engine_class

    name = engine_name(name)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_COLOR", "0")  # stderr shows escapes, and obeys none
    engine = engine_class(name)
    for feature, option in (needed or {}).items():
        if feature not in engine.supports:
            raise UsageError(f"--engine {name}: has no {option}; use that of another engine")
    engine.require_installed()
    return engine


def engine_name(name: str | None) -> str:
    """The name of an engine, which need not be installed here; by default the default one's. Raises UsageError."""
    from pictool.engines import DEFAULT, engine_names

    if name is None:
        return DEFAULT
    if name not in engine_names():
        raise UsageError(f"--engine {name}: must be {' or '.join(engine_names())}")
    return name
