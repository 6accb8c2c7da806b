"""Leases keep objects until they expire, outlive their process, and exist for their tenant only."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chunks import make_chunk

import pictool.store.leases as leases_module
from pictool.errors import StoreError
from pictool.store.database import DATABASE
from pictool.store.eviction import pin, unpin
from pictool.store.leases import LeasedObject, Leases, Share, ShareError, leased_keys
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


def _impatient(connect: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return connect(*arguments, **{**options, "timeout": 0.0})


def test_threads_take_turns_to_lease(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    leases, connect = Leases(store.root), sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(_impatient, connect))  # who meets another transaction fails
    with ThreadPoolExecutor(8) as threads:
        names = [
            lease.id for lease in threads.map(lambda _: leases.add("t", "m", objects("a" * 64), 4e9), range(40))
        ]  # fmt: skip
    assert len(set(names)) == 40 == leases.count()


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
    with pytest.raises(StoreError, match=f"^{first[:12]}: "):
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
    (store.root / DATABASE).write_bytes(b"no database at all, and longer than a header of sqlite is" * 9)
    for use in (lambda: Leases(store.root).page("t", 1), lambda: gc(store, 1)):
        with pytest.raises(StoreError, match=DATABASE):
            use()
    assert store.keys() == [key]


@pytest.mark.parametrize(
    "body", ["{nonsense", "[]", "{}", "5", '{"objects": [[]]}', '{"objects": [["a", "x", "user"]]}', '{"objects": [5]}']
)
def test_a_damaged_row_is_named(leases: Leases, store: Store, body: str) -> None:
    lease = leases.add("t", "m", [LeasedObject("a" * 64, 1)], 2000.0)
    with closing(sqlite3.connect(store.root / DATABASE)) as db, db:
        db.execute("UPDATE leases SET body = ?", (body,))
    for use in (lambda: leases.page("t", 1), lambda: leases.find(lease.id, "t"), lambda: leases.use(lease.id, "t")):
        with pytest.raises(StoreError, match=DATABASE):
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


def test_a_writer_that_was_killed_in_the_middle_costs_nothing(store: Store, tmp_path: Path) -> None:
    """Its journal is hot: the next reader undoes what it had begun, also one that only asks what is leased."""
    Store(tmp_path).ensure_store()
    leases = Leases(store.root)
    names = [leases.add("t", "m", objects(f"{i:064x}"), 4e9, name="x" * 500).id for i in range(40)]
    with closing(sqlite3.connect(store.root / DATABASE, isolation_level=None)) as db:
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE leases SET expires = 0, body = body || '   '")
        for suffix in ("", "-journal"):
            shutil.copyfile(store.root / f"{DATABASE}{suffix}", tmp_path / f"{DATABASE}{suffix}")
    readonly = f"{(tmp_path / DATABASE).as_uri()}?mode=ro"
    with closing(sqlite3.connect(readonly, uri=True)) as db, pytest.raises(sqlite3.OperationalError):
        db.execute("SELECT * FROM leases").fetchall()
    assert len(leased_keys(tmp_path)) == 40
    assert all(Leases(tmp_path).find(name, "t") for name in names)


def test_a_clock_that_jumps_ahead_ends_no_lease_for_good(leases: Leases, clock: Clock) -> None:
    lease = leases.add("t", "m", objects("a" * 64), 1010.0)
    clock.now = 1e9
    leases.add("u", "m", objects("a" * 64), 2e9)
    assert leases.find(lease.id, "t") is None
    clock.now = 1001.0
    assert leases.find(lease.id, "t") == lease


def test_what_has_expired_is_kept_within_bounds(leases: Leases, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "_EXPIRED_BYTES", 1000)
    made = []
    for _ in range(30):
        clock.now += 1
        made.append(leases.add("t", "m", objects("a" * 64), clock.now + 1))
    clock.now = 0.0
    kept = [lease.id for lease in made if leases.find(lease.id, "t")]
    assert kept == [lease.id for lease in made[-len(kept) :]] and 3 < len(kept) < 20


def test_the_objects_of_a_lease_stay_for_requests_that_were_sent_before_its_end(store: Store) -> None:
    Leases(store.root).add("t", "m", objects("a" * 64), 1000.0)
    assert leased_keys(store.root, 1599.0) == {"a" * 64} and not leased_keys(store.root, 1600.0)


def test_a_tenant_leases_its_share_and_no_more(store: Store, clock: Clock) -> None:
    first, second, third = put(store, 1, 2, 3)
    size = store.path(first).stat().st_size
    leases = Leases(store.root, clock, Share(num_bytes=2 * size + size // 2, num_objects=4, num_leases=3))
    kept = leases.add("t", "m", objects(first, second), 2000.0)
    again = leases.add("t", "m", objects(first), 2000.0)
    for keys, word in (((third,), "bytes"), ((first, second), "objects")):
        with pytest.raises(ShareError, match=word):
            leases.add("t", "m", objects(*keys), 2000.0)
    leases.add("t", "m", objects(first), 2000.0)
    with pytest.raises(ShareError, match="caches"):
        leases.add("t", "m", [], 2000.0)
    assert leases.add("another", "m", objects(first, third), 2000.0)
    assert leases.remove(again.id, "t") and leases.remove(kept.id, "t")
    assert leases.add("t", "m", objects(third), 2000.0), "what ended counts no more"


def test_what_an_expired_lease_still_keeps_counts_in_the_share(store: Store, clock: Clock) -> None:
    """Else short leases of one tenant could fill a store for ten minutes, and others would find no room."""
    first, second = put(store, 1, 2)
    size = store.path(first).stat().st_size
    leases = Leases(store.root, clock, Share(num_bytes=size + size // 2, num_leases=1))
    leases.add("t", "m", objects(first), clock.now + 5)
    clock.now += 599
    with pytest.raises(ShareError, match="bytes"):
        leases.add("t", "m", objects(second), clock.now + 5)
    assert leases.add("t", "m", objects(first), clock.now + 0.5), "neither its number, nor the same object twice"
    clock.now += 601
    assert first not in leased_keys(store.root, clock.now) and leases.add("t", "m", objects(second), clock.now + 5)


def test_to_end_a_lease_takes_no_room_on_the_disk(store: Store) -> None:
    leases = Leases(store.root)
    names = [leases.add("t", "m", objects(*(f"{i:064x}" for i in range(j, j + 400))), 4e9).id for j in range(6)]
    gc(store, 1 << 30)

    def room() -> list[tuple[int, int]]:
        files = [(store.root / f"{DATABASE}{suffix}").stat() for suffix in ("", "-journal")]
        return [(file.st_ino, max(file.st_blocks * 512, file.st_size)) for file in files]

    before = room()
    for name in names:
        assert leases.extend(name, "t", 5e9) and leases.remove(name, "t")
    assert room() == before and leases.count() == 0


def test_what_is_no_file_is_named(store: Store) -> None:
    Leases(store.root).add("t", "m", objects("a" * 64), 4e9)
    (store.root / f"{DATABASE}-journal").unlink()
    os.mkfifo(store.root / f"{DATABASE}-journal")
    for use in (lambda: Leases(store.root).count(), lambda: leased_keys(store.root)):
        with pytest.raises(StoreError, match=f"{DATABASE}-journal: "):
            use()


@pytest.mark.parametrize(
    "body",
    ['{"objects": [[["a"], 1, "user"]]}', '{"objects": [[5, 1, "user"]]}', '{"objects": [["x", 1, "user"]]}',
     '{"objects": {"a": 1}}', "[" * 100_000, '{"objects": [["' + "a" * 64 + '", 1e999, "user"]]}'],
    ids=lambda body: body[:24],
)  # fmt: skip
def test_a_forged_row_is_an_error_and_nothing_is_evicted(store: Store, body: str) -> None:
    (key,) = put(store, 1)
    Leases(store.root).add("t", "m", objects(key), 4e9)
    with closing(sqlite3.connect(store.root / DATABASE)) as db, db:
        db.execute("UPDATE leases SET body = ?", (body,))
    with pytest.raises(StoreError, match=DATABASE):
        gc(store, 1)
    assert store.keys() == [key]


def test_what_cannot_be_an_id_is_nobody_s(leases: Leases) -> None:
    for name in ("\ud800", "", "cache-" + "g" * 32, "a" * 10_000):
        assert leases.find(name, "t") is None and not leases.remove(name, "t") and leases.page("t", 1, name) == []
