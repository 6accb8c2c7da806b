"""What was made of files of documents, by their content: a table, so that none is read, cut or tokenized twice.

It holds texts, so it keeps nothing for a tenant (a model with a salt), and as nobody signs it, it is not asked where
only signed objects may be linked. It is bounded; `gc` removes what was not used for a month.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from pictool.errors import StoreError
from pictool.reading import FileState, read_file
from pictool.store.database import reading, writing

_TOTALS = "SELECT name, sum(length(reply)) OVER (ORDER BY used DESC, name) AS total FROM readings"
_TOO_MANY = f"DELETE FROM readings WHERE name IN (SELECT name FROM ({_TOTALS}) WHERE total > ?)"
_MAX_BYTES, _MAX_WAITING = 1 << 30, 16 << 20  # of all values, and of those that are not written yet
_MAX_VALUE = 256 << 20  # inflated
_DIGEST = 16  # bytes before a value: of its name and itself
_DAY_S, _UNUSED_DAYS = 86400, 30
_WAIT_S = 1.0


class Readings:
    """Values by name that a store keeps. What cannot be written stays with this process, and nothing is raised.

    Args:
        root: of the store; None: nothing leaves this process.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._new, self._used = dict[str, bytes](), set[str]()
        self._waiting = 0
        self._db: sqlite3.Connection | None = None

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Get many values by one connection, on one thread."""
        stack = ExitStack()  # which is told of nothing that is raised here
        try:
            with suppress(StoreError):
                self._db = None if self._root is None else stack.enter_context(reading(self._root, _WAIT_S))
            yield
        finally:
            self._db = None
            stack.close()

    def get(self, names: Iterable[str]) -> dict[str, bytes]:
        """The values of these names, of those that are there and sound."""
        wanted = set(names)
        found: dict[str, object] = {name: self._new[name] for name in wanted & self._new.keys()}
        if self._root is not None and (missing := wanted - found.keys()):
            connection = reading(self._root, _WAIT_S) if self._db is None else nullcontext(self._db)
            with suppress(StoreError, sqlite3.Error), connection as db:
                found |= self._rows(db, missing)
        values = {name: _unpacked(name, packed) for name, packed in found.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _rows(self, db: sqlite3.Connection, names: Iterable[str]) -> dict[str, object]:
        rows = [row for name in names for row in db.execute("SELECT * FROM readings WHERE name = ?", (name,))]
        self._used |= {name for name, _, used in rows if used != _today()}
        return {name: value for name, value, _ in rows}

    def contents(self, paths: Sequence[Path], max_bytes: int) -> list[str]:
        """The digests of files' contents; "": of one that cannot be read, or is larger.

        A file whose state is that in which it was hashed is not opened.
        """
        keys = [_name_of_state(path) for path in paths]
        known, contents = self.get(filter(None, keys)), list[str]()
        for path, key in zip(paths, keys, strict=True):
            contents.append(known[key].hex() if key in known else _content_of(path, max_bytes))
            if key and key not in known and contents[-1]:
                self.add(key, bytes.fromhex(contents[-1]))
        return contents

    def add(self, name: str, value: bytes) -> None:
        packed = zlib.compress(value, 1)
        self._new[name] = _digest(name, packed) + packed
        self._waiting += len(packed)
        if self._waiting > _MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what is new, and that the others were used; what was used longest ago makes room."""
        self._waiting = 0
        if self._root is not None and (self._new or self._used):
            today = _today()
            with suppress(StoreError):
                with writing(self._root, _WAIT_S) as db:
                    db.executemany(
                        "UPDATE readings SET used = ? WHERE name = ?", [(today, name) for name in self._used]
                    )
                    rows = [(name, packed, today) for name, packed in self._new.items()]
                    db.executemany("INSERT OR REPLACE INTO readings VALUES (?, ?, ?)", rows)
                    db.execute(_TOO_MANY, (_MAX_BYTES,))
                self._new, self._used = {}, set()


def forget_readings(db: sqlite3.Connection) -> None:
    """Drop what was not used for a month."""
    db.execute("DELETE FROM readings WHERE used < ?", (_today() - _UNUSED_DAYS,))


def _name_of_state(path: Path) -> str:
    """What tells whether a file changes from now on; "": another change may not show in it, or it may not be read."""
    with suppress(OSError):
        state = FileState.of(path.stat())
        if state.is_settled and os.access(path, os.R_OK):
            return hashlib.sha256(f"{tuple(state)} {path.absolute()}".encode(errors="surrogateescape")).hexdigest()
    return ""


def _content_of(path: Path, max_bytes: int) -> str:
    try:
        return hashlib.sha256(read_file(path, max_bytes)).hexdigest()
    except OSError:
        return ""


def _today() -> int:
    return int(time.time()) // _DAY_S


def _digest(name: str, packed: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + packed, digest_size=_DIGEST).digest()


def _unpacked(name: str, packed: object) -> bytes | None:
    """A value; None if it is damaged, or that of another name."""
    if isinstance(packed, bytes) and packed[:_DIGEST] == _digest(name, packed[_DIGEST:]):
        with suppress(zlib.error):
            return zlib.decompressobj().decompress(packed[_DIGEST:], _MAX_VALUE)
    return None
