"""Counts of use: how often a store had what was requested of it (hits, misses, …), and the hits of each object.

    .pic/stats/00 … 15       the counts of all processes: 7 numbers (u64, little endian) a file, one file a process
    .pic/hits.sqlite3        the hits of each object

Each process counts in memory and adds to the files about once a second, and when it ends. So a hit waits for no file,
and few processes meet at one. A process that is killed takes its last second of counts along; what it is just writing
is written whole or not at all. In a store that cannot be written nothing is counted. A damaged file is replaced by an
empty one; a power failure may cost counts, and never an object.
"""

from __future__ import annotations

import _thread
import gc
import os
import re
import sqlite3
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import CodeType, FrameType

from pictool.reading import read_file
from pictool.store.directory import may_write
from pictool.store.files import locked, make_directory
from pictool.store.side.databases import clear_place, has_schema, write

HITS_FILE = "hits.sqlite3"
_NUM_FILES = 16
_FLUSH_S = 1.0
_AGAIN_S = 0.01
# How long to wait for another process that writes hits: to add now and then, to add at the end, to read.
_ADD_WAIT_S, _LAST_ADD_WAIT_S, _READ_WAIT_S = 0.02, 2.0, 2.0
_SCHEMA = "CREATE TABLE hits (key TEXT PRIMARY KEY, count INT NOT NULL) WITHOUT ROWID"
_MAX_COUNT = (1 << 64) - 1
_SELECT = "SELECT key, count FROM hits WHERE typeof(key) = 'text' AND typeof(count) = 'integer' AND count > 0"
_ADD = "INSERT INTO hits VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET count = count + excluded.count"


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

    def __add__(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @property
    def hit_rate(self) -> float | None:
        requests = self.hits + self.misses
        return self.hits / requests if requests else None

    def report(self) -> dict[str, int | float | None]:
        return asdict(self) | {"hit_rate": self.hit_rate}


class Counters:
    """What this process has counted and not yet written to `directory`; written at its end at the latest."""

    def __init__(self, directory: Path) -> None:
        self._pending = _Pending(directory)
        weakref.finalize(self, _flush_last, self._pending)

    def add(self, counts: UsageCounts, hit: str | None = None) -> None:
        """Count; `hit` is the key of the object that was hit."""
        self._pending.add(counts, hit)

    def flush(self) -> None:
        self._pending.flush(_LAST_ADD_WAIT_S)


class _Pending:
    """The counts themselves, apart from `Counters` so that they can be written after it was garbage-collected."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        with suppress(OSError):  # the working directory is gone
            self._directory = directory.absolute()  # it may be another one by the time that the last counts are written
        self._counts, self._since, self._process = UsageCounts(), 0.0, os.getpid()
        self._hits: dict[str, int] = {}

    def add(self, counts: UsageCounts, hit: str | None) -> None:
        with self._lock:
            if self._process != os.getpid():  # a fork: what was counted before is its parent's
                self._counts, self._hits, self._process = UsageCounts(), {}, os.getpid()
            if self._counts == UsageCounts():
                self._since = time.monotonic()
            self._counts += counts
            if hit is not None:
                self._hits[hit] = self._hits.get(hit, 0) + 1
            is_due = time.monotonic() - self._since > _FLUSH_S
        if is_due:
            self.flush(_ADD_WAIT_S)

    def flush(self, wait_s: float) -> None:
        with self._lock:
            counts, self._counts = self._counts, UsageCounts()
            hits, self._hits = self._hits, {}
            if (counts == UsageCounts() and not hits) or self._process != os.getpid():
                return
            if not may_write(self._directory.parent):
                return
        with suppress(OSError):
            make_directory(self._directory, self._directory.parent)
            with locked(self._directory / f"{os.getpid() % _NUM_FILES:02d}") as fd:
                os.pwrite(fd, _pack(_unpack(os.pread(fd, _FORMAT.size, 0)) + counts), 0)
        if hits and not add_hits(self._directory.parent, hits, wait_s):
            self._return(hits)

    def _return(self, hits: Mapping[str, int]) -> None:
        """Hits that could not be added: they are added with the next counts."""
        with self._lock:
            for key, count in hits.items():
                self._hits[key] = self._hits.get(key, 0) + count


def _flush_last(pending: _Pending) -> None:
    """Write what is left. No exception can leave a finalizer, so an interrupt is raised again right after it."""
    try:
        pending.flush(_LAST_ADD_WAIT_S)
    except KeyboardInterrupt:
        threading.Thread(target=_interrupt_again, args=[threading.get_ident()], daemon=True).start()


def _interrupt_again(main: int) -> None:
    """Interrupt the main thread, by its ident, as soon as it has left the finalizer."""
    while _flush_last.__code__ in _codes_of(_frame_of(main)):
        time.sleep(_AGAIN_S)
    _thread.interrupt_main()


def _frame_of(thread: int) -> FrameType | None:
    """What a thread runs. Python 3.11 holds a lock meanwhile that a finalizer which starts a thread waits for."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if is_collecting:
            gc.enable()


def _codes_of(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions that run in a frame and above it."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


_FORMAT = struct.Struct(f"<{len(fields(UsageCounts))}Q")


def read_counts(directory: Path) -> UsageCounts:
    """The counts that all processes have written; what is no file of counts is left out."""
    total = UsageCounts()
    for path in _count_files(directory):
        with suppress(OSError):
            total += _unpack(read_file(path, _FORMAT.size))
    return total


def _count_files(directory: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in directory.iterdir() if re.fullmatch("[0-9]{2}", path.name)]
    return []


def _values(counts: UsageCounts) -> list[int]:
    return [getattr(counts, field.name) for field in fields(UsageCounts)]


def _pack(counts: UsageCounts) -> bytes:
    return _FORMAT.pack(*(min(value, _MAX_COUNT) for value in _values(counts)))


def _unpack(data: bytes) -> UsageCounts:
    return UsageCounts(*_FORMAT.unpack(data)) if len(data) == _FORMAT.size else UsageCounts()


# The hits of each object


def add_hits(root: Path, hits: Mapping[str, int], wait_s: float) -> bool:
    """Add to the hits of objects; False if another process held the file for `wait_s`: try again later.

    In a store that cannot be written nothing is counted, which is True: to try again would not help.
    """
    try:
        write(root / HITS_FILE, _SCHEMA, lambda db: db.executemany(_ADD, hits.items()), wait_s)
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
    except (OSError, sqlite3.Error):  # a directory, a place that cannot be written, or one that others damage
        return True
    return True


def read_hits(root: Path) -> dict[str, int] | None:
    """The hits that all processes have written, by key; None if they cannot be read.

    An unfinished write of a killed process is rolled back first, which needs permission to write, and a marked store.
    """
    path = root / HITS_FILE
    if not path.exists():
        return {}
    is_marked = may_write(root)
    for mode in ("rw", "ro") if is_marked else ("ro",):
        with suppress(sqlite3.Error, OSError):
            clear_place(path, is_marked)
            with closing(_connect(path, mode)) as db:
                return dict(db.execute(_SELECT)) if has_schema(db, _SCHEMA) else {}
    return None


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=_READ_WAIT_S)
    db.text_factory = lambda key: key.decode(errors="replace")  # one damaged key does not cost the others
    return db


def forget_hits(root: Path, keys: Callable[[], Iterable[str]]) -> None:
    """Drop the hits of objects that are not among `keys`, which is called after the hits were read."""
    hits = read_hits(root)
    if hits and (removed := [(key,) for key in hits.keys() - set(keys())]):
        with suppress(sqlite3.Error), closing(sqlite3.connect(root / HITS_FILE, timeout=_READ_WAIT_S)) as db, db:
            db.executemany("DELETE FROM hits WHERE key = ?", removed)


def hits_stamp(root: Path) -> int:
    """A number that changes whenever hits were added: when the file was changed, in nanoseconds; 0 without a file."""
    with suppress(OSError):
        return (root / HITS_FILE).stat().st_mtime_ns
    return 0
