"""Object lists: what `pic compile -o` writes when one text becomes several objects (a thin archive, as of `ar`).

list := a safetensors file without tensors, its metadata
        {"format": "pictool.list", "version": "1", "objects": JSON list of file names beside it}
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from pictool.errors import ObjectError
from pictool.store.store import atomic_write

FORMAT, VERSION = "pictool.list", "1"
_MAX_BYTES = 1 << 24


def write_object_list(path: Path, members: Sequence[str]) -> None:
    """Write a list that names its members, files in the same directory, in order."""
    metadata = {"format": FORMAT, "version": VERSION, "objects": json.dumps(list(members))}
    raw = json.dumps({"__metadata__": metadata}, sort_keys=True).encode()
    raw += b" " * (-len(raw) % 8)
    with atomic_write(path) as file:
        file.write(struct.pack("<Q", len(raw)) + raw)


def is_object_list(path: Path) -> bool:
    """Whether a file is a list (whole or damaged), told by its beginning."""
    try:
        with path.open("rb") as file:
            return f'"format": "{FORMAT}"'.encode() in file.read(256)
    except OSError as error:
        raise ObjectError(f"{path}: cannot be opened ({error.strerror})") from error


def read_object_list(path: Path) -> list[Path]:
    """The members' paths.

    Raises:
        ObjectError: a damaged list, or one that names something outside its directory.
    """
    try:
        data = path.read_bytes()[: _MAX_BYTES + 8]
        (length,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8:])["__metadata__"]
        members: list[str] = json.loads(metadata["objects"])
        is_whole = length == len(data) - 8 and metadata["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ObjectError(f"{path}: the object list is damaged; compile its text again") from error
    if not is_whole or any(Path(member).name != member for member in members):
        raise ObjectError(f"{path}: the object list is damaged; compile its text again")
    return [path.parent / member for member in members]
