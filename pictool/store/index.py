"""The index: what the headers of objects say, so that a listing opens no file twice. A cache of the files: it holds
nothing that they do not, follows them at every listing, and may be deleted at any time.

Listing a store: what each object's header says, from the index where that knows the file.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import PicError
from pictool.store.entries import Entry, entries_of
from pictool.store.format import ObjectFile, ObjectMeta, meta_of, metadata_of

FILE = "index.sqlite3"
TEXT_LENGTH = 200  # of the text, for people to know an object by
_VERSION = 1
_WAIT_S = 10.0
_SCHEMA = (
    "CREATE TABLE objects (key TEXT PRIMARY KEY, inode INT, bytes INT, used INT, meta TEXT, text TEXT) WITHOUT ROWID"
)


@dataclass(frozen=True)
class Described:
    """What the index has of one object, and of which file."""

    key: str
    inode: int
    num_bytes: int
    used_ns: int
    meta: ObjectMeta
    text: str

    def is_of(self, entry: Entry) -> bool:
        return (self.inode, self.num_bytes, self.used_ns) == (entry.inode, entry.num_bytes, entry.used_ns)


class Index:
    """An open index; in memory if its file can be neither read nor made (a read-only store)."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._db = self._open() or _connect(":memory:")

    def close(self) -> None:
        self._db.close()

    def rows(self, shard: str) -> dict[str, Described]:
        """What it has of one shard's objects, by key."""
        query = "SELECT * FROM objects WHERE key >= ? AND key < ?"
        try:
            found = self._db.execute(query, (shard, shard + "g")).fetchall()
            return {key: Described(key, a, b, c, _meta(meta), text) for key, a, b, c, meta, text in found}
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError):
            self._start_again()
            return {}

    def _start_again(self) -> None:
        """What is damaged is dropped, and filled again from the files."""
        self._db.close()
        with suppress(OSError):
            self._path.unlink()
        self._db = self._open() or _connect(":memory:")

    def replace(self, gone: Iterable[str], new: Iterable[Described]) -> None:
        """Forget and learn, in one transaction. What cannot be written is learnt again the next time."""
        with suppress(sqlite3.DatabaseError), self._db:
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in gone])
            self._db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", map(_row, new))

    def _open(self) -> sqlite3.Connection | None:
        """None if it cannot be had; one that is damaged or of another version is made anew."""
        with suppress(sqlite3.OperationalError):
            try:
                return _connect(str(self._path))
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._path.unlink(missing_ok=True)
                return _connect(str(self._path))
        return None


@contextmanager
def open_index(root: Path) -> Iterator[Index]:
    index = Index(root)
    try:
        yield index
    finally:
        index.close()


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_WAIT_S)
    try:
        db.execute("PRAGMA synchronous = OFF")  # a power failure costs a cache
        with db:
            db.execute("BEGIN IMMEDIATE")
            if db.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                db.execute("DROP TABLE IF EXISTS objects")
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException:
        db.close()
        raise
    return db


def _row(one: Described) -> tuple[str, int, int, int, str, str]:
    meta = json.dumps(metadata_of(one.meta, {}))
    return one.key, one.inode, one.num_bytes, one.used_ns, meta, one.text[:TEXT_LENGTH]


def _meta(text: str) -> ObjectMeta:
    return meta_of(json.loads(text))


Look = Callable[[str], ObjectFile]  # opens an object by its key, and leaves no trace


@dataclass(frozen=True)
class StoredObject:
    """One line of a listing; `meta` is None, and `problem` says why, if the object cannot be read.

    `text` is the beginning of its text, `used_ns` the time of its last use (since 1970).
    """

    key: str
    path: Path
    num_bytes: int
    meta: ObjectMeta | None
    text: str
    problem: str | None
    used_ns: int

    @property
    def is_block(self) -> bool:
        """Whether it is a block of a prefix chain."""
        return self.meta is not None and self.meta.parent is not None


def listed(root: Path, index: Index, shard: str, look: Look) -> Iterator[StoredObject]:
    """The objects of one shard, sorted by key; the index learns what it did not know."""
    known, new, found = index.rows(shard), list[Described](), list[StoredObject]()
    for entry in entries_of(root, shard):
        row = known.pop(entry.key, None)
        if row is not None and row.is_of(entry):
            found.append(_stored(entry, row.meta, row.text))
        elif one := described(entry, look):
            found.append(one)
            if one.meta is not None:
                new.append(Described(entry.key, entry.inode, entry.num_bytes, entry.used_ns, one.meta, one.text))
    if new or known:
        index.replace(known, new)
    yield from found


def described(entry: Entry, look: Look) -> StoredObject | None:
    """An object with what its header says, or its problem; None if another process removed it meanwhile."""
    try:
        with look(entry.key) as found:
            return _stored(entry, found.meta, found.text()[:TEXT_LENGTH])
    except PicError as error:
        return _stored(entry, None, "", str(error)) if entry.path.exists() else None


def _stored(entry: Entry, meta: ObjectMeta | None, text: str, problem: str | None = None) -> StoredObject:
    return StoredObject(entry.key, entry.path, entry.num_bytes, meta, text, problem, entry.used_ns)
