"""Listing a store: what each object's header says, from the index where that knows the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import PicError
from pictool.store.entries import Entry, entries_of
from pictool.store.format import ObjectFile
from pictool.store.header import ObjectMeta
from pictool.store.index import TEXT_LENGTH, Described, Index

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
