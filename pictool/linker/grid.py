"""Policies as users and papers write them: `legolink-16`, `cacheblend-15`, or a grid `legolink:k=2,16`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pictool.compiler.contexts import PREVIOUS
from pictool.errors import InputError
from pictool.linker.policies import make_policy, policies, unknown_policy
from pictool.linker.policies.base import Policy

_NUMBERS = re.compile(r"\d+(\+\d+)+")


@dataclass(frozen=True)
class LabelledPolicy:
    """A policy, and what tables call it: its name, its main field, then every field that is not the default.

    `after` is what the documents that it links are compiled after (`compiler/contexts.py`).
    """

    label: str
    policy: Policy
    after: str = PREVIOUS


def parse_grid(specs: Sequence[str]) -> list[LabelledPolicy]:
    """The policies that specifications name, in their order, each once.

    A specification is a policy's name; NAME-NUMBER, where the number is the policy's knob (a share in per cent); or
    NAME:FIELD=VALUE[,VALUE…][:FIELD=…], which is every combination. A list of numbers as one value is 1+2+8.

    Raises:
        InputError: no such policy or field, or a value that does not fit.
    """
    labelled = {label_of(policy): policy for spec in specs for policy in _expand(spec)}
    return [LabelledPolicy(label, policy) for label, policy in labelled.items()]


def parse_policy(spec: str) -> Policy:
    """The one policy that a specification names.

    Raises:
        InputError: as `parse_grid`; or a grid of several, which is not expanded.
    """
    name, values = _parse(spec)
    for field, items in values.items():
        if len(items) != 1:
            raise InputError(
                f"{spec}: {field} has {len(items)} values, but one policy is expected (write a list as 1+2+8)"
            )
    return make_policy(name, {field: items[0] for field, items in values.items()})


def named_policy(name: str, values: Mapping[str, Any] | None = None) -> Policy:
    """The policy for a name or a specification (`legolink-16`); `values` override its fields.

    Raises:
        InputError: as `parse_policy`; no such field, or a value that does not fit.
    """
    if name in policies():
        return make_policy(name, values)
    policy = parse_policy(name)
    return make_policy(policy.name, {**policy.params, **values}) if values else policy


def parse_repeatable(specs: Sequence[str]) -> list[LabelledPolicy]:
    """As `parse_grid`, for measurements that must not depend on earlier requests.

    Raises:
        InputError: a policy whose work depends on them; it is exact, so that only its time could be compared.
    """
    grid = parse_grid(specs)
    for labelled in grid:
        if labelled.policy.needs.chain_block:
            raise InputError(
                f"{labelled.label}: what it reuses depends on earlier requests; see it with pic link --json"
            )
    return grid


def label_of(policy: Policy) -> str:
    """The name under which `parse_grid` finds an equal policy again."""
    default = {field.name: field.default for field in fields(policy)}
    shown = {name: value for name, value in policy.params.items() if value != default[name]}
    label, knob = policy.name, policy.knob
    if knob is not None:
        label += f"-{knob.text(policy.params[knob.field])}"
        shown.pop(knob.field, None)
    return label + "".join(f":{name}={_text(value)}" for name, value in shown.items())


def _expand(spec: str) -> Iterable[Policy]:
    """Every combination of a specification's values."""
    name, values = _parse(spec)
    for chosen in itertools.product(*values.values()):
        yield make_policy(name, dict(zip(values, chosen, strict=True)))


def _parse(spec: str) -> tuple[str, Mapping[str, list[Any]]]:
    """The name of a specification's policy, and the values of its fields."""
    name, *fields = spec.split(":")
    values = dict(_values(spec, field) for field in fields)
    if name not in policies() and "-" in name:
        stem, _, number = name.rpartition("-")
        values = {**_knob_value(spec, stem, number), **values}
        name = stem
    if name not in policies():
        raise unknown_policy(spec)
    return name, values


def _values(spec: str, text: str) -> tuple[str, list[str]]:
    field, equals, value = text.partition("=")
    if not equals or not field or not value:
        raise InputError(f"{spec}: {text!r} must be FIELD=VALUE or FIELD=VALUE,VALUE")
    return field, [item.replace("+", ",") if _NUMBERS.fullmatch(item) else item for item in value.split(",")]


def _knob_value(spec: str, name: str, number: str) -> Mapping[str, list[Any]]:
    """What the number in NAME-NUMBER is."""
    knob = policies()[name].knob if name in policies() else None
    if knob is None:
        raise unknown_policy(spec)
    try:
        return {knob.field: [knob.parse(number)]}
    except ValueError as error:
        raise InputError(f"{spec}: {number!r} must be a number, as in {name}-16") from error


def _text(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value).replace(",", "+")
