"""How the KV of a layer is coded in an object: one codec a file. A file put here is found; nothing else names it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from pictool.errors import InputError
from pictool.store.codecs.base import Codec


@cache
def codecs() -> Mapping[str, Codec]:
    """Every codec by its name."""
    by_name: dict[str, Codec] = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Codec) and "name" in vars(value):
                by_name[value.name] = value()
    return dict(sorted(by_name.items()))


def require_codec(name: str) -> Codec:
    """The codec of this name.

    Raises:
        InputError: there is none.
    """
    if name not in codecs():
        raise InputError(f"codec {name!r}: must be one of {', '.join(codecs())}")
    return codecs()[name]
