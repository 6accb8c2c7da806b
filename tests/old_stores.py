"""What version 0.3 kept beside the objects of a store: a file for each table, and counts."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from pictool.store.usage import UsageCounts

A, B = "a" * 64, "b" * 64
LEASE = f"cache-{'1' * 32}"
BODY = f'{{"model": "m", "name": "", "ttl": 9.0, "renews": false, "objects": [["{A}", 7, "user"]]}}'
OLD = {  # as version 0.3 wrote them
    "index": ("objects (key TEXT PRIMARY KEY, inode INT, bytes INT, used INT, meta TEXT, text TEXT)", ()),
    "hits": ("hits (key TEXT PRIMARY KEY, count INT NOT NULL)", (A, 3)),
    "sources": ("sources (key TEXT PRIMARY KEY, source TEXT NOT NULL, model TEXT NOT NULL)", (A, "a.txt", "m")),
    "folders": (
        "folders (folder TEXT, target TEXT, key TEXT, path TEXT NOT NULL, PRIMARY KEY (folder, target, key))",
        (b"/n\xff", "t", A, b"\xff.txt"),
    ),
    "readings": (
        "readings (name TEXT PRIMARY KEY, reply BLOB NOT NULL, used INT NOT NULL)",
        ("x", bytes.fromhex("789caae602000000ffff").ljust(10), 1 << 40),
    ),
    "leases": (
        "leases (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL NOT NULL, "
        "body TEXT NOT NULL)",
        (LEASE, "t", 1.0, 4e9, BODY),
    ),
}
COUNTS = UsageCounts(hits=5, misses=2, writes=1)


def write_old(root: Path, *names: str) -> None:
    for name in names or OLD:
        schema, row = OLD[name]
        with closing(sqlite3.connect(root / f"{name}.sqlite3")) as db, db:
            db.execute(f"CREATE TABLE {schema} WITHOUT ROWID")
            if row:
                db.execute(f"INSERT INTO {schema.split()[0]} VALUES ({', '.join('?' * len(row))})", row)
    (root / "stats").mkdir(exist_ok=True)
    for number, counts in ((0, (2, 2, 0, 1, 0, 0, 0)), (7, (3, 0, 0, 0, 0, 0, 0))):
        (root / "stats" / f"{number:02d}").write_bytes(struct.pack("<7Q", *counts))
    (root / "stats" / "08").write_bytes(b"torn")
