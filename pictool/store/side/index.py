"""The index of a store: what the headers of its objects say, so that a listing opens no file twice.

It is a cache (an sqlite file) that holds nothing but what is in the objects' files. Every listing brings it up to date
with them, and it may be deleted at any time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.errors import PicError
from pictool.store.directory import may_write
from pictool.store.entries import Entry, entries_of
from pictool.store.files import make_file
from pictool.store.objects.format import ObjectFile
from pictool.store.objects.header import ObjectMeta, meta_of, metadata_of
from pictool.store.side.databases import clear_place, has_schema, is_empty

INDEX_FILE = "index.sqlite3"
TEXT_LENGTH = 200  # characters of the text, for people to recognise an object by
_VERSION = 1
_WAIT_S = 10.0
_SCHEMA = (
    "CREATE TABLE objects (key TEXT PRIMARY KEY, inode INT, bytes INT, used INT, meta TEXT, text TEXT) WITHOUT ROWID"
)

Peek = Callable[[str], ObjectFile]  # opens an object by its key, without a trace


@dataclass(frozen=True)
class StoredObject:
    """An object in a listing; if it cannot be read, `meta` is None and `problem` says why.

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


def list_shard(root: Path, index: Index, shard: str, peek: Peek) -> Iterator[StoredObject]:
    """The objects of one shard, sorted by key. Those that the index has not are read and added to it."""
    records, new, objects = index.records(shard), list[IndexRecord](), list[StoredObject]()
    for entry in entries_of(root, shard):
        record = records.pop(entry.key, None)
        if record is not None and record.is_of(entry):
            objects.append(_stored(entry, record.meta, record.text))
        elif described := describe(entry, peek):
            objects.append(described)
            if described.meta is not None:
                new.append(IndexRecord.of(entry, described.meta, described.text))
    if new or records:
        index.replace(records, new)
    yield from objects


def describe(entry: Entry, peek: Peek) -> StoredObject | None:
    """An object with what its header says, or its problem; None if another process removed it meanwhile."""
    try:
        with peek(entry.key) as file:
            return _stored(entry, file.meta, file.text()[:TEXT_LENGTH])
    except PicError as error:
        return _stored(entry, None, "", str(error)) if entry.path.exists() else None


def _stored(entry: Entry, meta: ObjectMeta | None, text: str, problem: str | None = None) -> StoredObject:
    return StoredObject(entry.key, entry.path, entry.num_bytes, meta, text, problem, entry.used_ns)


@dataclass(frozen=True)
class IndexRecord:
    """What the index has of one object, and of which file."""

    key: str
    inode: int
    num_bytes: int
    used_ns: int
    meta: ObjectMeta
    text: str

    @classmethod
    def of(cls, entry: Entry, meta: ObjectMeta, text: str) -> IndexRecord:
        return cls(entry.key, entry.inode, entry.num_bytes, entry.used_ns, meta, text)

    @classmethod
    def from_columns(cls, row: tuple[Any, ...]) -> IndexRecord:
        """The record of a row. Raises what its types and its JSON raise, if they are others."""
        key, inode, num_bytes, used_ns, meta, text = row
        if [type(value) for value in row] != [str, int, int, int, str, str]:
            raise TypeError("a column has another type")
        return cls(key, inode, num_bytes, used_ns, meta_of(json.loads(meta)), text)

    def is_of(self, entry: Entry) -> bool:
        return (self.inode, self.num_bytes, self.used_ns) == (entry.inode, entry.num_bytes, entry.used_ns)

    def columns(self) -> tuple[str, int, int, int, str, str]:
        meta = json.dumps(metadata_of(self.meta, {}))
        return self.key, self.inode, self.num_bytes, self.used_ns, meta, self.text[:TEXT_LENGTH]


class Index:
    """An open index; in memory if its file can be neither read nor created (a read-only store, or an unmarked one)."""

    def __init__(self, root: Path) -> None:
        self._path, self._may_write = root / INDEX_FILE, may_write(root)
        self._db = self._open() or _connect(":memory:")

    def close(self) -> None:
        self._db.close()

    def records(self, shard: str) -> dict[str, IndexRecord]:
        """The records of one shard's objects, by key."""
        query = "SELECT * FROM objects WHERE key >= ? AND key < ?"
        try:
            rows = self._db.execute(query, (shard, shard + "g")).fetchall()
            return {row[0]: IndexRecord.from_columns(row) for row in rows}
        except (sqlite3.Error, PicError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            self._start_again()
            return {}

    def replace(self, removed: Iterable[str], new: Iterable[IndexRecord]) -> None:
        """Remove and add records in one transaction. If that fails, the next listing does it."""
        with suppress(sqlite3.DatabaseError), self._db:
            self._db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in removed])
            self._db.executemany(
                "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", (record.columns() for record in new)
            )

    def _start_again(self) -> None:
        """Drop a damaged index; it is filled again from the objects' files."""
        self._db.close()
        with suppress(OSError):
            if self._may_write:
                self._path.unlink()
        self._db = self._open() or _connect(":memory:")

    def _open(self) -> sqlite3.Connection | None:
        """None if the file cannot be used; one that is damaged, of another version or no file is replaced."""
        if not self._may_write:
            return None
        with suppress(sqlite3.Error, OSError):
            clear_place(self._path)
            make_file(self._path)
            try:
                return _connect(str(self._path))
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._path.unlink(missing_ok=True)
                make_file(self._path)
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
            if is_empty(db):
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version != _VERSION or not has_schema(db, _SCHEMA):
                raise sqlite3.DatabaseError("an index of another version")
    except BaseException:
        db.close()
        raise
    return db
