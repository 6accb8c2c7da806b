"""How often each object was a hit: counted in each process, added to one sqlite file now and then (counters.py).

A hit adds to a map in memory; nobody waits on it for a file. What is being written when a process is killed is written
whole or not at all. A damaged file is begun anew; a power failure may cost counts, and never an object.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

FILE = "hits.sqlite3"
_SCHEMA = "CREATE TABLE IF NOT EXISTS hits (key TEXT PRIMARY KEY, count INT NOT NULL) WITHOUT ROWID"
_ADD = "INSERT INTO hits VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET count = count + excluded.count"
_READ_WAIT_S = 2.0


def add_hits(root: Path, hits: Mapping[str, int], wait_s: float) -> bool:
    """Add to the counts of objects; False if another process held the file for `wait_s`: to be done later then.

    In a store that cannot be written nothing is counted, which is True: later will not be better.
    """
    path = root / FILE
    try:
        _write(path, hits, wait_s)
    except sqlite3.OperationalError as error:
        return error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY
    except sqlite3.DatabaseError:  # damaged
        with suppress(OSError, sqlite3.Error):
            path.unlink(missing_ok=True)
            _write(path, hits, wait_s)
    return True


def _write(path: Path, hits: Mapping[str, int], wait_s: float) -> None:
    with closing(sqlite3.connect(path, timeout=wait_s, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("BEGIN IMMEDIATE")
        db.execute(_SCHEMA)
        db.executemany(_ADD, hits.items())
        db.execute("COMMIT")


def read_hits(root: Path) -> dict[str, int] | None:
    """Hits by key, of what all processes have written; None if that cannot be read.

    What a killed process had begun to write is rolled back first, which takes the right to write.
    """
    path = root / FILE
    if not path.exists():
        return {}
    for mode in ("rw", "ro"):
        with suppress(sqlite3.Error), closing(_open(path, mode)) as db:
            return {str(key): int(count) for key, count in db.execute("SELECT key, count FROM hits")}
    return None


def _open(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=_READ_WAIT_S)


def forget_hits(root: Path, keys: Callable[[], Iterable[str]]) -> None:
    """Drop the counts of objects that are not among `keys`, which are listed after the counts were read."""
    hits = read_hits(root)
    if hits and (gone := [(key,) for key in hits.keys() - set(keys())]):
        with suppress(sqlite3.Error), closing(sqlite3.connect(root / FILE, timeout=_READ_WAIT_S)) as db, db:
            db.executemany("DELETE FROM hits WHERE key = ?", gone)


def hits_stamp(root: Path) -> int:
    """Changes whenever hits were added: when the file was changed, in nanoseconds; 0 if there is none."""
    with suppress(OSError):
        return (root / FILE).stat().st_mtime_ns
    return 0
