"""The index of a store: what the headers of its objects say, so that a listing opens no file twice.

It is a cache (a table) that holds nothing but what is in the objects' files. Every listing brings it up to date with
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.errors import PicError, StoreError
from pictool.store.database import reading, writing
from pictool.store.entries import Entry, entries_of
from pictool.store.objects.format import ObjectFile
from pictool.store.objects.header import ObjectMeta, meta_of, metadata_of

TEXT_LENGTH = 200  # characters of the text, for people to recognise an object by
_BATCH = 1000  # changes that are written together
_WAIT_S = 1.0

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
    def from_columns(cls, row: tuple[Any, ...]) -> IndexRecord | None:
        """The record of a row; None if it makes no sense."""
        key, inode, num_bytes, used_ns, meta, text = row
        with suppress(PicError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            if [type(value) for value in row] == [str, int, int, int, str, str]:
                return cls(key, inode, num_bytes, used_ns, meta_of(json.loads(meta)), text)
        return None

    def is_of(self, entry: Entry) -> bool:
        return (self.inode, self.num_bytes, self.used_ns) == (entry.inode, entry.num_bytes, entry.used_ns)

    def columns(self) -> tuple[str, int, int, int, str, str]:
        meta = json.dumps(metadata_of(self.meta, {}))
        return self.key, self.inode, self.num_bytes, self.used_ns, meta, self.text[:TEXT_LENGTH]


class Index:
    """The index for one listing. Where it can be neither read nor written, all objects are opened."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._removed, self._new = list[tuple[str]](), list[tuple[str, int, int, int, str, str]]()

    def records(self, shard: str) -> dict[str, IndexRecord | None]:
        """The records of one shard's objects, by key."""
        query = "SELECT * FROM objects WHERE key >= ? AND key < ?"
        with suppress(StoreError), reading(self._root, _WAIT_S) as db:
            return {row[0]: IndexRecord.from_columns(row) for row in db.execute(query, (shard, shard + "g"))}
        return {}

    def replace(self, removed: Iterable[str], new: Iterable[IndexRecord]) -> None:
        """Remove and add records. If they cannot be written, the next listing does it."""
        self._removed += [(key,) for key in removed]
        self._new += [record.columns() for record in new]
        if len(self._removed) + len(self._new) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        if self._removed or self._new:
            with suppress(StoreError), writing(self._root, _WAIT_S) as db:
                db.executemany("DELETE FROM objects WHERE key = ?", self._removed)
                db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", self._new)
        self._removed, self._new = [], []


@contextmanager
def open_index(root: Path) -> Iterator[Index]:
    index = Index(root)
    try:
        yield index
    finally:
        index.flush()
