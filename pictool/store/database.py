"""The database of a store: what is kept beside the objects, in one sqlite file.

    .pic/store.sqlite3            the tables below
    .pic/store.sqlite3-journal    sqlite's rollback journal; it stays, with room on the disk for leases (leases.py)

What is written is one transaction; that of a killed process is rolled back by whoever opens the file next. Only leases
cannot be made again or done without. So a damaged database is made anew with its leases, where they can be read; else
it stays until somebody removes it.

There is no write-ahead log: stores are read where nothing can be written, machines share one over a network, and on a
full disk a lease can be ended.

Versions up to 0.3 had a file for each table, and counts in `stats/`. The next writer moves what they hold, also what an
older process wrote since; where nothing can be written, they are read as they are.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from pictool.errors import StoreError, UnwritableStoreError
from pictool.reading import read_file
from pictool.store.directory import mark_leased, may_write
from pictool.store.files import atomic_write, make_file

DATABASE = "store.sqlite3"
JOURNAL = f"{DATABASE}-journal"
_VERSION = 1
_TABLES = {
    "objects": "CREATE TABLE objects (key TEXT PRIMARY KEY, inode INT, bytes INT, used INT, meta TEXT, text TEXT) "
    "WITHOUT ROWID",
    "leases": "CREATE TABLE leases (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, "
    "expires REAL NOT NULL, body TEXT NOT NULL) WITHOUT ROWID",
    "counts": "CREATE TABLE counts (name TEXT PRIMARY KEY, count INT NOT NULL) WITHOUT ROWID",
    "hits": "CREATE TABLE hits (key TEXT PRIMARY KEY, count INT NOT NULL) WITHOUT ROWID",
    "sources": "CREATE TABLE sources (key TEXT PRIMARY KEY, source TEXT NOT NULL, model TEXT NOT NULL) WITHOUT ROWID",
    "folders": "CREATE TABLE folders (folder TEXT, target TEXT, key TEXT, path TEXT NOT NULL, "
    "PRIMARY KEY (folder, target, key)) WITHOUT ROWID",
    "readings": "CREATE TABLE readings (name TEXT PRIMARY KEY, reply BLOB NOT NULL, used INT NOT NULL) WITHOUT ROWID",
}
_OLD_TABLES = ("leases", "hits", "sources", "folders", "readings")  # in files of their own; the index is made again
_OLD_COUNTS = ("hits", "misses", "hit_bytes", "writes", "written_bytes", "evictions", "evicted_bytes")
_OLD_FORMAT = struct.Struct(f"<{len(_OLD_COUNTS)}Q")
_MAX_COUNT = (1 << 63) - 1
_JOURNAL_BYTES = 1 << 20  # that a large transaction leaves of the journal
WAIT_S = 30.0  # for other writers; a disk that is busy writes a transaction in seconds
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL)
_turn = threading.Lock()  # of the threads that write: sqlite lets those that wait for each other starve


@contextmanager
def reading(root: Path, wait_s: float = WAIT_S) -> Iterator[sqlite3.Connection]:
    """The database of a store to be read; one without rows if there is none.

    Raises:
        StoreError: it is damaged, of another version, or locked for longer than `wait_s`.
    """
    path, is_marked = root / DATABASE, may_write(root)
    with _named(path):
        old = _old_files(root)
        if old and is_marked:
            with suppress(UnwritableStoreError):
                with writing(root, wait_s):
                    pass
                old = []
        if os.path.lexists(path):
            with _connected(path, wait_s, is_marked) as db:
                if _is_made(db):
                    yield db
                    return
        with closing(sqlite3.connect(":memory:")) as db, ExitStack() as sources:
            _make(db)
            _copy_old(db, [file for file in old if file.stem != "readings"], sources, locks=False)
            yield db


@contextmanager
def writing(root: Path, wait_s: float = WAIT_S) -> Iterator[sqlite3.Connection]:
    """A transaction of the database, which is made if there is none; rolled back if something is raised.

    Raises:
        UnwritableStoreError: the directory is not marked as a store, or cannot be written.
        StoreError: as of `reading`.
    """
    path = root / DATABASE
    if not may_write(root):
        raise UnwritableStoreError(f"{root}: is not a store yet; nothing was changed")
    with _named(path), _in_turn(wait_s):
        if not os.path.lexists(path):  # to open and close the file of a database would end the locks that it has
            make_file(path)
        with _connected(path, wait_s) as db, ExitStack() as sources:
            db.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")
            with db:
                db.execute("BEGIN IMMEDIATE")
                if not _is_made(db):
                    _make(db)
                old = _old_files(root)
                _copy_old(db, old, sources, locks=True)
                if any(path.stem == "leases" for path in old):
                    mark_leased(root)
                yield db
            _remove_old(old)


def _start_turns() -> None:
    """After a fork: no thread of this process writes."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_start_turns)


@contextmanager
def _in_turn(wait_s: float) -> Iterator[None]:
    if not _turn.acquire(timeout=wait_s):
        raise sqlite3.OperationalError("other threads are writing to it")
    try:
        yield
    finally:
        _turn.release()


@contextmanager
def _connected(path: Path, wait_s: float, may_write: bool = True) -> Iterator[sqlite3.Connection]:
    """The database at `path`, which exists. Nothing is removed to make room for it."""
    for place in (path, *(path.with_name(path.name + more) for more in ("-journal", "-wal", "-shm"))):
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(place.lstat().st_mode):  # sqlite would follow it elsewhere, or wait for it
                raise StoreError(f"{place}: cannot be used (a link, or not a regular file); remove it")
    uri = f"{path.absolute().as_uri()}?mode={'rw' if may_write else 'ro'}"
    with closing(sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None)) as db:
        db.text_factory = lambda text: text.decode(errors="replace")  # a damaged text costs no other
        if may_write:
            db.execute("PRAGMA journal_mode = PERSIST")
        yield db


def _make(db: sqlite3.Connection) -> None:
    for schema in _TABLES.values():
        db.execute(schema)
    db.execute(f"PRAGMA user_version = {_VERSION}")


def _is_made(db: sqlite3.Connection) -> bool:
    """Whether a database has its tables; False if it was only just created. Raises StoreError: it has others."""
    found = _schemas(db)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if found and (found, version) != (list(_TABLES.values()), _VERSION):
        (_, _, path), *_ = db.execute("PRAGMA database_list")
        raise StoreError(
            f"{path}: has tables that this version of pic does not know; use a later pic, or move the file away"
        )
    return bool(found)


def _schemas(db: sqlite3.Connection) -> list[str]:
    """The statements that make all that is in a database: tables, views and triggers."""
    return [sql for (sql,) in db.execute("SELECT sql FROM sqlite_master")]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what a database raises into a StoreError that names it; a damaged one is made anew, if that can be done."""
    try:
        yield
    except OSError as error:
        raise UnwritableStoreError(f"{path}: cannot be written ({error.strerror or error})") from error
    except sqlite3.OperationalError as error:  # the file is good: locked, on a full disk, not to be written
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _UNWRITABLE:
            raise UnwritableStoreError(f"{path}: cannot be written ({error})") from error
        raise StoreError(f"{path}: cannot be used now ({error})") from error
    except (sqlite3.Error, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        if type(error) is sqlite3.DatabaseError and path.name == DATABASE and may_write(path.parent):
            _remake(path)
        raise StoreError(
            f"{path}: cannot be used ({error}); if this persists, remove it: leases end, but no object is lost"
        ) from error


def _remake(path: Path) -> None:
    """Make a damaged database anew with its leases, if these can be read and nobody uses it.

    Who opened the damaged one before writes no more: sqlite sees that its file is another one.
    """
    with suppress(sqlite3.Error, OSError, StoreError):
        before = path.stat()
        with _connected(path, wait_s=1.0) as db:
            db.execute("BEGIN EXCLUSIVE")
            if not _is_made(db) or not os.path.samestat(before, path.stat()):
                return
            leases = db.execute("SELECT * FROM leases").fetchall()
            with atomic_write(path, path.parent / "tmp") as file, closing(sqlite3.connect(file.name)) as new:
                new.execute("PRAGMA journal_mode = MEMORY")
                _make(new)
                new.executemany("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", leases)
                new.commit()


# What versions up to 0.3 wrote


def _old_files(root: Path) -> list[Path]:
    files = [root / f"{name}.sqlite3" for name in ("index", *_OLD_TABLES)]
    if not (root / "stats").is_symlink():
        files += sorted((root / "stats").glob("[0-9][0-9]"))
    return [path for path in files if path.is_file() and not path.is_symlink()]


def _copy_old(db: sqlite3.Connection, files: list[Path], sources: ExitStack, locks: bool) -> None:
    """Add the rows of these files that the database has not. What is damaged is left out, but for leases.

    Args:
        locks: nobody writes to them until `sources` is closed.
    """
    counts = [0] * len(_OLD_COUNTS)
    for path in files:
        if path.suffix == ".sqlite3":
            try:
                with _named(path):
                    _copy_rows(db, path, sources, locks)
            except StoreError:
                if path.stem == "leases":
                    raise
        else:
            with suppress(OSError, struct.error):
                values = _OLD_FORMAT.unpack(read_file(path, _OLD_FORMAT.size))
                counts = [a + b for a, b in zip(counts, values, strict=True)]
    if any(counts):
        rows = ((name, min(count, _MAX_COUNT)) for name, count in zip(_OLD_COUNTS, counts, strict=True))
        db.executemany("INSERT OR IGNORE INTO counts VALUES (?, ?)", rows)


def _copy_rows(db: sqlite3.Connection, path: Path, sources: ExitStack, locks: bool) -> None:
    table = path.stem
    if table not in _OLD_TABLES:
        return
    source = sources.enter_context(_connected(path, WAIT_S, locks))
    source.execute("BEGIN IMMEDIATE" if locks else "BEGIN")
    if (found := _schemas(source)) not in ([], [_TABLES[table]]):
        raise ValueError("has other tables")
    if found:
        rows = source.execute(f"SELECT * FROM {table}")
        places = ", ".join("?" * len(rows.description))
        db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({places})", rows)


def _remove_old(files: list[Path]) -> None:
    with suppress(OSError):
        for path in files:
            path.with_name(f"{path.name}-journal").unlink(missing_ok=True)  # nothing in it is left to be rolled back
            path.unlink(missing_ok=True)
        if files:
            (files[0].parent / "stats").rmdir()
