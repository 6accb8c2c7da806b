"""Algorithms that are compared: policies and other methods, under the labels of tables and results files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError
from pictool.eval.methods import METHODS, MeasuredAnswer, Method, ModelCall
from pictool.linker.fields import make
from pictool.linker.grid import parse_repeatable
from pictool.linker.policies import BASELINE, make_policy, policies
from pictool.linker.policies.base import PlotStyle, Policy

if TYPE_CHECKING:
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model

DEFAULT_ALGORITHMS = ("full", "naive", "legolink-16", "cacheblend-15")
_FIRST_LABELS = (BASELINE, "naive")  # in tables: the two ends between which the others are
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)")
_FIELD = re.compile(r":(?=[a-z_]+=)")  # a prompt may contain a colon


@dataclass(frozen=True)
class Algorithm:
    """A policy, or a method that calls the model several times; and what tables call it.

    Fields:
        policy: of all links. method: None if one link under the policy is the answer.
    """

    label: str
    policy: Policy
    method: Method | None = None

    @property
    def name(self) -> str:
        return (self.method or self.policy).name

    @property
    def params(self) -> dict[str, Any]:
        return (self.method or self.policy).params

    @property
    def is_full(self) -> bool:
        return self == FULL

    def answer(self, model: Model, call: ModelCall, spec: Spec) -> MeasuredAnswer:
        """Answer a spec whose documents are chunks. Its policy is replaced.

        Args:
            call: calls the model.
        """
        spec = replace(spec, policy=self.policy)
        return self.method.answer(model, call, spec) if self.method else MeasuredAnswer.from_answer(call(spec))

    def other_model(self, model: Model) -> str | None:
        """Fingerprint of the second model that the user names in the policy's field; None if none is named."""
        if not self.policy.second_model:
            return None
        from pictool.runtime.model import load_model

        return load_model(self.policy.second_model, model.device, model.dtype).fingerprint


FULL = Algorithm(BASELINE, make_policy(BASELINE))


def parse_algorithms(names: Sequence[str]) -> list[Algorithm]:
    """The algorithms of names as users write them (see `parse_repeatable`), methods among them; `full` first, always.

    The order is that of tables, whatever the order of `names`.

    Raises:
        InputError: no such algorithm or field, or a value that does not fit.
    """
    by_label = {FULL.label: FULL}
    for algorithm in (algorithm for name in names for algorithm in _parse(name)):
        known = by_label.setdefault(algorithm.label, algorithm)
        assert known == algorithm, f"two algorithms are called {algorithm.label}"
    return sorted(by_label.values(), key=_table_order)


def plot_style(name: str) -> PlotStyle:
    """How pictures draw the algorithm of this name; one that is not installed here has the default style."""
    if name in METHODS:
        return METHODS[name].plot
    return policies()[name].plot if name in policies() else PlotStyle()


def _parse(text: str) -> list[Algorithm]:
    name = text.partition(":")[0]
    if name in METHODS:
        return [_parse_method(text)]
    if name.rpartition("-")[0] not in policies() and name not in policies():
        raise InputError(f"algorithm {name!r}: must be one of {', '.join([*policies(), *METHODS])}, or as legolink-16")
    return [Algorithm(labelled.label, labelled.policy) for labelled in parse_repeatable([text])]


def _parse_method(text: str) -> Algorithm:
    """NAME, or NAME:FIELD=VALUE:FIELD=VALUE."""
    name, *pairs = _FIELD.split(text)
    if name not in METHODS:
        raise InputError(f"{text}: must be {name.partition(':')[0]}, or {name.partition(':')[0]}:FIELD=VALUE")
    method = make(METHODS[name], name, {field: value for field, _, value in (pair.partition("=") for pair in pairs)})
    default = {field.name: field.default for field in fields(method)}
    others = [f":{field}={value}" for field, value in method.params.items() if value != default[field]]
    return Algorithm(name + "".join(others), FULL.policy, method)


def _table_order(algorithm: Algorithm) -> tuple[Any, ...]:
    """Full, naive, the other policies, the methods; numbers in labels by their value."""
    first = _FIRST_LABELS.index(algorithm.label) if algorithm.label in _FIRST_LABELS else len(_FIRST_LABELS)
    parts = _NUMBER.split(algorithm.label)  # text, number, text, …
    return algorithm.method is not None, first, [float(part) if i % 2 else part for i, part in enumerate(parts)]
