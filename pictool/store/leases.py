"""Leases: names that a server gives to objects of a store, each with an expiry.

    .pic/leases.sqlite3     a row for each lease, written before its name is given away

Several leases may share an object. While one of them has not expired, the object is neither evicted nor expired, by
whatever process; when the last one ends, nothing happens to the object until space is needed. A lease belongs to a
tenant, and to others it does not exist. Times are seconds since 1970, by the system's clock: a lease ends on time
whether or not the server runs.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pictool.errors import StoreError
from pictool.store.databases import clear_place, has_schema, is_empty
from pictool.store.entries import is_key
from pictool.store.files import make_directory, make_file

LEASES_FILE = "leases.sqlite3"
_WAIT_S = 10.0
_SCHEMA = (
    "CREATE TABLE leases (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL, "
    "body TEXT NOT NULL) WITHOUT ROWID"
)
Clock = Callable[[], float]


@dataclass(frozen=True)
class LeasedObject:
    """An object of a lease: its key, its tokens, and the role of the message that it is the text of."""

    key: str
    num_tokens: int
    role: str = "user"


@dataclass(frozen=True)
class Lease:
    """A name for objects, in the order in which a prompt has them.

    Fields:
        tenant: whose it is. model: the model's name in the API.
        ttl: how long it lasts, or lasts again after each use if it `renews`.
    """

    id: str
    tenant: str
    model: str
    objects: tuple[LeasedObject, ...]
    created: float
    expires: float
    ttl: float
    name: str = ""
    renews: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.objects)

    def _row(self) -> tuple[str, str, float, float, str]:
        body = {
            "model": self.model, "name": self.name, "ttl": self.ttl, "renews": self.renews,
            "objects": [[entry.key, entry.num_tokens, entry.role] for entry in self.objects],
        }  # fmt: skip
        return self.id, self.tenant, self.created, self.expires, json.dumps(body)

    @classmethod
    def _of(cls, row: Sequence[Any]) -> Lease:
        name, tenant, created, expires, text = row
        body = json.loads(text)
        objects = tuple(LeasedObject(str(key), int(count), str(role)) for key, count, role in body["objects"])
        return cls(
            str(name), tenant, str(body["model"]), objects, float(created), float(expires), float(body["ttl"]),
            str(body["name"]), bool(body["renews"]),
        )  # fmt: skip


class Leases:
    """The leases of one store. Many processes may have them open; each call is one transaction.

    Every method raises StoreError for a file that is damaged or cannot be written.
    """

    def __init__(self, root: Path, clock: Clock = time.time) -> None:
        self._root, self._clock, self._is_ready = root, clock, False

    def add(
        self, tenant: str, model: str, objects: Sequence[LeasedObject], expires: float, *, name: str = "",
        renews: bool = False,
    ) -> Lease:  # fmt: skip
        """Lease objects until `expires`. Once this returns, the lease outlives a power failure."""
        now = self._clock()
        lease = Lease(
            f"cache-{secrets.token_hex(16)}", tenant, model, tuple(objects), now, expires, expires - now, name, renews
        )
        with self._open() as db, db:
            db.execute("DELETE FROM leases WHERE expires <= ?", (now,))
            db.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", lease._row())
        return lease

    def find(self, name: str, tenant: str) -> Lease | None:
        """A lease of a tenant that has not expired."""
        with self._open() as db:
            return self._find(db, name, tenant)

    def use(self, name: str, tenant: str) -> Lease | None:
        """`find` for a request: a lease that renews lasts its whole time again."""
        lease = self.find(name, tenant)
        return self.extend(name, tenant, self._clock() + lease.ttl) if lease is not None and lease.renews else lease

    def extend(self, name: str, tenant: str, expires: float) -> Lease | None:
        """Let a lease end at another time; None if there is none (any more)."""
        with self._open() as db, db:
            db.execute("BEGIN IMMEDIATE")
            lease = self._find(db, name, tenant)
            if lease is None:
                return None
            lease = replace(lease, expires=expires, ttl=expires - self._clock())
            db.execute("REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", lease._row())
        return lease

    def remove(self, name: str, tenant: str) -> bool:
        """End a lease; False if there is none."""
        with self._open() as db, db:
            now = self._clock()
            done = db.execute(
                "DELETE FROM leases WHERE id = ? AND tenant = ? AND expires > ?", (name, tenant, now)
            )  # fmt: skip
            return done.rowcount > 0

    def page(self, tenant: str, limit: int, after: str = "") -> list[Lease]:
        """Leases of a tenant, the newest first, `limit` at most; `after` is the last one of the page before."""
        with self._open() as db:
            last = db.execute("SELECT created FROM leases WHERE id = ? AND tenant = ?", (after, tenant)).fetchone()
            if after and last is None:
                return []
            created = last[0] if last else float("inf")
            rows = db.execute(
                "SELECT * FROM leases WHERE tenant = ? AND expires > ? AND (created, id) < (?, ?) "
                "ORDER BY created DESC, id DESC LIMIT ?",
                (tenant, self._clock(), created, after, limit),
            ).fetchall()
            return [Lease._of(row) for row in rows]

    def count(self) -> int:
        """How many leases have not expired, of all tenants."""
        with self._open() as db:
            (count,) = db.execute("SELECT count(*) FROM leases WHERE expires > ?", (self._clock(),)).fetchone()
            return int(count)

    def _find(self, db: sqlite3.Connection, name: str, tenant: str) -> Lease | None:
        row = db.execute(
            "SELECT * FROM leases WHERE id = ? AND tenant = ? AND expires > ?", (name, tenant, self._clock())
        ).fetchone()
        return None if row is None else Lease._of(row)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        path = self._root / LEASES_FILE
        if not (self._is_ready and path.exists()):
            self._make(path)
        with _reading(path), closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as db:
            yield db

    def _make(self, path: Path) -> None:
        """Make the file if there is none, and check what is in it."""
        try:
            make_directory(self._root, self._root)
            clear_place(path)
            make_file(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written ({error.strerror})") from error
        with _reading(path), closing(sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)) as db:
            if is_empty(db):
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    if is_empty(db):
                        db.execute(_SCHEMA)
            _require_schema(db)
        self._is_ready = True


def leased_keys(root: Path, now: float | None = None) -> frozenset[str]:
    """The objects of all leases that have not expired.

    Raises:
        StoreError: the file is damaged: nobody knows which objects must stay.
    """
    path = root / LEASES_FILE
    if not os.path.exists(path):
        return frozenset()
    with _reading(path), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.execute(f"PRAGMA busy_timeout = {int(_WAIT_S * 1000)}")
        if is_empty(db):
            return frozenset()
        _require_schema(db)
        rows = db.execute("SELECT body FROM leases WHERE expires > ?", (now or time.time(),)).fetchall()
        keys = {entry[0] for (body,) in rows for entry in json.loads(body)["objects"]}
    return frozenset(key for key in keys if is_key(key))


def _require_schema(db: sqlite3.Connection) -> None:
    if not has_schema(db, _SCHEMA):
        raise sqlite3.DatabaseError("has other tables")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises into a StoreError."""
    try:
        yield
    except (sqlite3.Error, ValueError, LookupError, TypeError) as error:
        raise StoreError(
            f"{path}: cannot be used ({error}); if it is damaged, remove it: its leases end, and no object is lost"
        ) from error
