"""One file per kind of document; those of other packages come by the entry point group `pictool.readers`."""

from __future__ import annotations

from functools import cache

from pictool.documents.base import Reader
from pictool.plugins import find_classes

GROUP = "pictool.readers"


@cache
def readers() -> tuple[Reader, ...]:
    """All readers, in the order in which they are asked. Raises PluginError."""
    found = find_classes(__name__, __path__, GROUP, Reader)  # type: ignore[type-abstract]
    return tuple(sorted((kind() for kind in found.values()), key=lambda reader: (reader.order, reader.name)))
