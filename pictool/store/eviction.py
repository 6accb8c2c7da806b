"""A store's budget: the bytes of its objects, counted under its lock, and the eviction of the least recently used.

Objects appear and disappear only under that lock, so that none is evicted that was used or replaced meanwhile.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pictool.errors import NoRoomError, StoreError
from pictool.store.directory import ensure_store
from pictool.store.entries import Entry, entries, is_key, object_path
from pictool.store.files import LOCK, fsync_directory, locked, make_directory, make_file, require_no_links
from pictool.store.leases import leased_keys
from pictool.store.signatures import SUFFIX as SIGNED

_DIGITS = 20
_BATCH = 100  # objects that a gc removes before it lets others write
_REMOVERS = 8  # threads that remove a batch
_PASSES = 4  # of a gc, when objects that it is to remove are used meanwhile, or new ones appear
_LOW_WATER = 0.9  # the share of a budget to evict to once it is exceeded, so that the store is rarely listed for it


@dataclass(frozen=True)
class Tally:
    """A count of files, and their bytes."""

    count: int = 0
    num_bytes: int = 0

    @classmethod
    def of(cls, files: list[Entry]) -> Tally:
        return cls(len(files), sum(entry.num_bytes for entry in files))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, self.num_bytes + other.num_bytes)


@contextmanager
def locked_store(root: Path) -> Iterator[int]:
    """Hold the lock under which objects appear and disappear; yields its descriptor.

    Raises:
        StoreError: the directory is no store.
        OSError: it cannot be locked.
    """
    ensure_store(root)
    with locked(root / LOCK) as fd:
        yield fd


def publish(root: Path, temp: Path, target: Path, max_bytes: int | None, replace: bool = True) -> Tally | None:
    """Make a complete temp file visible as an object; others are evicted first if the budget requires it.

    Returns:
        what was evicted; None if there is an object already and `replace` is False: it stays then.

    Raises:
        NoRoomError: it cannot fit into the budget.
    """
    size, evicted = temp.stat().st_size, Tally()
    if target.is_dir() and not target.is_symlink():
        with suppress(OSError):
            target.rmdir()  # only if there is nothing in it
    if target.is_dir() and not target.is_symlink():
        raise StoreError(f"{target}: is a directory in the place of an object; move it away")
    if max_bytes is not None and size > max_bytes:
        raise NoRoomError(f"{target}: {size:,d} bytes, but the store may hold {max_bytes:,d}; raise its max_size")
    with locked_store(root) as fd:
        replaced = Entry.of(target)
        if replaced and not replace:
            return None
        total = _read_total(fd, root) - (replaced.num_bytes if replaced else 0)
        if max_bytes is not None and total + size > max_bytes:
            forget_total(fd)
            total, evicted = _evict(root, int(max_bytes * _LOW_WATER) - size, target)
        if max_bytes is not None and total + size > max_bytes:
            raise NoRoomError(f"{target}: does not fit, pinned or leased objects fill {root}; raise its max_size")
        _write_total(fd, total + size)
        os.replace(temp, target)
    return evicted


def _evict(root: Path, goal: int, excluded: Path) -> tuple[int, Tally]:
    """Remove unpinned objects, the least recently used first, until all others take `goal` bytes at most.

    The `excluded` object, about to be replaced, is neither counted nor removed. The caller holds the lock. Returns the
    bytes that the others take, and what was removed.
    """
    return _remove_least(root, [entry for entry in entries(root) if entry.key != excluded.stem], goal, _remove_together)


def shrink(root: Path, max_bytes: int | None) -> tuple[int, Tally]:
    """Evict down to `max_bytes`, and count the bytes of the store again. Others may write between two batches.

    Returns the bytes that are left, and what was evicted.
    """
    total, evicted = 0, Tally()
    for _ in range(_PASSES if root.is_dir() else 0):
        with locked_store(root) as fd:
            objects = list(entries(root))
            total = Tally.of(objects).num_bytes
            _write_total(fd, total)
        if max_bytes is None or total <= max_bytes:
            break
        total, removed = _remove_least(root, objects, max_bytes, partial(remove_all, root))
        evicted += removed
    return total, evicted


def _remove_least(
    root: Path, objects: list[Entry], goal: int, remove: Callable[[list[Entry]], Tally]
) -> tuple[int, Tally]:
    """Remove the least recently used of these objects, a batch at a time, until they take `goal` bytes at most.

    Returns the bytes that are left, and what was removed.
    """
    total, removed = Tally.of(objects).num_bytes, Tally()
    candidates = _least_recently_used(root, objects)
    while candidates and total > goal:
        batch = _first(candidates[:_BATCH], total - goal)
        done = remove(batch)
        del candidates[: len(batch)]
        total, removed = total - done.num_bytes, removed + done
    _reset_future_times(objects)
    return total, removed


def would_shrink(root: Path, max_bytes: int | None) -> list[Entry]:
    """What `shrink` would evict, if nobody used or wrote objects meanwhile."""
    objects = list(entries(root))
    excess = Tally.of(objects).num_bytes - (max_bytes if max_bytes is not None else sys.maxsize)
    return _first(_least_recently_used(root, objects), excess)


def remove_all(root: Path, objects: list[Entry]) -> Tally:
    """Remove these objects, at least one, except those that were used meanwhile."""
    with locked_store(root) as fd:
        total = _read_total(fd, root)
        removed = _remove_together(objects)
        _write_total(fd, max(0, total - removed.num_bytes))
    return removed


def remove(entry: Entry) -> bool:
    """Remove an object, unless it was used or replaced since it was listed. The caller holds the lock.

    A directory of its name stays: nothing is known of what it holds.
    """
    if Entry.within(entry.directory, entry.key) != entry or entry.path.is_dir():
        return False
    with suppress(FileNotFoundError):
        entry.path.unlink()
        with suppress(OSError):  # mostly there is none
            os.unlink(f"{entry.path}{SIGNED}")
        return True
    return False


def _remove_together(objects: list[Entry]) -> Tally:
    """Remove objects in parallel, as a file system may make each removal wait. The caller holds the lock."""
    with ThreadPoolExecutor(min(_REMOVERS, len(objects)), "pic-evict") as threads:
        are_removed = threads.map(remove, objects)
        return Tally.of([entry for entry, is_removed in zip(objects, are_removed, strict=True) if is_removed])


def _least_recently_used(root: Path, objects: list[Entry]) -> list[Entry]:
    """Those that neither a pin nor a lease keeps, in the order in which they are evicted."""
    pins = kept(root)
    return sorted((entry for entry in objects if entry.key not in pins), key=lambda entry: (entry.used_ns, entry.key))


def _first(candidates: list[Entry], excess: int) -> list[Entry]:
    """As many as take `excess` bytes."""
    sizes = list(itertools.accumulate(entry.num_bytes for entry in candidates))
    return candidates[: bisect.bisect_left(sizes, excess) + 1] if excess > 0 else []


def _reset_future_times(objects: list[Entry]) -> None:
    """An object that a wrong clock marked as used later than now counts as used now: else it is never evicted."""
    now = time.time_ns()
    for entry in objects:
        if entry.used_ns > now:
            with suppress(FileNotFoundError):
                os.utime(entry.path, follow_symlinks=False)


# The bytes of all objects, in the lock's file


def forget_total(fd: int) -> None:
    """Make the next reader of the total list the store. `fd` is that of the lock."""
    os.ftruncate(fd, 0)


def _read_total(fd: int, root: Path) -> int:
    """The store is listed if no total was written, or its writer was killed while it evicted."""
    data = os.pread(fd, _DIGITS + 1, 0)
    return int(data) if len(data) == _DIGITS and data.isdigit() else sum(entry.num_bytes for entry in entries(root))


def _write_total(fd: int, total: int) -> None:
    os.pwrite(fd, b"%0*d" % (_DIGITS, total), 0)


# Pins: an empty file each, named by the key


def pinned(root: Path) -> frozenset[str]:
    """The keys of all pinned objects."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return frozenset(os.listdir(root / "pins"))
    return frozenset()


def kept(root: Path) -> frozenset[str]:
    """The keys of all objects that are pinned or leased.

    Raises:
        StoreError: the leases cannot be read.
    """
    return pinned(root) | leased_keys(root)


def pin(root: Path, key: str) -> None:
    """Keep an object from being evicted or expired."""
    ensure_store(root)
    try:
        make_directory(root / "pins", root)
        make_file(root / "pins" / key)
        fsync_directory(root / "pins")
    except OSError as error:
        raise StoreError(f"{root / 'pins'}: cannot be written ({error.strerror}); nothing was pinned") from error


# Learned objects, which a server compiled unasked: marked in the same way


def mark_learned(root: Path, key: str, max_bytes: int) -> Tally:
    """Count an object among the learned ones, and remove those that were used least recently beyond `max_bytes`.

    Returns what was removed. Raises StoreError.
    """
    marks, objects = root / "learned", list[Entry]()
    try:
        make_directory(marks, root)
        make_file(marks / key)
        for name in os.listdir(marks):
            entry = Entry.of(object_path(root, name)) if is_key(name) else None
            if entry is not None:
                objects.append(entry)
            elif name != key:  # it was evicted
                (marks / name).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{marks}: cannot be written ({error.strerror}); make it a directory of yours") from error
    return _remove_least(root, objects, max_bytes, partial(remove_all, root))[1]


def unmark_learned(root: Path, keys: Iterable[str]) -> None:
    """Let objects stay that somebody compiles himself, if they were learned."""
    marks = root / "learned"
    if marks.is_dir() and not marks.is_symlink():
        for key in keys:
            with suppress(OSError):
                os.unlink(marks / key)


def unpin(root: Path, key: str) -> None:
    """Let an object be evicted and expired again."""
    ensure_store(root)
    try:
        require_no_links(root / "pins", root)
        (root / "pins" / key).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{root / 'pins'}: cannot be written ({error.strerror}); nothing was unpinned") from error
