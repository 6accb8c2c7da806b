"""The policies, one file each. A file put here is found: nothing else has to name it."""

from __future__ import annotations

import importlib
import pkgutil
import typing
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from pictool.errors import InputError
from pictool.linker.policies.base import Policy


@cache
def policies() -> Mapping[str, type[Policy]]:
    """Every policy by its name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Policy) and value is not Policy:
                found[value.name] = value
    return dict(sorted(found.items()))


def make_policy(name: str, values: Mapping[str, Any]) -> Policy:
    """A policy from its name and fields; a text is converted to the field's type.

    Raises:
        InputError: no such policy, no such field, or a value that does not fit.
    """
    known = policies()
    if name not in known:
        raise InputError(f"algorithm {name!r}: must be one of {', '.join(known)}")
    cls = known[name]
    types = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    for field in values:
        if field not in names:
            has = f"its fields are {', '.join(names)}" if names else "it has no fields"
            raise InputError(f"{name} has no field {field!r}; {has}")
    return cls(**{field: _convert(name, field, types[field], value) for field, value in values.items()})


def _convert(policy: str, field: str, kind: type, value: Any) -> Any:
    try:
        if kind is int and not isinstance(value, bool) and (not isinstance(value, float) or value.is_integer()):
            return int(value)
        if kind is float and not isinstance(value, bool):
            return float(value)
        if kind is str and isinstance(value, str):
            return value
    except (TypeError, ValueError):
        pass  # refused below, with all other values that do not fit
    raise InputError(f"{policy}: {field}={value!r} must be of type {kind.__name__}")
