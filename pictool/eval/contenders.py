"""What is compared: policies and other methods, under the labels of tables and results files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError
from pictool.eval.methods import METHODS, Method
from pictool.linker.fields import make
from pictool.linker.grid import parse_repeatable
from pictool.linker.policies import BASELINE, make_policy, policies
from pictool.linker.policies.base import Policy

if TYPE_CHECKING:
    from pictool.runtime.model import Model

DEFAULT_SPECS = ("full", "naive", "legolink-16", "cacheblend-15")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_FIELD = re.compile(r":(?=[a-z_]+=)")  # a prompt may contain a colon


@dataclass(frozen=True)
class Contender:
    """A policy or a method, and what tables call it."""

    label: str
    algo: Policy | Method

    @property
    def is_full(self) -> bool:
        return self == FULL

    def other_model(self, model: Model) -> str | None:
        """Fingerprint of the model that the user names in a policy's field, beside the one asked."""
        name = self.algo.second_model if isinstance(self.algo, Policy) else ""
        if not name:
            return None
        from pictool.runtime.model import load_model

        return load_model(name, model.device, model.dtype).fingerprint


FULL = Contender(BASELINE, make_policy(BASELINE))


def parse_contenders(specs: Sequence[str]) -> list[Contender]:
    """What specifications name (see `parse_repeatable`), `mapreduce` and `maprerank` too; `full` first, always.

    The order is that of tables, whatever the order of `specs`.

    Raises:
        InputError: no such algorithm or field, or a value that does not fit.
    """
    found = {FULL.label: FULL}
    for one in (one for spec in specs for one in _parse(spec)):
        known = found.setdefault(one.label, one)
        assert known == one, f"two algorithms are called {one.label}"
    return sorted(found.values(), key=_order)


def _parse(spec: str) -> list[Contender]:
    name = spec.partition(":")[0]
    if name in METHODS:
        return [_method(spec)]
    if name.rpartition("-")[0] not in policies() and name not in policies():
        raise InputError(f"algorithm {name!r}: must be one of {', '.join([*policies(), *METHODS])}, or as legolink-16")
    return [Contender(one.label, one.policy) for one in parse_repeatable([spec])]


def _method(spec: str) -> Contender:
    """NAME, or NAME:FIELD=VALUE:FIELD=VALUE."""
    name, *given = _FIELD.split(spec)
    if name not in METHODS:
        raise InputError(f"{spec}: must be {name.partition(':')[0]}, or {name.partition(':')[0]}:FIELD=VALUE")
    method = make(METHODS[name], name, dict(_pair(one) for one in given))
    default = {field.name: field.default for field in fields(method)}
    others = [f":{field}={value}" for field, value in method.params.items() if value != default[field]]
    return Contender(name + "".join(others), method)


def _pair(given: str) -> tuple[str, str]:
    name, _, value = given.partition("=")
    return name, value


def _order(one: Contender) -> tuple[Any, ...]:
    """Full, naive, the other policies, the methods; numbers in labels by their value."""
    kinds: Mapping[str, int] = {"full": 0, "naive": 1}
    kind = 3 if isinstance(one.algo, Method) else kinds.get(one.algo.name, 2)
    parts = _NUMBER.split(one.label)  # text, number, text, …
    return kind, [float(part) if i % 2 else part for i, part in enumerate(parts)]
