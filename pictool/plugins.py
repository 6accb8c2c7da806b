"""Finding classes by their files in a package, and by the entry points of other packages."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from pictool.errors import PicError

T = TypeVar("T")


class PluginError(PicError):
    """An entry point of another package that cannot be used."""


def find_classes(package: str, path: Iterable[str], group: str, base: type[T]) -> dict[str, type[T]]:
    """The named subclasses of `base` in a package's modules, then those of an entry point group; sorted by `name`.

    Raises:
        PluginError: an entry point that cannot be loaded, is no such class, or has the name of another one.
    """
    found: dict[str, type[T]] = {}
    for module in pkgutil.iter_modules(path):
        for value in vars(importlib.import_module(f"{package}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, base) and "name" in vars(value):
                found[value.name] = value  # type: ignore[attr-defined]
    for entry in entry_points(group=group):
        loaded = load_class(entry, group, base)
        name: str = loaded.name  # type: ignore[attr-defined]
        if found.setdefault(name, loaded) is not loaded:
            raise PluginError(f"entry point {entry.name} of {group}: {name!r} is already taken; rename it")
    return dict(sorted(found.items()))


def load_class(entry: EntryPoint, group: str, base: type[T]) -> type[T]:
    """The class that an entry point names: a subclass of `base` with a name.

    Raises:
        PluginError: it cannot be loaded, or is no such class.
    """
    try:
        loaded = entry.load()
    except Exception as error:  # whatever another package does when it is imported
        raise PluginError(
            f"entry point {entry.name} of {group}: cannot be loaded ({error}); see its package"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, base) and hasattr(loaded, "name")):
        raise PluginError(f"entry point {entry.name} of {group}: is not a {base.__name__} with a name; see its package")
    return loaded
