"""`--engine`: what compiles and links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from pictool.commands.console.errors import UsageError
from pictool.commands.console.verbosity import note
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.engines.base import Engine, Feature
    from pictool.linker.policies.base import Policy
    from pictool.runtime.model import Model


class NamedPolicy(Protocol):
    """A policy, and what tables call it."""

    @property
    def label(self) -> str: ...
    @property
    def policy(self) -> Policy: ...


P = TypeVar("P", bound=NamedPolicy)


def find_engine(name: str | None, needed: dict[Feature, str] | None = None, model: str | None = None) -> type[Engine]:
    """The engine of this name, or that of the model.

    Args:
        model: the name of a model; that of a GGUF file chooses the engine that runs it.
        needed: features that the command line needs, each with the option that needs it.

    Raises:
        UsageError: no such engine, or it has no such feature.
    """
    from pictool.engines import NOT_HERE, SERVED, engine_class, engine_name, engine_names
    from pictool.runtime.gguf import is_gguf

    if name == SERVED and is_gguf(model):
        raise UsageError(f"--engine {name}: cannot run GGUF files such as {model}; omit --engine")
    if name == SERVED:
        raise UsageError(f"--engine {name}: {NOT_HERE}")
    name = engine_name(model, name)
    if name not in engine_names():
        raise UsageError(f"--engine {name}: must be {' or '.join(engine_names())}")
    engine = engine_class(name)
    for feature, option in (needed or {}).items():
        if feature not in engine.supports:
            raise UsageError(f"--engine {name}: does not support {option}; use another engine")
    return engine


def runnable(model: Model, policies: Sequence[P]) -> list[P]:
    """Those of a command's default policies that the model can compute. A note names the others, and why."""
    kept, left_out = [], dict[str, list[str]]()
    for each in policies:
        try:
            model.require_policy(each.policy)
        except InputError as error:
            left_out.setdefault(str(error), []).append(each.label)
        else:
            kept.append(each)
    for why, labels in left_out.items():
        note(f"skipped: {', '.join(labels)} ({why})")
    return kept
