"""Object lists: what `pic compile -o` writes when one text becomes several objects (a thin archive, as of `ar`).

list := a safetensors file without tensors, its metadata
        {"checksum": BLAKE3 of `objects`, "format": "pictool.list", "objects": JSON list, "version": "1"}
        where `objects` has for each member [name of a file beside the list, key of the object in it]

A list is accepted only as this module writes it, so that no bit of it is outside the checksum; and a member only with
the key that the list says, so that an object written over it later is not taken for it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from pictool.errors import ForeignObjectError, ObjectError
from pictool.store.format import ObjectFile
from pictool.store.store import atomic_write

FORMAT, VERSION = "pictool.list", "1"
_MAX_BYTES = 1 << 24
_AGAIN = "compile its text again"


def write_object_list(path: Path, members: Sequence[str]) -> None:
    """Write a list that names its members, object files in the same directory, in order."""
    data = _encode([(member, _key(path.parent / member)) for member in members])
    with atomic_write(path) as file:
        file.write(data)


def is_object_list(path: Path) -> bool:
    """Whether a file is a list (whole or damaged), told by its beginning."""
    return f'"format": "{FORMAT}"'.encode() in _read(path, 256)


def read_object_list(path: Path) -> list[Path]:
    """The members' paths.

    Raises:
        ObjectError: a damaged list, one that names something outside its directory, or a member that is another object.
    """
    members = _decode(path, _read(path, _MAX_BYTES))
    for name, key in members:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ObjectError(f"{path}: names {name!r}, which is not a file beside the list; {_AGAIN}")
        if (found := _key(path.parent / name)) != key:
            raise ObjectError(f"{path.parent / name}: holds the object {found[:12]}, but {path} {key[:12]}; {_AGAIN}")
    return [path.parent / name for name, _ in members]


def _key(member: Path) -> str:
    with ObjectFile(member) as file:
        return file.meta.key


def _read(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ObjectError(f"{path}: cannot be opened ({error.strerror})") from error


def _encode(members: Sequence[tuple[str, str]]) -> bytes:
    objects = json.dumps(members)
    checksum = blake3(objects.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": FORMAT, "objects": objects, "version": VERSION}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _decode(path: Path, data: bytes) -> list[tuple[str, str]]:
    try:
        metadata = json.loads(data[8:])["__metadata__"]
        version, members = metadata["version"], [(str(name), str(key)) for name, key in json.loads(metadata["objects"])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ObjectError(f"{path}: the object list is damaged; {_AGAIN}") from error
    if version != VERSION:
        raise ForeignObjectError(f"{path}: list version {version}, but this pic reads version {VERSION}; {_AGAIN}")
    if data != _encode(members):
        raise ObjectError(f"{path}: the object list is damaged; {_AGAIN}")
    return members
