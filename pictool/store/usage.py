"""Counts of use: how often a store had what was requested of it (hits, misses, …), and the hits of each object.

Each process counts in memory and adds to the store's database every few seconds, and when it ends. A process that is
killed takes its last seconds of counts along. In a store that cannot be written nothing is counted.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from pictool.errors import StoreError
from pictool.store.database import reading, writing
from pictool.store.directory import may_write

_FLUSH_S = 5.0
_ADD_WAIT_S, _WAIT_S = 0.02, 2.0  # for another process that writes: while a link waits, and else
_ADD = "INSERT INTO {} VALUES (?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"
_SELECT = "SELECT * FROM {} WHERE typeof(count) = 'integer' AND count > 0"


@dataclass(frozen=True)
class UsageCounts:
    """Since the store was created: objects requested that it had, and had not; written; evicted; and their bytes."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    evictions: int = 0
    evicted_bytes: int = 0

    @property
    def hit_rate(self) -> float | None:
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def report(self) -> dict[str, int | float | None]:
        return asdict(self) | {"hit_rate": self.hit_rate}


@dataclass
class _Pending:
    """What this process has counted and not yet written, of one store."""

    counts: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)
    since: float = field(default_factory=time.monotonic)


_lock = threading.Lock()
_pending = dict[Path, _Pending]()


class Counters:
    """Counts of a store; those of all of a process are written together."""

    def __init__(self, root: Path) -> None:
        self._root = root
        with suppress(OSError):  # the working directory is gone
            self._root = root.absolute()  # it may be another one by the time that the last counts are written

    def add(self, counts: UsageCounts, hit: str | None = None) -> None:
        """Count; `hit` is the key of the object that was hit."""
        self._add(vars(counts), hit)

    def hit(self, key: str, num_bytes: int) -> None:
        """Count a hit of an object of so many bytes; a link has many."""
        self._add({"hits": 1, "hit_bytes": num_bytes}, key)

    def _add(self, counts: Mapping[str, int], hit: str | None) -> None:
        with _lock:
            pending = _pending.get(self._root) or _pending.setdefault(self._root, _Pending())
            for name, count in counts.items():
                pending.counts[name] += count
            if hit is not None:
                pending.hits[hit] += 1
            is_due = time.monotonic() - pending.since > _FLUSH_S
        if is_due:
            _flush(self._root, _ADD_WAIT_S)

    def flush(self) -> None:
        _flush(self._root, _WAIT_S)


def _flush(root: Path, wait_s: float) -> None:
    with _lock:
        pending = _pending.pop(root, None)
    if pending is None or not may_write(root):
        return
    try:
        with writing(root, wait_s) as db:
            db.executemany(_ADD.format("counts"), pending.counts.items())
            db.executemany(_ADD.format("hits"), pending.hits.items())
    except StoreError:  # as others write it: it is tried again
        with _lock:
            later = _pending.setdefault(root, _Pending())
            later.counts.update(pending.counts)
            later.hits.update(pending.hits)


@atexit.register
def _flush_all() -> None:
    with suppress(KeyboardInterrupt):  # the process ends now
        for root in list(_pending):
            _flush(root, _WAIT_S)


def _start_counting() -> None:
    """After a fork: what was counted before is the parent's."""
    global _lock
    _lock = threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_start_counting)


def read_counts(root: Path) -> UsageCounts:
    """The counts that all processes have written."""
    counts = _read(root, "counts") or {}
    return UsageCounts(**{each.name: counts.get(each.name, 0) for each in fields(UsageCounts)})


def read_hits(root: Path) -> dict[str, int] | None:
    """The hits of each object that all processes have written, by key; None if they cannot be read."""
    return _read(root, "hits")


def _read(root: Path, table: str) -> dict[str, int] | None:
    with suppress(StoreError), reading(root, _WAIT_S) as db:
        return dict(db.execute(_SELECT.format(table)))
    return None
