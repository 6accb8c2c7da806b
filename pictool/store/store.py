"""The store: a directory of objects named by key, safe for many processes at once.

.pic/objects/ab/abcdef….kvo     an object, visible only when complete; its mtime is when it was last used
.pic/tmp/…                      being written; renamed into place after fsync
.pic/lock                       held while objects appear and disappear (space.py)
.pic/pins/KEY                   objects that are not evicted
.pic/stats/…, hits.sqlite3      counts of use, in all and of each object
.pic/index.sqlite3              a cache of what the headers say
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from pictool.errors import ObjectError, RemoteError, StoreError
from pictool.store import eviction as space
from pictool.store.entries import Entry, entries, is_key, keys_of, object_path, shards
from pictool.store.fetching import Arrivals, Arriving, Place
from pictool.store.files import atomic_write as atomic_write
from pictool.store.format import CompiledChunk, ObjectFile, write_object
from pictool.store.index import StoredObject as StoredObject
from pictool.store.index import described, listed, open_index
from pictool.store.memory import LayerMemory
from pictool.store.remote import Remote
from pictool.store.usage import Counters, Counts, hits_stamp, read_hits

_log = logging.getLogger(__name__)
DEFAULT_ROOT = ".pic"
_MIN_PREFIX = 4


class Store:
    """Objects by key in a directory (argument, `PIC_STORE`, or `.pic`). Creating one touches nothing on disk.

    With `max_bytes` every object that is put makes room for itself: those used least recently are evicted. What is not
    here is asked of the `remote`, and kept here. Links share `memory_bytes` of host memory for layers that they read.
    `on_warning` is told what a remote did not give.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, max_bytes: int | None = None, *,
        remote: str | Remote | None = None, memory_bytes: int = 0, on_warning: Callable[[str], None] = _log.warning,
    ) -> None:  # fmt: skip
        self.root = Path(root or os.environ.get("PIC_STORE") or DEFAULT_ROOT)
        self.max_bytes, self.on_warning = max_bytes, on_warning
        self.counters = Counters(self.root / "stats")
        self.memory = LayerMemory(memory_bytes) if memory_bytes else None
        self.remote = Remote(remote) if isinstance(remote, str) else remote
        place = Place(self.root, max_bytes, self._publish_new)
        self._arrivals = None if self.remote is None else Arrivals(self.remote, place, on_warning)

    def within(self, *names: str) -> Store:
        """A store of its own in a directory of this one, whose remote is there in this one's; without host memory."""
        remote = None if self.remote is None else self.remote.within(*names)
        return Store(self.root.joinpath(*names), remote=remote, on_warning=self.on_warning)

    def path(self, key: str) -> Path:
        return object_path(self.root, key)

    def has(self, key: str) -> bool:
        """Whether an object with an undamaged header and the right length is here; counted as a hit or a miss.

        What only the remote has is brought here first, as a whole.
        """
        try:
            if os.path.exists(self.path(key)) or not self.bring(key):
                found = self.look_here(key)
                self.mark_used(found)
                found.close()
        except (StoreError, ObjectError) as error:
            if isinstance(error, RemoteError):
                self.refuse(error)
            self.counters.add(Counts(misses=1))
            return False
        return True

    def open(self, key: str) -> ObjectFile:
        """Open an object by its whole key to use it: it is marked as just used, and counted as a hit; as a miss, if it
        comes from the remote.

        Raises:
            StoreError: not in the store, nor at the remote.
            ObjectError: there, but damaged, or the file is another object. RemoteError, if that is so at the remote.
        """
        found = self.look(key)
        self.mark_used(found)
        return found

    def mark_used(self, file: ObjectFile) -> None:
        """Count an open object of this store as a hit, and mark it as just used."""
        is_miss = isinstance(file, Arriving)
        counts = Counts(misses=1) if is_miss else Counts(hits=1, hit_bytes=file.num_bytes)
        self.counters.add(counts, None if is_miss else file.meta.key)
        file.touch()

    def look(self, key: str) -> ObjectFile:
        """Open an object by its whole key, here or at the remote, which leaves no trace. Raises as `open` does.

        What comes from the remote can be read at once, and is taken into the store when it was closed.
        """
        if self._arrivals is not None and not os.path.exists(self.path(key)):
            arriving = self._arrivals.open(key)
            if arriving is not None:
                return arriving
        return self.look_here(key)

    def look_here(self, key: str) -> ObjectFile:
        """Open an object by its whole key, without asking the remote. Raises as `open` does."""
        path = self.path(key)
        if not os.path.exists(path):
            where = f"{self.root}, nor at {self.remote}" if self.remote else str(self.root)
            raise StoreError(f"{key[:12]}: no such object in the store {where}; compile its text first")
        found = ObjectFile(path)
        try:
            _require_key(found, key, path)
        except ObjectError:
            found.close()
            raise
        return found

    def expect(self, keys: Iterable[str]) -> None:
        """Begin to bring those that only the remote has."""
        for key in keys:
            if self._arrivals is not None and not os.path.exists(self.path(key)):
                self._arrivals.expect(key)

    def bring(self, key: str) -> bool:
        """Bring an object from the remote as a whole; False if it has none. Raises as `open` does."""
        if self._arrivals is None:
            return False
        self._arrivals.bring(key)
        is_here = os.path.exists(self.path(key))
        self.counters.add(Counts(misses=int(is_here)))
        return is_here

    def refuse(self, error: RemoteError) -> None:
        """Go on without what the remote did not give; it is not asked for it again at once."""
        self.on_warning(f"{error}; going on without it, its text is compiled here")
        if self._arrivals is not None:
            self._arrivals.refuse(error.key)

    def settle(self) -> None:
        """Wait until all that comes from the remote is here. Objects that come from it must have been closed."""
        if self._arrivals is not None:
            self._arrivals.settle()

    def put(self, chunk: CompiledChunk, used_ns: int | None = None, durable: bool = True) -> Path:
        """Write an object atomically; an equal one that is there already is replaced by the same bytes.

        Args:
            used_ns: when it was last used, if not now.
            durable: whether it stays, once this returns, even if the power fails. If not, that may leave a damaged one.

        Raises:
            StoreError: it cannot be written, or the store may not hold so much; nothing was changed.
        """
        path = self.path(chunk.meta.key)
        with atomic_write(path, self.root / "tmp", self._publish, durable) as file:
            write_object(file, chunk)
            if used_ns is not None:
                file.flush()  # what is written later would change it
                os.utime(file.fileno(), ns=(used_ns, used_ns))
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
        self._publish_counted(temp, target, replace=True)

    def _publish_new(self, temp: Path, target: Path) -> None:
        """What is there already stays: it may have been compiled meanwhile, and have more in it."""
        self._publish_counted(temp, target, replace=False)

    def _publish_counted(self, temp: Path, target: Path, replace: bool) -> None:
        size = temp.stat().st_size
        evicted = space.publish(self.root, temp, target, self.max_bytes, replace)
        if evicted is None:
            return
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

    def find(self, name: str) -> str:
        """The whole key of an object that is here, for an abbreviation too; or is brought from the remote now.

        Raises:
            StoreError: none or several, or it cannot be brought.
        """
        try:
            is_brought = is_key(name) and not os.path.exists(self.path(name)) and self.bring(name)
        except RemoteError as error:  # nothing can stand in for it
            raise StoreError(str(error)) from error
        return name if is_brought else self.resolve(name)

    def resolve(self, prefix: str) -> str:
        """The whole key for an abbreviation of at least 4 hex digits, as in git; the remote is not asked."""
        if not re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", prefix):
            raise StoreError(f"{prefix!r}: neither a file nor a key (at least {_MIN_PREFIX} hex digits)")
        found = [key for key in keys_of(self.root, prefix[:2]) if key.startswith(prefix)]
        if len(found) != 1:
            what = "no object" if not found else f"{len(found)} objects"
            hint = f" ({self.remote} is asked for whole keys)" if self.remote else ""
            raise StoreError(f"{prefix}: {what} with this key in the store {self.root}{hint}; see pic store ls")
        return found[0]

    def objects(self, after: str = "", chains: bool = False) -> Iterator[StoredObject]:
        """Every object, sorted by key, from the first key behind `after` on, with what its header says.

        Blocks of prefix chains only if `chains`. Damaged ones are listed with their problem. Headers come from the
        index, which follows the files.
        """
        if not self.root.is_dir():
            return
        with open_index(self.root) as index:
            for shard in shards(self.root):
                if shard >= after[:2]:
                    yield from (
                        one
                        for one in listed(self.root, index, shard, self.look_here)
                        if one.key > after and (chains or not one.is_block)
                    )

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
        return None if entry is None else described(entry, self.look_here)


def _require_key(found: ObjectFile, key: str, path: Path) -> None:
    if found.meta.key != key:
        raise ObjectError(f"{path}: holds the object {found.meta.key[:12]}, not what its name says")
