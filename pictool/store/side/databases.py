"""Side databases of a store: sqlite files that hold nothing which cannot be made again, or done without."""

from __future__ import annotations

import errno
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from pictool.store.files import make_file

Change = Callable[[sqlite3.Connection], object]
Journal = Literal["DELETE", "MEMORY"]
_MAX_BYTES = 1 << 30
_WAIT_S = 10.0


def clear_place(path: Path, may_write: bool = True) -> None:
    """Remove what is in a database's place, or its journal's, and is no regular file: sqlite would wait for a pipe.

    Raises:
        OSError: a directory, a link to a file that is there, or it cannot be removed, or not `may_write`.
    """
    for place in (path, *(path.with_name(path.name + more) for more in ("-journal", "-wal", "-shm"))):
        if not _is_usable(place):
            if not may_write:
                raise OSError(errno.EINVAL, f"{place.name} is no regular file, or too large")
            place.unlink()


def _is_usable(place: Path) -> bool:
    """Whether sqlite can use what is there, or nothing is, as of a journal that another process has just removed."""
    try:
        status = place.stat()
    except FileNotFoundError:
        return not place.is_symlink()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise  # it cannot be told: a disk that fails for a moment costs no database
        return False
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place.name} is a symbolic link; remove it")
    return stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_BYTES


def write(path: Path, schema: str, change: Change, wait_s: float, journal: Journal = "DELETE") -> None:
    """Change a database of one table in a transaction. One that is not there is made first, a damaged one made anew.

    Args:
        schema: the table (CREATE TABLE …).
        wait_s: how long to wait for another process that writes.
        journal: "MEMORY" leaves no file behind if this process is killed, but perhaps a damaged database.

    Raises:
        OSError: a directory is in its place, or the place cannot be written.
        sqlite3.OperationalError: another process writes, or the disk is full.
    """
    clear_place(path)
    try:
        _write(path, schema, change, wait_s, journal)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        path.unlink(missing_ok=True)
        _write(path, schema, change, wait_s, journal)


def _write(path: Path, schema: str, change: Change, wait_s: float, journal: Journal) -> None:
    make_file(path)
    with closing(sqlite3.connect(path, timeout=wait_s, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.execute("BEGIN IMMEDIATE")
        if is_empty(db):
            db.execute(schema)
        if not has_schema(db, schema):
            raise sqlite3.DatabaseError("another schema")
        change(db)
        db.execute("COMMIT")


def roll_back(path: Path) -> None:
    """Undo what a killed process had begun to write to a database, so that its journal does not stay.

    sqlite does that when it next reads; a journal in which nothing is yet, only the next write removes.
    """
    if path.is_symlink() or not path.with_name(f"{path.name}-journal").exists():
        return
    with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("COMMIT")


def has_schema(db: sqlite3.Connection, schema: str) -> bool:
    """Whether a database has exactly the one table of `schema` (CREATE TABLE …), and no view or trigger."""
    return [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")] == [schema]


def is_empty(db: sqlite3.Connection) -> bool:
    """Whether a database has nothing at all: it was just created."""
    return db.execute("SELECT 1 FROM sqlite_master").fetchone() is None
