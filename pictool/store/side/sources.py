"""Where objects came from, for people: a side database of the names of the files and models that they were made of.

A key follows from content alone, so an object does not know what its text's file was called. Of a tenant's objects
(salted ones) nothing is kept.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.store.directory import may_write
from pictool.store.side.databases import clear_place, has_schema, write

SOURCES_FILE = "sources.sqlite3"
_SCHEMA = "CREATE TABLE sources (key TEXT PRIMARY KEY, source TEXT NOT NULL, model TEXT NOT NULL) WITHOUT ROWID"
_ADD = "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)"
_SELECT = "SELECT key, source, model FROM sources WHERE typeof(key) = 'text'"
_MAX_LENGTH = 1000  # characters of a name
_WAIT_S = 1.0


@dataclass(frozen=True)
class Source:
    """What an object was last compiled from: the file as it was named, and the model as it was called."""

    source: str
    model: str


def add_sources(root: Path, sources: Mapping[str, Source]) -> None:
    """Keep where objects came from, by key. In a store that cannot be written nothing is kept."""
    path = root / SOURCES_FILE
    if not may_write(root):
        return
    rows = [(key, one.source[:_MAX_LENGTH], one.model[:_MAX_LENGTH]) for key, one in sources.items()]
    with suppress(OSError, sqlite3.Error, UnicodeEncodeError):
        write(path, _SCHEMA, lambda db: db.executemany(_ADD, rows), _WAIT_S)


def read_sources(root: Path, on_problem: Callable[[str], None] = lambda problem: None) -> dict[str, Source]:
    """Where objects came from, by key, as far as it is known; `on_problem` hears why a file there is no help."""
    path = root / SOURCES_FILE
    try:
        if path.exists():
            clear_place(path, may_write(root))
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_WAIT_S)) as db:
                db.text_factory = lambda text: text.decode(errors="replace")
                if has_schema(db, _SCHEMA):
                    return {key: Source(str(source), str(model)) for key, source, model in db.execute(_SELECT)}
    except (OSError, sqlite3.Error) as error:
        on_problem(f"{path}: cannot be read ({error}), so that files and models are not named; the objects are there")
    return {}


def forget_sources(root: Path, keys: Callable[[], Iterable[str]]) -> None:
    """Drop those of objects that are not among `keys`, which is called after the others were read."""
    known = read_sources(root)
    if known and (removed := [(key,) for key in known.keys() - set(keys())]):
        with suppress(sqlite3.Error), closing(sqlite3.connect(root / SOURCES_FILE, timeout=_WAIT_S)) as db, db:
            db.executemany("DELETE FROM sources WHERE key = ?", removed)
