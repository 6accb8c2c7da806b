"""The store: a directory of objects named by key, safe for many processes at once.

.pic/objects/ab/abcdef….kvo     an object, visible only when complete; its mtime is when it was last used
.pic/tmp/…                      being written; renamed into place after fsync
.pic/lock                       held while objects appear and disappear (space.py)
.pic/pins/KEY                   objects that are not evicted
.pic/stats/…, hits.sqlite3      counts of use, in all and of each object
.pic/index.sqlite3              a cache of what the headers say
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pictool.errors import ObjectError, PicError, StoreError
from pictool.store import space
from pictool.store.counters import Counters, Counts
from pictool.store.entries import Entry, entries, entries_of, keys_of, object_path, shards
from pictool.store.files import atomic_write as atomic_write
from pictool.store.format import CompiledChunk, ObjectFile, ObjectMeta, write_object
from pictool.store.hits import hits_stamp, read_hits
from pictool.store.index import TEXT_LENGTH, Described, Index, open_index

DEFAULT_ROOT = ".pic"
_MIN_PREFIX = 4


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


class Store:
    """Objects by key in a directory (argument, `PIC_STORE`, or `.pic`). Creating one touches nothing on disk.

    With `max_bytes` every object that is put makes room for itself: those used least recently are evicted.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> None:
        self.root = Path(root or os.environ.get("PIC_STORE") or DEFAULT_ROOT)
        self.max_bytes = max_bytes
        self.counters = Counters(self.root / "stats")

    def path(self, key: str) -> Path:
        return object_path(self.root, key)

    def has(self, key: str) -> bool:
        """Whether an object with an undamaged header and the right length is there; counted as a hit or a miss."""
        try:
            self.open(key).close()
        except PicError:
            self.counters.add(Counts(misses=1))
            return False
        return True

    def open(self, key: str) -> ObjectFile:
        """Open an object by its whole key to use it: it is marked as just used, and counted as a hit.

        Raises:
            StoreError: not in the store.
            ObjectError: there, but damaged, or the file is another object.
        """
        found = self.look(key)
        self.mark_used(found)
        return found

    def mark_used(self, file: ObjectFile) -> None:
        """Count an open object of this store as a hit, and mark it as just used."""
        self.counters.add(Counts(hits=1, hit_bytes=file.num_bytes), hit=file.meta.key)
        file.touch()

    def look(self, key: str) -> ObjectFile:
        """Open an object by its whole key, which leaves no trace. Raises as `open` does."""
        path = self.path(key)
        if not os.path.exists(path):
            raise StoreError(f"{key[:12]}: no such object in the store {self.root}; compile its text first")
        found = ObjectFile(path)
        try:
            _require_key(found, key, path)
        except ObjectError:
            found.close()
            raise
        return found

    def put(self, chunk: CompiledChunk) -> Path:
        """Write an object atomically; an equal one that is there already is replaced by the same bytes.

        Raises:
            StoreError: it cannot be written, or the store may not hold so much; nothing was changed.
        """
        path = self.path(chunk.meta.key)
        with atomic_write(path, self.root / "tmp", self._publish) as file:
            write_object(file, chunk)
        return path

    def adopt(self, key: str, source: IO[bytes]) -> Path:
        """Take an object's file from elsewhere, byte by byte, once every checksum of it holds.

        Raises:
            ObjectError: damaged, or another object than `key`.
            StoreError: it cannot be written, or the store may not hold so much; nothing was changed.
        """
        path = self.path(key)
        with atomic_write(path, self.root / "tmp", self._publish) as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            with ObjectFile(file.name) as found:
                found.verify()
                _require_key(found, key, path)
        return path

    def _publish(self, temp: Path, target: Path) -> None:
        size = temp.stat().st_size
        evicted = space.publish(self.root, temp, target, self.max_bytes)
        self.counters.add(
            Counts(writes=1, written_bytes=size, evictions=evicted.count, evicted_bytes=evicted.num_bytes)
        )

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return [key for shard in shards(self.root) for key in keys_of(self.root, shard)]

    def files(self) -> dict[str, Entry]:
        """What every object's file is now, by key."""
        return {entry.key: entry for entry in entries(self.root)}

    def hits(self) -> dict[str, int] | None:
        """How often each object was opened to be used, by key; None if that cannot be read."""
        return read_hits(self.root)

    def use_stamp(self) -> int:
        """Changes once the hits of any process were written down."""
        return hits_stamp(self.root)

    def resolve(self, prefix: str) -> str:
        """The whole key for an abbreviation of at least 4 hex digits, as in git."""
        if not re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", prefix):
            raise StoreError(f"{prefix!r}: neither a file nor a key (at least {_MIN_PREFIX} hex digits)")
        found = [key for key in keys_of(self.root, prefix[:2]) if key.startswith(prefix)]
        if len(found) != 1:
            what = "no object" if not found else f"{len(found)} objects"
            raise StoreError(f"{prefix}: {what} with this key in the store {self.root}; see pic store ls")
        return found[0]

    def objects(self, after: str = "") -> Iterator[StoredObject]:
        """Every object, sorted by key, from the first key behind `after` on, with what its header says.

        Damaged ones are listed with their problem. Headers come from the index, which follows the files.
        """
        if not self.root.is_dir():
            return
        with open_index(self.root) as index:
            for shard in shards(self.root):
                if shard >= after[:2]:
                    yield from (one for one in self._listed(index, shard) if one.key > after)

    def _listed(self, index: Index, shard: str) -> Iterator[StoredObject]:
        known, new, found = index.rows(shard), list[Described](), list[StoredObject]()
        for entry in entries_of(self.root, shard):
            row = known.pop(entry.key, None)
            if row is not None and row.is_of(entry):
                found.append(
                    StoredObject(entry.key, entry.path, entry.num_bytes, row.meta, row.text, None, entry.used_ns)
                )
            elif described := self._describe(entry):
                found.append(described)
                if described.meta is not None:
                    file = (entry.key, entry.inode, entry.num_bytes, entry.used_ns)
                    new.append(Described(*file, described.meta, described.text))
        if new or known:
            index.replace(known, new)
        yield from found

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever an object has come or gone: when its directories were changed, in nanoseconds."""
        found = []
        for path in (self.root / "objects", *(self.root / "objects" / shard for shard in shards(self.root))):
            with suppress(OSError):
                found.append(path.stat().st_mtime_ns)
        return tuple(sorted(found))

    def describe(self, key: str) -> StoredObject | None:
        """An object with what its header says, or its problem; None if another process removed it meanwhile."""
        entry = Entry.of(self.path(key))
        return None if entry is None else self._describe(entry)

    def _describe(self, entry: Entry) -> StoredObject | None:
        """None if another process removed it meanwhile."""
        try:
            with self.look(entry.key) as found:
                return _stored(entry, found.meta, found.text()[:TEXT_LENGTH])
        except PicError as error:
            return _stored(entry, None, "", str(error)) if entry.path.exists() else None


def _require_key(found: ObjectFile, key: str, path: Path) -> None:
    if found.meta.key != key:
        raise ObjectError(f"{path}: holds the object {found.meta.key[:12]}, not what its name says")


def _stored(entry: Entry, meta: ObjectMeta | None, text: str, problem: str | None = None) -> StoredObject:
    return StoredObject(entry.key, entry.path, entry.num_bytes, meta, text, problem, entry.used_ns)
