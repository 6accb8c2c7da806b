"""Leases: names that a server gives to objects of a store, each with an expiry.

Each is a row of the store's database, written before its name is given away. The journal keeps room on the disk, so
that leases can be ended on a full one.

Several leases may share an object. While one of them has not expired, and a while after, the object is neither evicted
nor expired, by whatever process; when the last one ends, nothing happens to the object until space is needed. A lease
belongs to a tenant, and to others it does not exist. Times are seconds since 1970, by the system's clock: a lease ends
on time whether or not the server runs. Rows of leases that have expired stay for a time, so that a process whose clock
is wrong ends none for good.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pictool.errors import NoRoomError, StoreError
from pictool.reading import open_regular
from pictool.store.database import JOURNAL, reading, writing
from pictool.store.directory import ensure_store, mark_leased, require_store
from pictool.store.entries import Entry, is_key, object_path

_ID = re.compile("cache-[0-9a-f]{32}")
_KEPT_S = 600.0  # that objects stay after their lease: requests that were sent before may still wait
_EXPIRED_BYTES = 16 << 20  # of leases that have expired, which are kept
_JOURNAL_BYTES = 64 << 10
_PURGE = (  # those that expired first, beyond some bytes of those that have expired
    "DELETE FROM leases WHERE id IN (SELECT id FROM (SELECT id, sum(length(body)) OVER (ORDER BY expires DESC, id) "
    "AS bytes FROM leases WHERE expires <= ?) WHERE bytes > ?)"
)
_log = logging.getLogger("pictool.serve")
Clock = Callable[[], float]


@dataclass(frozen=True)
class LeasedObject:
    """An object of a lease: its key, its tokens, and the role of the message that it is the text of.

    One that `continues` is of the same text as the object before it.
    """

    key: str
    num_tokens: int
    role: str = "user"
    continues: bool = False


class ShareError(NoRoomError):
    """A tenant's leases would be more than its share; says what of."""


@dataclass(frozen=True)
class Share:
    """What the leases of one tenant may have at most.

    Fields:
        num_bytes: of objects that they keep, each of which counts once, for `_KEPT_S` after a lease expired too; None:
            any.
    """

    num_bytes: int | None = None
    num_objects: int = 100_000
    num_leases: int = 10_000

    def require(self, num_bytes: int, num_objects: int, num_leases: int) -> None:
        """Refuse what is more. Raises ShareError."""
        for count, most, what in (
            (num_bytes, self.num_bytes, f"bytes of objects, with what expired in the last {_KEPT_S / 60:.0f} minutes"),
            (num_objects, self.num_objects, "objects"),
            (num_leases, self.num_leases, "caches"),
        ):  # fmt: skip
            if most is not None and count > most:
                raise ShareError(
                    f"your caches would have {count:,d} {what}, but at most {most:,d} are allowed; delete some"
                )


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
            "objects": [
                [entry.key, entry.num_tokens, entry.role, *([True] if entry.continues else [])]
                for entry in self.objects
            ],
        }  # fmt: skip
        return self.id, self.tenant, self.created, self.expires, json.dumps(body)

    @classmethod
    def _of(cls, row: Sequence[Any]) -> Lease:
        name, tenant, created, expires, text = row
        body = json.loads(text)
        return cls(
            str(name), tenant, str(body["model"]), _objects(body), float(created), float(expires), float(body["ttl"]),
            str(body["name"]), bool(body["renews"]),
        )  # fmt: skip


def _objects(body: Any) -> tuple[LeasedObject, ...]:
    """The objects of a lease's body. Raises ValueError, TypeError or LookupError: it is damaged."""
    objects = tuple(
        LeasedObject(key, int(count), str(role), bool(continues)) for key, count, role, *continues in body["objects"]
    )
    if any(not is_key(entry.key) for entry in objects):
        raise ValueError("a row has no key of an object where one belongs")
    return objects


class Leases:
    """The leases of one store. Many processes may have them open; each call is one transaction.

    Every method raises StoreError for a file that is damaged or cannot be written.
    """

    def __init__(self, root: Path, clock: Clock = time.time, share: Share = Share()) -> None:
        self._root, self._clock, self._share = root, clock, share

    def add(
        self, tenant: str, model: str, objects: Sequence[LeasedObject], expires: float, *, name: str = "",
        renews: bool = False,
    ) -> Lease:  # fmt: skip
        """Lease objects until `expires`. Once this returns, the lease outlives a power failure.

        Raises:
            ShareError: it would be more than the tenant's share.
        """
        now = self._clock()
        lease = Lease(
            f"cache-{secrets.token_hex(16)}", tenant, model, tuple(objects), now, expires, expires - now, name, renews
        )
        ensure_store(self._root)
        mark_leased(self._root)
        with writing(self._root) as db:
            db.execute(_PURGE, (now, _EXPIRED_BYTES))
            self._require_share(db, lease)
            db.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?)", lease._row())
        self._reserve()
        return lease

    def _require_share(self, db: sqlite3.Connection, lease: Lease) -> None:
        rows = db.execute(
            "SELECT body, expires > ? FROM leases WHERE tenant = ? AND expires > ?",
            (lease.created, lease.tenant, lease.created - _KEPT_S),
        ).fetchall()
        kept = [(_objects(json.loads(body)), lives) for body, lives in rows] + [(lease.objects, True)]
        num_bytes = 0
        if self._share.num_bytes is not None:
            keys = {entry.key for objects, _ in kept for entry in objects}
            found = [Entry.of(object_path(self._root, key)) for key in keys]
            num_bytes = sum(entry.num_bytes for entry in found if entry is not None)
        live = [objects for objects, lives in kept if lives]
        self._share.require(num_bytes, sum(map(len, live)), len(live))

    def _reserve(self) -> None:
        """Give the journal room on the disk, which it keeps: to end a lease, or to change it, then needs no more."""
        with suppress(OSError), os.fdopen(open_regular(self._root / JOURNAL, os.O_RDWR | os.O_NOFOLLOW)) as file:
            if os.fstat(file.fileno()).st_size < _JOURNAL_BYTES:
                os.posix_fallocate(file.fileno(), 0, _JOURNAL_BYTES)

    def find(self, name: str, tenant: str) -> Lease | None:
        """A lease of a tenant that has not expired."""
        with reading(self._root) as db:
            return self._find(db, name, tenant)

    def use(self, name: str, tenant: str) -> Lease | None:
        """`find` for a request: a lease that renews lasts its whole time again, if that can be written."""
        lease = self.find(name, tenant)
        if lease is None or not lease.renews:
            return lease
        try:
            return self.extend(name, tenant, self._clock() + lease.ttl)
        except StoreError as error:
            _log.warning("pic: the lifetime of a used cache was not extended: %s", error)
            return lease

    def extend(self, name: str, tenant: str, expires: float) -> Lease | None:
        """Let a lease end at another time; None if there is none (any more)."""
        if not self._has(name, tenant):
            return None
        with writing(self._root) as db:
            lease = self._find(db, name, tenant)
            if lease is None:
                return None
            lease = replace(lease, expires=expires, ttl=expires - self._clock())
            db.execute("REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", lease._row())
        return lease

    def remove(self, name: str, tenant: str) -> bool:
        """End a lease; False if there is none."""
        if not self._has(name, tenant):
            return False
        with writing(self._root) as db:
            done = db.execute(
                "DELETE FROM leases WHERE id = ? AND tenant = ? AND expires > ?", (_id(name), tenant, self._clock())
            )  # fmt: skip
            return done.rowcount > 0

    def page(self, tenant: str, limit: int, after: str = "") -> list[Lease]:
        """Leases of a tenant, the newest first, `limit` at most; `after` is the last one of the page before."""
        with reading(self._root) as db:
            last = db.execute(
                "SELECT created FROM leases WHERE id = ? AND tenant = ?", (_id(after), tenant)
            ).fetchone()  # fmt: skip
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
        with reading(self._root) as db:
            (count,) = db.execute("SELECT count(*) FROM leases WHERE expires > ?", (self._clock(),)).fetchone()
            return int(count)

    def _has(self, name: str, tenant: str) -> bool:
        """Whether there is such a lease, damaged or not, without a write to the store."""
        with reading(self._root) as db:
            return self._row(db, name, tenant) is not None

    def _find(self, db: sqlite3.Connection, name: str, tenant: str) -> Lease | None:
        row = self._row(db, name, tenant)
        return None if row is None else Lease._of(row)

    def _row(self, db: sqlite3.Connection, name: str, tenant: str) -> Any:
        return db.execute(
            "SELECT * FROM leases WHERE id = ? AND tenant = ? AND expires > ?", (_id(name), tenant, self._clock())
        ).fetchone()


def leased_keys(root: Path, now: float | None = None) -> frozenset[str]:
    """The objects of all leases that have not expired, or not long ago.

    Raises:
        StoreError: the file is damaged: nobody knows which objects must stay. The directory has other files, no store.
    """
    require_store(root)
    with reading(root) as db:
        since = (time.time() if now is None else now) - _KEPT_S
        rows = db.execute("SELECT body FROM leases WHERE expires > ?", (since,)).fetchall()
        return frozenset(entry.key for (body,) in rows for entry in _objects(json.loads(body)))


def _id(name: str) -> str:
    """A lease's id; "", which none has, for what cannot be one."""
    return name if _ID.fullmatch(name) else ""
