"""What this package needs of another one: names and parameters, which are asked for, and never told from a version."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from operator import attrgetter

# Names ("module:name", "module:class.method"), each with the parameters that it is called with.
Needs = Mapping[str, Iterable[str]]


def missing(needs: Needs) -> list[str]:
    """What is not there, as `module.name`, or `module.name(parameter)`. Imports the modules."""
    return [lack for place, parameters in needs.items() if (lack := _lack(place, parameters))]


def _lack(place: str, parameters: Iterable[str]) -> str | None:
    module, _, path = place.partition(":")
    name = f"{module}.{path}"
    try:
        found = attrgetter(path)(import_module(module))
    except (ImportError, AttributeError):
        return name
    if not (needed := list(parameters)):
        return None
    taken = inspect.signature(found).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    lacks = [] if takes_any else [parameter for parameter in needed if parameter not in taken]
    return f"{name}({', '.join(lacks)})" if lacks else None
