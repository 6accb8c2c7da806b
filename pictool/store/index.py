"""The index of a store: what the headers of its objects say, so that a listing opens no file twice.

It is a cache (a table) that holds nothing but what is in the objects' files. Every listing brings it up to date with
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
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


def describe(entry: Entry, peek: Peek) -> StoredObject | None:
    """An object with what its header says, or its problem; None if another process removed it meanwhile."""
    try:
        with peek(entry.key) as file:
            return _stored(entry, file.meta, file.text()[:TEXT_LENGTH])
    except PicError as error:
        return _stored(entry, None, "", str(error)) if entry.path.exists() else None


def _stored(entry: Entry, meta: ObjectMeta | None, text: str, problem: str | None = None) -> StoredObject:
    return StoredObject(entry.key, entry.path, entry.num_bytes, meta, text, problem, entry.used_ns)


class Index:
    """The index for one listing. Where it can be neither read nor written, all objects are opened."""

    def __init__(self, root: Path, peek: Peek) -> None:
        self._root, self._peek = root, peek
        self._removed, self._new = list[tuple[str]](), list[tuple[str, int, int, int, str, str]]()

    def objects(self, shard: str) -> Iterator[StoredObject]:
        """The objects of one shard, sorted by key. Those that the index has not are read and added to it."""
        rows, found = self._rows(shard), list[StoredObject]()
        for entry in entries_of(self._root, shard):
            stored = _known(entry, rows.pop(entry.key, None))
            if stored is None and (stored := describe(entry, self._peek)) and stored.meta is not None:
                meta = json.dumps(metadata_of(stored.meta, {}))
                self._new.append((entry.key, entry.inode, entry.num_bytes, entry.used_ns, meta, stored.text))
            if stored is not None:
                found.append(stored)
        self._removed += [(key,) for key in rows]
        if len(self._removed) + len(self._new) >= _BATCH:
            self.flush()
        yield from found

    def _rows(self, shard: str) -> dict[str, tuple[Any, ...]]:
        query = "SELECT * FROM objects WHERE key >= ? AND key < ?"
        with suppress(StoreError), reading(self._root, _WAIT_S) as db:
            return {row[0]: row for row in db.execute(query, (shard, shard + "g"))}
        return {}

    def flush(self) -> None:
        """Write what changed. If that is not possible, the next listing does it."""
        if self._removed or self._new:
            with suppress(StoreError), writing(self._root, _WAIT_S) as db:
                db.executemany("DELETE FROM objects WHERE key = ?", self._removed)
                db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?, ?, ?)", self._new)
        self._removed, self._new = [], []


def _known(entry: Entry, row: tuple[Any, ...] | None) -> StoredObject | None:
    """An object as a row has it; None if there is none, or it is of another file or makes no sense."""
    if row is not None and row[1:4] == (entry.inode, entry.num_bytes, entry.used_ns) and isinstance(row[5], str):
        with suppress(PicError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return _stored(entry, meta_of(json.loads(row[4])), row[5])
    return None
