"""Side databases of a store: sqlite files that hold nothing which cannot be made again, or done without."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 1 << 30


def clear_place(path: Path) -> None:
    """Remove what is in a database's place, or its journal's, and is no regular file: sqlite would wait for a pipe.

    Raises:
        OSError: a directory, or it cannot be removed.
    """
    for place in (path, *(path.with_name(path.name + more) for more in ("-journal", "-wal", "-shm"))):
        if os.path.lexists(place) and not _is_usable(place):
            place.unlink()


def _is_usable(place: Path) -> bool:
    with suppress(OSError):  # a link to itself
        status = place.stat()
        return stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES
    return False


def has_schema(db: sqlite3.Connection, schema: str) -> bool:
    """Whether a database has exactly the one table of `schema` (CREATE TABLE …), and no view or trigger."""
    return [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")] == [schema]


def is_empty(db: sqlite3.Connection) -> bool:
    """Whether a database has nothing at all: it was just created."""
    return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
