"""How the KV of a layer is coded in an object, one codec a file. A file put here is found: nothing else names it.

Another package adds codecs by entry points of the group `pictool.codecs` that name subclasses of `Codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pictool.errors import InputError
from pictool.plugins import find_classes
from pictool.store.codecs.base import Codec


@cache
def codecs() -> Mapping[str, Codec]:
    """Every codec by its name."""
    classes = find_classes(__name__, __path__, "pictool.codecs", Codec)  # type: ignore[type-abstract]
    return {name: codec() for name, codec in classes.items()}


def require_codec(name: str) -> Codec:
    """The codec of this name.

    Raises:
        InputError: there is none.
    """
    if name not in codecs():
        raise InputError(f"codec {name!r}: must be one of {', '.join(codecs())}")
    return codecs()[name]
