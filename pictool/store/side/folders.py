"""Which objects a folder of documents was compiled to: a side database, by which `pic sync` knows what is gone.

It also has the objects that `pic compile` made of files, which stay when a folder no longer has their text: such a row
has no folder, and the file in place of a target.

It holds names of files, so it keeps nothing of a tenant's objects (salted ones).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import StoreError
from pictool.store.directory import may_write
from pictool.store.side.databases import Change, clear_place, has_schema, write

FOLDERS_FILE = "folders.sqlite3"
_SCHEMA = (
    "CREATE TABLE folders (folder TEXT, target TEXT, key TEXT, path TEXT NOT NULL, "
    "PRIMARY KEY (folder, target, key)) WITHOUT ROWID"
)
_ADD = "INSERT OR REPLACE INTO folders VALUES (?, ?, ?, ?)"
_SELECT = "SELECT folder, target, key, path FROM folders WHERE typeof(key) = 'text'"
_NO_FOLDER = ""
_WAIT_S = 10.0


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
    path = root / FOLDERS_FILE
    try:
        if not path.exists():
            return []
        clear_place(path, may_write(root))
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)) as db:
            if not has_schema(db, _SCHEMA):
                raise StoreError(f"{path}: is no database of folders; delete it, and run pic sync again")
            return [FolderObject(*map(str, row)) for row in db.execute(_SELECT)]
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{path}: cannot be read ({error}); delete it, and run pic sync again") from error


def set_folder(root: Path, folder: str, target: str, key_to_path: Mapping[str, str]) -> None:
    """Keep what a folder's objects are now. Raises StoreError: it cannot be written."""
    rows = [(folder, target, key, path) for key, path in key_to_path.items()]

    def change(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM folders WHERE folder = ? AND target = ?", (folder, target))
        db.executemany(_ADD, rows)

    _change(root, change)


def add_compiled(root: Path, key_to_file: Iterable[tuple[str, str]]) -> None:
    """Keep which objects `pic compile` made of which files. In a store that cannot be written nothing is kept."""
    rows = [(_NO_FOLDER, file, key, file) for key, file in key_to_file]
    if may_write(root):
        with suppress(StoreError, UnicodeEncodeError):
            _change(root, lambda db: db.executemany(_ADD, rows))


def forget_compiled(root: Path, keys: Callable[[], Collection[str]]) -> None:
    """Drop what `pic compile` made whose key is not among `keys`, which is called after the others were read."""
    with suppress(StoreError):  # `pic sync` says it
        known = {key for key, _ in read_compiled(root)}
        if known and (gone := [(_NO_FOLDER, key) for key in known - set(keys())]):
            _change(root, lambda db: db.executemany("DELETE FROM folders WHERE folder = ? AND key = ?", gone))


def _change(root: Path, change: Change) -> None:
    try:
        write(root / FOLDERS_FILE, _SCHEMA, change, _WAIT_S)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{root / FOLDERS_FILE}: cannot be written ({error}); free it, and sync again") from error
