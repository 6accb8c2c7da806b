"""Which objects a folder of documents was compiled to: a table by which `pic sync` knows what is gone.

It also has the objects that `pic compile` made of files, which stay when a folder no longer has their text: such a row
has no folder, and the file in place of a target.

It holds names of files, so it keeps nothing of a tenant's objects (salted ones).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import StoreError
from pictool.escapes import encodable
from pictool.store.database import reading, writing
from pictool.store.directory import ensure_store

_ADD = "INSERT OR REPLACE INTO folders VALUES (?, ?, ?, ?)"
_SELECT = "SELECT folder, target, key, path FROM folders WHERE typeof(key) = 'text'"
_NO_FOLDER = ""


@dataclass(frozen=True)
class FolderObject:
    """An object of a folder. `target` names the model and how it was compiled; `path` is the file.

    From 0.4 on it is below the folder; earlier versions kept it as it was named, perhaps from another directory.
    """

    folder: str
    target: str
    key: str
    path: str


def read_folders(root: Path) -> list[FolderObject]:
    """The objects of all folders, also of those that were removed since. Raises StoreError: it cannot be read."""
    return [row for row in _read(root) if row.folder != _NO_FOLDER]


def read_compiled(root: Path) -> list[tuple[str, str]]:
    """(key, file) of what `pic compile` made of files. Raises StoreError: the database cannot be read."""
    return [(row.key, row.path) for row in _read(root) if row.folder == _NO_FOLDER]


def _read(root: Path) -> list[FolderObject]:
    with reading(root) as db:
        return [FolderObject(*map(_name, row)) for row in db.execute(_SELECT)]


def _stored(name: str) -> str | bytes:
    """A name as SQLite takes it: the bytes of one that is not UTF-8."""
    return name if encodable(name) == name else os.fsencode(name)


def _name(value: object) -> str:
    return os.fsdecode(value) if isinstance(value, bytes) else str(value)


def set_folder(root: Path, folder: str, target: str, key_to_path: Mapping[str, str]) -> None:
    """Keep what a folder's objects are now. Raises StoreError: it cannot be written."""
    ensure_store(root)
    rows = [(_stored(folder), target, key, _stored(path)) for key, path in key_to_path.items()]
    with writing(root) as db:
        db.execute("DELETE FROM folders WHERE folder = ? AND target = ?", (_stored(folder), target))
        db.executemany(_ADD, rows)


def add_compiled(root: Path, key_to_file: Iterable[tuple[str, str]]) -> None:
    """Keep which objects `pic compile` made of which files. In a store that cannot be written nothing is kept."""
    rows = [(_NO_FOLDER, _stored(file), key, _stored(file)) for key, file in key_to_file]
    with suppress(StoreError), writing(root) as db:
        db.executemany(_ADD, rows)
