"""What this package needs of another one: that it is there, names, parameters; nothing is told from a version."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter

from pictool.errors import InputError

# Names ("module:name", "module:class.method"), each with the parameters that it is called with.
Needs = Mapping[str, Iterable[str]]


def missing(needs: Needs) -> list[str]:
    """What is not there, as `module.name`, or `module.name(parameter)`. Imports the modules."""
    return [lack for place, parameters in needs.items() if (lack := _lack(place, parameters))]


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Raise InputError, with the remedy, if a module that an extra brings is not installed; `what` needs it."""
    if lacking := [module for module in modules if find_spec(module) is None]:
        raise InputError(f"{what} needs {', '.join(lacking)}, which is not installed; pip install 'pictool[{extra}]'")


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
