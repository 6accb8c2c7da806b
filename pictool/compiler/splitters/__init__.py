"""Splitters: how a text is cut into chunks. One file each; those of other packages come by `pictool.splitters`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from pictool.compiler.chunking import last_tokens, make_chunk
from pictool.compiler.splitters.base import Splitter
from pictool.core import Chunk
from pictool.errors import InputError
from pictool.plugins import find_classes

if TYPE_CHECKING:
    from pictool.runtime.model import Model


_GAP = 1000  # characters between two pieces, at most, if the second is to be found


def splitters() -> dict[str, type[Splitter]]:
    """Every splitter by its name. Raises PluginError."""
    return find_classes(__name__, __path__, "pictool.splitters", Splitter)  # type: ignore[type-abstract]


def make_splitter(spec: str) -> Splitter:
    """A splitter from NAME or NAME:FIELD=VALUE,…; all fields are whole numbers.

    Raises:
        InputError: no such splitter or field, or a value that is none for it; the list of names.
    """
    name, _, rest = spec.partition(":")
    kinds = splitters()
    if name not in kinds:
        raise InputError(f"splitter {name!r}: must be one of {', '.join(kinds)}")
    known, values = {field.name for field in fields(kinds[name])}, dict[str, int]()  # type: ignore[arg-type]
    for part in filter(None, rest.split(",")):
        field, _, value = part.partition("=")
        if field not in known or not value.isascii() or not value.isdigit():
            raise InputError(
                f"splitter {name}: {part!r} must be {' or '.join(sorted(known))}, then = and a whole number"
            )
        values[field] = int(value)
    return kinds[name](**values)


def split(model: Model, text: str, source: str, splitter: Splitter) -> list[Chunk]:
    """The chunks of a text, which need not join to it: some splitters strip or repeat what is between.

    A chunk `continues` only if it begins where the one before it ends.

    Raises:
        InputError: a chunk without tokens or too long for the model, or a package that is not installed.
    """
    pieces = [piece for piece in splitter.pieces(model, text) if piece.strip()]
    names = [f"{source}[{index}]" for index in range(len(pieces))] if len(pieces) > 1 else [source]
    chunks, end = list[Chunk](), 0  # where the last piece ends in the text
    for piece, name in zip(pieces, names, strict=True):
        is_next = text.startswith(piece, end)
        start = end if is_next else text.find(piece, max(0, end - len(piece)), end + len(piece) + _GAP)
        chunks.append(make_chunk(model, piece, name, is_next and bool(chunks), last_tokens(chunks)))
        end = end if start < 0 else start + len(piece)
    return chunks
