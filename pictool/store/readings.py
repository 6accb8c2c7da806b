"""What readers made of files of documents, by the files' content: a table, so that none is read twice.

It holds texts, so it keeps nothing for a tenant (a model with a salt). It is bounded; `gc` removes what was not used
for a month.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from pictool.errors import StoreError
from pictool.store.database import reading, writing

_TOTALS = "SELECT name, sum(length(reply)) OVER (ORDER BY used DESC, name) AS total FROM readings"
_TOO_MANY = f"DELETE FROM readings WHERE name IN (SELECT name FROM ({_TOTALS}) WHERE total > ?)"
_MAX_BYTES, _MAX_WAITING = 256 << 20, 4 << 20  # of all replies, and of those that are not written yet
_MAX_REPLY = 128 << 20  # inflated
_DAY_S, _UNUSED_DAYS = 86400, 30
_WAIT_S = 1.0


class Readings:
    """The replies of readers that a store keeps. What cannot be read or written is not kept, and nothing is raised."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._new, self._used = dict[str, bytes](), set[str]()

    def get(self, name: str) -> dict[str, Any] | None:
        """The reply of this name; None if there is none that is sound."""
        with suppress(StoreError, zlib.error), reading(self._root, _WAIT_S) as db:
            row = db.execute("SELECT reply FROM readings WHERE name = ?", (name,)).fetchone()
            if row is not None:
                reply = json.loads(zlib.decompressobj().decompress(row[0], _MAX_REPLY))
                if isinstance(reply, dict):
                    self._used.add(name)
                    return reply
        return None

    def add(self, name: str, reply: dict[str, Any]) -> None:
        self._new[name] = zlib.compress(json.dumps(reply).encode(), 1)
        if sum(map(len, self._new.values())) > _MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write what is new, and that the others were used; what was used longest ago makes room."""
        today = int(time.time()) // _DAY_S
        if self._new or self._used:
            with suppress(StoreError), writing(self._root, _WAIT_S) as db:
                db.executemany("UPDATE readings SET used = ? WHERE name = ?", [(today, name) for name in self._used])
                rows = [(name, reply, today) for name, reply in self._new.items()]
                db.executemany("INSERT OR REPLACE INTO readings VALUES (?, ?, ?)", rows)
                db.execute(_TOO_MANY, (_MAX_BYTES,))
        self._new, self._used = {}, set()


def forget_readings(db: sqlite3.Connection) -> None:
    """Drop what was not used for a month."""
    db.execute("DELETE FROM readings WHERE used < ?", (int(time.time()) // _DAY_S - _UNUSED_DAYS,))
