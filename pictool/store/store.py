"""The store: a directory of objects named by key, safe for many processes at once.

.pic/pictool-store              marks the directory as a store (directory.py)
.pic/objects/ab/abcdef….kvo     an object, visible only when complete; its mtime is when it was last used
.pic/objects/ab/abcdef….kvo.sig its signatures, if it has some (signatures.py)
.pic/tmp/…                      being written; renamed into place after fsync
.pic/lock                       held while objects appear and disappear (eviction.py)
.pic/pins/KEY                   objects that are not evicted
.pic/learned/KEY                objects that a server compiled unasked, which have a bound of their own (eviction.py)
.pic/store.sqlite3              index, hits, sources, folders, readings, leases (database.py)
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from pictool.errors import ObjectError, RemoteError, StoreError, UnreadableObjectError
from pictool.reading import with_home
from pictool.store import eviction
from pictool.store.database import DATABASE
from pictool.store.directory import ensure_store
from pictool.store.entries import DEFAULT_ROOT, SUFFIX, Entry, entries, is_key, keys_of, object_path, shards
from pictool.store.files import atomic_write as atomic_write
from pictool.store.index import Index, describe
from pictool.store.index import StoredObject as StoredObject
from pictool.store.memory import LayerMemory
from pictool.store.objects.format import CompiledChunk, ObjectFile, write_object
from pictool.store.opened import opened
from pictool.store.remote.fetching import Destination, Fetcher, PartialObjectFile
from pictool.store.remote.remote import Remote
from pictool.store.signatures import Signed, Trust, lines_of, read_sidecar, write_sidecar
from pictool.store.usage import Counters, UsageCounts, read_hits

_log = logging.getLogger(__name__)
_MIN_PREFIX = 4


class Store:
    """Objects by key in a directory (argument, `PIC_STORE`, or `.pic`). Creating one touches nothing on disk.

    With `max_bytes` every put makes room for its object by evicting the least recently used ones. A missing object
    is fetched from the `remote`, and stored here. Links share `memory_bytes` of host memory for layers that they
    read. `on_warning` is called with a message when the remote fails.

    Where `trust` has signers, an object that none of them signed is absent, unless this process computed it; where it
    has a key, that signs what is put here.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, max_bytes: int | None = None, *,
        remote: str | Remote | None = None, memory_bytes: int = 0, on_warning: Callable[[str], None] = _log.warning,
        trust: Trust | None = None,
    ) -> None:  # fmt: skip
        self.root = self._outer = with_home(root or os.environ.get("PIC_STORE") or DEFAULT_ROOT)
        self.max_bytes, self.on_warning = max_bytes, on_warning
        self.counters = Counters(self.root)
        self.memory = LayerMemory(memory_bytes) if memory_bytes else None
        self.remote = Remote(remote) if isinstance(remote, str) else remote
        self._is_in_use = False
        self.trust, self._own = trust, dict[str, str]()  # digests of what this process computed, by key
        admits = self.admits if self.requires_signed else None
        publish = partial(self._publish, replace=False)  # what is there was compiled meanwhile
        destination = Destination(self.root, max_bytes, publish, self.ensure_store, admits)
        self._fetcher = None if self.remote is None else Fetcher(self.remote, destination, on_warning)

    def within(self, *names: str, max_bytes: int | None = None) -> Store:
        """A store in a directory of this one, with its remote in that directory of this one's; without host memory."""
        remote = None if self.remote is None else self.remote.within(*names)
        store = Store(
            self.root.joinpath(*names), max_bytes, remote=remote, on_warning=self.on_warning, trust=self.trust
        )
        store._outer, store._own = self._outer, self._own
        return store

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r}{f', remote={str(self.remote)!r}' if self.remote else ''})"

    def path(self, key: str) -> Path:
        return object_path(self.root, key)

    def ensure_store(self) -> None:
        """Ensure that the directory is a store, before anything in it is changed; see `directory.ensure_store`."""
        ensure_store(self.root, self._outer, self.on_warning)

    # Opening objects

    def has(self, key: str) -> bool:
        """Whether an object with an undamaged header and the right length is here; counted as a hit or a miss.

        An object that only the remote has is fetched first, as a whole.
        """
        try:
            if os.path.exists(self.path(key)) or not self.fetch(key):
                file = self.peek_local(key)
                self.mark_used(file)
                file.close()
        except (StoreError, ObjectError) as error:
            if isinstance(error, RemoteError):
                self.skip_remote(error)
            elif isinstance(error, ObjectError):
                self.warn_of_damage(error)
            self.counters.add(UsageCounts(misses=1))
            return False
        return True

    def has_whole(self, key: str) -> bool:
        """`has`, and every byte of the object is read and checked. Of a damaged one a warning says so."""
        if not self.has(key):
            return False
        try:
            with self.peek_local(key) as file:
                file.verify()
        except ObjectError as error:
            self.warn_of_damage(error)
            return False
        except StoreError:  # evicted meanwhile
            return False
        return True

    def warn_of_damage(self, error: ObjectError) -> None:
        """Say that an object here is damaged, whose text is at hand and is compiled again."""
        self.on_warning(f"{error}; continuing, its text is compiled again")

    def open(self, key: str) -> ObjectFile:
        """Open an object by its whole key to use it: `peek`, then `mark_used`.

        Raises:
            StoreError: not in the store, nor at the remote.
            ObjectError: there, but damaged, or the file is another object. RemoteError, if that is so at the remote.
        """
        file = self.peek(key)
        try:
            self.mark_used(file)
        except BaseException:  # an interrupt, too: what is being fetched waits for its readers
            file.close()
            raise
        return file

    def mark_used(self, file: ObjectFile) -> None:
        """Count an open object of this store as a hit, or as a miss if it is being fetched; it is now used last."""
        if not self._is_in_use:
            self._is_in_use = True
            with suppress(StoreError):  # nothing is counted then
                self.ensure_store()
        if isinstance(file, PartialObjectFile):
            self.counters.add(UsageCounts(misses=1))
        else:
            self.counters.hit(file.meta.key, file.num_bytes)
        file.touch()

    def peek(self, key: str) -> ObjectFile:
        """Open an object by its whole key, here or at the remote, without counting or marking it as used.

        An object from the remote can be read at once, and is moved into the store after it was closed. Raises as `open`
        does. One that is here stays open, checked.
        """
        path = f"{self.root}/objects/{key[:2]}/{key}{SUFFIX}"
        if (known := opened.find(path)) is not None and (not self.requires_signed or self.admits(known)):
            known.require_key(key)
            return known
        if self._fetcher is not None and not os.path.exists(path):
            file = self._fetcher.open(key)
            if file is not None:
                return file
        return opened.keep(path, self.peek_local(key))

    def peek_local(self, key: str) -> ObjectFile:
        """`peek`, without the remote."""
        file = self.peek_any(key)
        if self.requires_signed and not self.admits(file):
            file.close()
            raise self.absent(key)
        return file

    def peek_any(self, key: str) -> ObjectFile:
        """`peek_local`, whoever signed the object or not: for its owner, not for links."""
        path = self.path(key)
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise self.absent(key) from None
        except OSError as error:
            raise UnreadableObjectError(f"{path}: cannot be read ({error.strerror})") from error
        file = ObjectFile(path)
        try:
            file.require_key(key)
        except BaseException:
            file.close()
            raise
        return file

    def absent(self, key: str) -> StoreError:
        """The error for an object that is not here. It is raised as well for one of another salt, so as not to tell."""
        where = f"{self.root}, nor at {self.remote}" if self.remote else str(self.root)
        return StoreError(f"{key[:12]}: no such object in the store {where}; compile its text first")

    # Signatures

    @property
    def requires_signed(self) -> bool:
        return self.trust is not None and self.trust.signers is not None

    def admits(self, file: ObjectFile, sidecar: bytes | None = None) -> bool:
        """Whether this process computed an open object, or a trusted key signed it.

        `sidecar`: its signatures; by default those beside it.
        """
        assert self.trust is not None and self.trust.signers is not None
        signed = Signed.of_object(file)
        if self._own.get(signed.key) == signed.digest:
            return True
        return self.trust.signers.signer_of(signed, read_sidecar(file.path) if sidecar is None else sidecar) is not None

    def add_signatures(self, key: str, sidecar: bytes) -> None:
        """Add those signatures to an object here that are of it as it is. Raises as `open`, and StoreError."""
        with self.peek_any(key) as file:
            digest = Signed.of_object(file).digest
        if any(line[1] == digest for line in lines_of(sidecar)):
            self.ensure_store()
            write_sidecar(self.path(key), sidecar, digest, self.root / "tmp")

    def pull_signatures(self, key: str) -> None:
        """Add the signatures that the remote has of an object here. Raises RemoteError and as `add_signatures`."""
        if self.remote is not None and (sidecar := self.remote.read_signatures(key)):
            self.add_signatures(key, sidecar)

    # The remote

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start to fetch the objects that are not here from the remote."""
        for key in keys:
            if self._fetcher is not None and not os.path.exists(self.path(key)):
                self._fetcher.prefetch(key)

    def fetch(self, key: str) -> bool:
        """Fetch an object from the remote as a whole; False if it has none. Raises as `open` does."""
        if self._fetcher is None:
            return False
        self._fetcher.fetch(key)
        is_here = os.path.exists(self.path(key))
        self.counters.add(UsageCounts(misses=int(is_here)))
        return is_here

    def skip_remote(self, error: RemoteError) -> None:
        """Go on without an object that the remote failed to return; it is not requested again for a while."""
        self.on_warning(f"{error}; continuing without it, its text is compiled here")
        if self._fetcher is not None:
            self._fetcher.skip(error.key)

    def drain(self) -> None:
        """Wait until all that is being fetched is here. Objects from the remote must have been closed."""
        if self._fetcher is not None:
            self._fetcher.drain()

    def cancel(self) -> None:
        """Give up all that is being fetched, here and by other stores with this remote; it gets no more requests."""
        if self.remote is not None and self._fetcher is not None:
            self.remote.cancel()
            self._fetcher.stop()

    # Writing objects

    def put(self, chunk: CompiledChunk, used_ns: int | None = None, durable: bool = True) -> Path:
        """Write an object atomically; an equal one that is there already is replaced by the same bytes.

        Args:
            used_ns: when it was last used, if not now.
            durable: once this returns, the object survives a power failure. If not, that may leave a damaged one.

        Raises:
            StoreError: it cannot be written, or the store may not hold so much; nothing was changed.
        """
        path = self.path(chunk.meta.key)
        self.ensure_store()
        with atomic_write(path, self.root / "tmp", self._publish, durable) as file:
            encoded = write_object(file, chunk)
            if self.trust is not None:
                signed = Signed.of_object(encoded)
                self._own[signed.key] = signed.digest
                if self.trust.key is not None:
                    own = self.trust.key.sign(signed)  # if a power failure takes it, the object is compiled again
                    write_sidecar(path, own, signed.digest, self.root / "tmp", durable=False)
            if used_ns is not None:
                file.flush()  # a later write would change the time
                os.utime(file.fileno(), ns=(used_ns, used_ns))
        return path

    def insert(self, key: str, source: IO[bytes]) -> Path:
        """Copy an object's file into the store, byte by byte, once every checksum of it holds.

        Raises:
            ObjectError: damaged, or another object than `key`.
            StoreError: it cannot be written, or the store may not hold so much; nothing was changed.
        """
        path = self.path(key)
        self.ensure_store()
        with atomic_write(path, self.root / "tmp", self._publish) as copy:
            while data := source.read(1 << 20):
                copy.write(data)
            copy.flush()
            with ObjectFile(copy.name) as file:
                file.verify()
                file.require_key(key)
        return path

    def _publish(self, temp: Path, target: Path, replace: bool = True) -> None:
        size = temp.stat().st_size
        evicted = eviction.publish(self.root, temp, target, self.max_bytes, replace)
        if evicted is None:
            return
        self.counters.add(
            UsageCounts(writes=1, written_bytes=size, evictions=evicted.count, evicted_bytes=evicted.num_bytes)
        )
        if evicted.count:
            opened.close_removed()

    def mark_learned(self, key: str, max_bytes: int) -> None:
        """`eviction.mark_learned`, counted. Raises StoreError."""
        evicted = eviction.mark_learned(self.root, key, max_bytes)
        if evicted.count:
            self.counters.add(UsageCounts(evictions=evicted.count, evicted_bytes=evicted.num_bytes))
            opened.close_removed()

    # Names and listings

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return [key for shard in shards(self.root) for key in keys_of(self.root, shard)]

    def files(self) -> dict[str, Entry]:
        """The file of every object as it is now, by key."""
        return {entry.key: entry for entry in entries(self.root)}

    def hits(self) -> dict[str, int] | None:
        """How often each object was opened to be used, by key; None if that cannot be read."""
        return read_hits(self.root)

    def use_stamp(self) -> int:
        """A number that changes once any process has written its hits, or more."""
        with suppress(OSError):
            return (self.root / DATABASE).stat().st_mtime_ns
        return 0

    def find(self, name: str, salt: str | None = None) -> str:
        """The whole key for a key (fetched from the remote if it is not here) or an abbreviation of one that is here.

        Args:
            salt: as of `resolve`.

        Raises:
            StoreError: no object or several, or it cannot be fetched.
        """
        try:
            if is_key(name) and not os.path.exists(self.path(name)):
                self.fetch(name)
        except RemoteError as error:  # without a text there is nothing to compile instead
            raise StoreError(str(error)) from error
        return self.resolve(name, salt)

    def resolve(self, prefix: str, salt: str | None = None, listed: dict[str, list[str]] | None = None) -> str:
        """The whole key for an abbreviation of at least 4 hex digits, as in git; the remote is not asked.

        Args:
            listed: the keys of directories that were listed for other abbreviations, by name; this one's is added.
            salt: that of the objects which are found ("": those without one). All others are as good as absent, and so
                are damaged ones and blocks of chains. None: all are found.

        Raises:
            StoreError: no object or several.
        """
        if not re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", prefix):
            raise StoreError(f"{prefix!r}: neither a file nor a key (at least {_MIN_PREFIX} hex digits)")
        listed = {} if listed is None else listed
        if prefix[:2] not in listed:
            listed[prefix[:2]] = keys_of(self.root, prefix[:2])
        found = [key for key in listed[prefix[:2]] if key.startswith(prefix)]
        matches = found if salt is None else [key for key in found if self._is_of(key, salt)]
        if len(matches) != 1:
            what = "no object" if not matches else f"{len(matches)} objects"
            hint = f" ({self.remote} is searched for whole keys only)" if self.remote else ""
            which = "this key" if salt is None else "this key and salt"
            raise StoreError(f"{prefix}: {what} with {which} in the store {self.root}{hint}; see pic store ls")
        return matches[0]

    def _is_of(self, key: str, salt: str) -> bool:
        """Whether the key of an object is that of its tokens and a salt; of a damaged one nobody knows whose it is."""
        try:
            with self.peek_local(key) as file:
                return file.meta.key == file.meta.key_of(file.tokens(), salt)
        except (ObjectError, StoreError):
            return False

    def objects(self, after: str = "", chains: bool = False) -> Iterator[StoredObject]:
        """Every object with what its header says, sorted by key, starting at the first key after `after`.

        Blocks of prefix chains are included only if `chains`; damaged objects are, with their problem. Headers come
        from the index, which is brought up to date with the files.
        """
        if not self.root.is_dir():
            return
        index = Index(self.root, self.peek_any)
        try:
            for shard in shards(self.root):
                if shard >= after[:2]:
                    for stored in index.objects(shard):
                        if stored.key > after and (chains or not stored.is_block):
                            yield stored
        finally:
            index.flush()

    def stamp(self) -> tuple[int, ...]:
        """Numbers that change whenever an object was added or removed: times of its directories, in nanoseconds."""
        times = []
        for path in (self.root / "objects", *(self.root / "objects" / shard for shard in shards(self.root))):
            with suppress(OSError):
                times.append(path.stat().st_mtime_ns)
        return tuple(sorted(times))

    def describe(self, key: str) -> StoredObject | None:
        """An object with what its header says, or its problem; None if another process removed it meanwhile."""
        entry = Entry.of(self.path(key))
        return None if entry is None else describe(entry, self.peek_any)
