"""Leases keep objects until they expire, outlive their process, and exist for their tenant only."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from chunks import make_chunk

from pictool.errors import StoreError
from pictool.store.eviction import pin, unpin
from pictool.store.leases import LEASES_FILE, LeasedObject, Leases, leased_keys
from pictool.store.store import Store
from pictool.store.upkeep import expire, expire_older, gc

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(store: Store, clock: Clock) -> Leases:
    return Leases(store.root, clock)


def objects(*keys: str) -> list[LeasedObject]:
    return [LeasedObject(key, 7) for key in keys]


def test_a_lease_is_its_tenants_until_it_expires(leases: Leases, clock: Clock) -> None:
    lease = leases.add("t", "m", objects("a" * 64), 1010.0, name="book")
    assert leases.find(lease.id, "t") == lease and lease.num_tokens == 7 and lease.ttl == 10
    assert leases.find(lease.id, "u") is None
    assert not leases.remove(lease.id, "u") and leases.extend(lease.id, "u", 1020.0) is None
    clock.now = 1010.0
    assert leases.find(lease.id, "t") is None and leases.extend(lease.id, "t", 1020.0) is None
    assert leases.page("t", 10) == [] and not leases.remove(lease.id, "t") and leases.count() == 0


def test_a_lease_is_extended_renewed_and_ended(leases: Leases, clock: Clock) -> None:
    lease = leases.add("t", "m", objects("a" * 64), 1010.0, renews=True)
    fixed = leases.add("t", "m", objects("a" * 64), 1010.0)
    clock.now = 1005.0
    used = leases.use(lease.id, "t")
    assert used is not None and used.expires == 1015.0 and leases.use(fixed.id, "t") == fixed
    longer = leases.extend(fixed.id, "t", 1100.0)
    assert longer is not None and longer.ttl == 95 and leases.find(fixed.id, "t") == longer
    assert leases.remove(fixed.id, "t") and not leases.remove(fixed.id, "t")


def test_pages_are_of_one_tenant_and_have_every_lease_once(leases: Leases, clock: Clock) -> None:
    made = []
    for i in range(7):
        clock.now += i % 2  # some at the same time
        made.append(leases.add("t", "m", objects("a" * 64), 9999.0).id)
    leases.add("u", "m", objects("a" * 64), 9999.0)
    seen: list[str] = []
    while page := leases.page("t", 3, seen[-1] if seen else ""):
        seen += [lease.id for lease in page]
    assert sorted(seen) == sorted(made) and leases.page("u", 3, seen[0]) == []
    times = [lease.created for lease in leases.page("t", 10)]
    assert times == sorted(times, reverse=True)


def put(store: Store, *seeds: int) -> list[str]:
    chunks = [make_chunk(seed) for seed in seeds]
    for compiled in chunks:
        store.put(compiled)
    return [compiled.meta.key for compiled in chunks]


def test_leased_objects_stay_until_the_last_lease_or_pin_ends(store: Store) -> None:
    leases = Leases(store.root)
    first, second = put(store, 1, 2)
    a, b = (leases.add("t", "m", objects(first), 4e9) for _ in range(2))
    gc(store, 1)
    assert store.keys() == [first], "the other one was evicted"
    leases.remove(a.id, "t")
    with pytest.raises(StoreError, match="leased"):
        expire(store, [first])
    assert expire_older(store, -10).count == 0
    pin(store.root, first)
    leases.remove(b.id, "t")
    gc(store, 1)
    assert store.keys() == [first], "the pin is left"
    unpin(store.root, first)
    assert leased_keys(store.root) == frozenset()
    gc(store, 1)
    assert store.keys() == [] and second not in store.keys()


def test_an_expired_lease_keeps_nothing(store: Store) -> None:
    (key,) = put(store, 1)
    Leases(store.root).add("t", "m", objects(key), 1.0)
    gc(store, 1)
    assert store.keys() == []


def test_a_damaged_file_is_named_and_nothing_is_evicted(store: Store) -> None:
    (key,) = put(store, 1)
    (store.root / LEASES_FILE).write_bytes(b"no database at all, and longer than a header of sqlite is" * 9)
    for use in (lambda: Leases(store.root).page("t", 1), lambda: gc(store, 1)):
        with pytest.raises(StoreError, match=rf"{LEASES_FILE}.*remove it"):
            use()
    assert store.keys() == [key]


@pytest.mark.parametrize(
    "body", ["{nonsense", "[]", "{}", "5", '{"objects": [[]]}', '{"objects": [["a", "x", "user"]]}', '{"objects": [5]}']
)
def test_a_damaged_row_is_named(leases: Leases, store: Store, body: str) -> None:
    lease = leases.add("t", "m", [LeasedObject("a" * 64, 1)], 2000.0)
    with closing(sqlite3.connect(store.root / LEASES_FILE)) as db, db:
        db.execute("UPDATE leases SET body = ?", (body,))
    for use in (lambda: leases.page("t", 1), lambda: leases.find(lease.id, "t"), lambda: leases.use(lease.id, "t")):
        with pytest.raises(StoreError, match=rf"{LEASES_FILE}.*remove it"):
            use()
    assert leases.remove(lease.id, "t") and leases.page("t", 1) == []


def test_a_lease_that_was_given_away_outlives_a_kill(store: Store) -> None:
    script = (
        "import sys, time; from pathlib import Path; from pictool.store.leases import *\n"
        "leases = Leases(Path(sys.argv[1]))\n"
        "while True: print(leases.add('t', 'm', [LeasedObject('a' * 64, 1)], 4e9).id, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(store.root)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        told = [process.stdout.readline().strip() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += [line.strip() for line in process.stdout if line.endswith("\n")]
    leases = Leases(store.root)
    assert all(leases.find(name, "t") for name in told)
