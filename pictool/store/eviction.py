"""The space that objects take: counted under the store's lock, kept below a budget by evicting what was used least
recently. Objects appear and disappear only under that lock, so that none is evicted for what it was before.
"""

from __future__ import annotations

import bisect
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import StoreError
from pictool.store.entries import Entry, entries
from pictool.store.files import fsync_directory, locked, make_directory

LOCK = "lock"  # holds the bytes of all objects, as decimal text
_DIGITS = 20
_BATCH = 100  # objects that a gc removes before it lets others write
_REMOVERS = 8  # threads that remove a batch
_ROUNDS = 4  # of a gc, when objects that it wanted to remove are used meanwhile, or new ones appear
_KEEP = 0.9  # the share of a budget that stays once it is exceeded, so that the store is rarely listed for it


@dataclass(frozen=True)
class Amount:
    """How many files, and their bytes."""

    count: int = 0
    num_bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.num_bytes + other.num_bytes)


def publish(root: Path, temp: Path, target: Path, max_bytes: int | None, replace: bool = True) -> Amount | None:
    """Make a complete temp file visible as an object; if the budget asks for it, others are evicted before.

    Without `replace` an object that is there stays, and None is returned.

    Raises:
        StoreError: it cannot fit into the budget.
    """
    size, evicted = temp.stat().st_size, Amount()
    if max_bytes is not None and size > max_bytes:
        raise StoreError(f"{target}: {size:,d} bytes, but the store may hold {max_bytes:,d}; allow it more")
    with locked(root / LOCK) as fd:
        replaced = Entry.of(target)
        if replaced and not replace:
            return None
        used = _read_used(fd, root) - (replaced.num_bytes if replaced else 0)
        if max_bytes is not None and used + size > max_bytes:
            _write_used(fd, None)
            used, evicted = evict(root, int(max_bytes * _KEEP) - size, target)
        if max_bytes is not None and used + size > max_bytes:
            raise StoreError(f"{target}: does not fit, pinned objects fill {root}; allow it more, or unpin some")
        _write_used(fd, used + size)
        os.replace(temp, target)
    return evicted


def evict(root: Path, goal: int, spared: Path | None = None) -> tuple[int, Amount]:
    """Remove unpinned objects, those used least recently first, until all others take `goal` bytes at most.

    `spared`, about to be replaced, is neither counted nor removed. The caller holds the lock. Returns what the
    others take, and what was removed.
    """
    found = [entry for entry in entries(root) if spared is None or entry.key != spared.stem]
    used, evicted = sum(entry.num_bytes for entry in found), Amount()
    doomed = _least_recent(root, found)
    while doomed and used > goal:
        batch = _first(doomed, used - goal)
        gone = _removed(batch)
        del doomed[: len(batch)]
        used, evicted = used - gone.num_bytes, evicted + gone
    _forget_the_future(found)
    return used, evicted


def _least_recent(root: Path, found: list[Entry]) -> list[Entry]:
    """The unpinned ones, what was used least recently first."""
    kept = pinned(root)
    return sorted((one for one in found if one.key not in kept), key=lambda one: (one.used_ns, one.key))


def remove(entry: Entry) -> bool:
    """Remove an object, unless it was used or replaced since it was listed. The caller holds the lock."""
    if Entry.within(entry.directory, entry.key) != entry:
        return False
    with suppress(FileNotFoundError):
        entry.path.unlink()
        return True
    return False


def _removed(found: list[Entry]) -> Amount:
    """Remove objects side by side. The caller holds the lock.

    A file system may make each removal wait for its journal or a timer; the waits overlap.
    """
    with ThreadPoolExecutor(min(_REMOVERS, len(found)), "pic-evict") as threads:
        gone = [entry for entry, is_gone in zip(found, threads.map(remove, found), strict=True) if is_gone]
    return Amount(len(gone), sum(entry.num_bytes for entry in gone))


def _forget_the_future(found: list[Entry]) -> None:
    """What a wrong clock marked as used later than now is used now: else it could never be evicted."""
    now = time.time_ns()
    for entry in found:
        if entry.used_ns > now:
            with suppress(FileNotFoundError):
                os.utime(entry.path)


def collect_space(root: Path, max_bytes: int | None) -> tuple[int, Amount]:
    """Evict down to `max_bytes`, and count anew what the store holds. Others may write between two batches."""
    used, evicted = 0, Amount()
    for _ in range(_ROUNDS if root.is_dir() else 0):
        with locked(root / LOCK) as fd:
            found = list(entries(root))
            used = sum(entry.num_bytes for entry in found)
            _write_used(fd, used)
        if max_bytes is None or used <= max_bytes:
            break
        doomed = _least_recent(root, found)
        while doomed and used > max_bytes:
            batch = _first(doomed, used - max_bytes)
            gone = remove_all(root, batch)
            del doomed[: len(batch)]
            used, evicted = used - gone.num_bytes, evicted + gone
        _forget_the_future(found)
    return used, evicted


def _first(doomed: list[Entry], excess: int) -> list[Entry]:
    """As many as take `excess` bytes, but a batch at most."""
    sizes = list(itertools.accumulate(entry.num_bytes for entry in doomed[:_BATCH]))
    return doomed[: bisect.bisect_left(sizes, excess) + 1][:_BATCH]


def remove_all(root: Path, found: list[Entry]) -> Amount:
    """Remove these objects, at least one, but for those that were used meanwhile."""
    with locked(root / LOCK) as fd:
        used = _read_used(fd, root)
        gone = _removed(found)
        _write_used(fd, max(0, used - gone.num_bytes))
    return gone


def _count(root: Path) -> int:
    return sum(entry.num_bytes for entry in entries(root))


def _read_used(fd: int, root: Path) -> int:
    """The count; if none was written, or its writer was killed between two counts, the store is listed."""
    data = os.pread(fd, _DIGITS + 1, 0)
    return int(data) if len(data) == _DIGITS and data.isdigit() else _count(root)


def forget_count(fd: int) -> None:
    """The next who needs the count lists the store. `fd` is that of the lock."""
    _write_used(fd, None)


def _write_used(fd: int, used: int | None) -> None:
    """None: it is unknown until it is written again."""
    if used is None:
        os.ftruncate(fd, 0)
    else:
        os.pwrite(fd, b"%0*d" % (_DIGITS, used), 0)


# Pins: an empty file each, named by the key


def pinned(root: Path) -> frozenset[str]:
    with suppress(FileNotFoundError, NotADirectoryError):
        return frozenset(os.listdir(root / "pins"))
    return frozenset()


def pin(root: Path, key: str) -> None:
    """Keep an object from being evicted or expired."""
    try:
        make_directory(root / "pins")
        (root / "pins" / key).touch()
        fsync_directory(root / "pins")
    except OSError as error:
        raise StoreError(f"{root / 'pins'}: cannot be written ({error.strerror}); nothing was pinned") from error


def unpin(root: Path, key: str) -> None:
    try:
        (root / "pins" / key).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{root / 'pins'}: cannot be written ({error.strerror}); nothing was unpinned") from error
