"""Upkeep: gc, expiry, pins, statistics; verification and repair: damaged objects go, what cannot be judged stays."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from chunks import flip, make_chunk, put_many, size_of_one

from pictool.errors import StoreError
from pictool.store import eviction, upkeep
from pictool.store.database import DATABASE
from pictool.store.files import atomic_write
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import verify
from pictool.store.usage import UsageCounts


def test_gc_without_a_size_removes_no_object(store: Store) -> None:
    put_many(store, 3)
    assert upkeep.gc(store).evicted.count == 0 and len(store.keys()) == 3
    assert upkeep.gc(Store(store.root / "absent"), 10).num_bytes == 0


def test_gc_removes_temp_files_of_the_dead_only(store: Store) -> None:
    store.put(make_chunk(1))
    dead = store.root / "tmp" / ".dead.0123456789abcdef.tmp"
    dead.write_bytes(b"half an object")
    with atomic_write(store.root / "out", store.root / "tmp") as file:
        done = upkeep.gc(store)
        file.write(b"x")
    assert (done.litter.count, done.litter.num_bytes) == (1, 14)
    assert not list((store.root / "tmp").iterdir()) and (store.root / "out").read_bytes() == b"x"


@pytest.mark.parametrize("through_link", [False, True])
def test_gc_removes_what_a_killed_maker_of_an_inner_store_left(
    store: Store, through_link: bool, tmp_path: Path
) -> None:
    """It was killed before the directory was marked as a store. What is behind a link, or has another name, stays."""
    store.put(make_chunk(1))
    elsewhere = tmp_path / "elsewhere"
    for directory in (store.root / "prefixes", store.root / "eval" / "0123abcd", elsewhere):
        (directory / "tmp").mkdir(parents=True)
        (directory / "tmp" / ".pictool-store.0123456789abcdef.tmp").write_bytes(b"a mark")
        (directory / "tmp" / "notes.txt").write_bytes(b"mine")
    (store.root / "replicas").symlink_to(elsewhere)
    root = store.root
    if through_link:
        root = tmp_path / "link"
        root.symlink_to(store.root)
    assert upkeep.would_collect(Store(root))[0] and upkeep.gc(Store(root)).litter.count == 2
    assert len(list(elsewhere.glob("tmp/*"))) == 2 == len(list(store.root.glob("**/tmp/notes.txt")))
    assert not list(store.root.glob("prefixes/tmp/.*")) and not list(store.root.glob("eval/*/tmp/.*"))


@pytest.mark.parametrize("cache_size", [1, 1000])
def test_what_a_killed_listing_began_is_rolled_back(store: Store, cache_size: int) -> None:
    """With a small cache its journal is filled, and the index changed; else the journal is empty."""
    store.put(make_chunk(1))
    list(store.objects())
    database = store.root / DATABASE
    if (pid := os.fork()) == 0:
        db = sqlite3.connect(database, isolation_level=None)
        db.execute(f"PRAGMA cache_size = {cache_size}")
        db.execute("BEGIN IMMEDIATE")
        rows = [(f"{number:064x}", 1, 1, 1, "x" * 500, "") for number in range(200)]
        db.executemany("INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?)", rows)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    upkeep.gc(store)
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM objects").fetchone() == (1,)
    assert [stored.problem for stored in store.objects()] == [None]


def test_gc_looks_into_the_stores_within(store: Store) -> None:
    """As evaluations have them."""
    inner = store.within("eval", "0123abcd")
    inner.put(make_chunk(1))
    (inner.root / "tmp" / ".dead.0123456789abcdef.tmp").write_bytes(b"half an object")
    assert upkeep.gc(store, 0).litter.num_bytes == 14
    assert not list((inner.root / "tmp").iterdir()) and len(inner.keys()) == 1


# Expiry and pins


def test_pinned_objects_stay_until_they_are_unpinned(store: Store) -> None:
    keys = put_many(store, 3)
    upkeep.pin(store, keys[0])
    upkeep.gc(store, 0)
    upkeep.expire_older(store, 1)
    assert store.keys() == [keys[0]]
    with pytest.raises(StoreError, match=f"^{keys[0][:12]}: "):
        upkeep.expire(store, [keys[0]])
    upkeep.unpin(store, keys[0])
    assert upkeep.expire(store, [keys[0]]).count == 1 and store.keys() == []


def test_expire_names_what_is_not_there_and_removes_nothing(store: Store) -> None:
    keys = put_many(store, 2)
    with pytest.raises(StoreError, match=f"^{'c' * 12}: "):
        upkeep.expire(store, [keys[0], "c" * 64])
    assert len(store.keys()) == 2


def test_forced_expiry_takes_the_pin_along(store: Store) -> None:
    (key,) = put_many(store, 1)
    upkeep.pin(store, key)
    assert upkeep.expire(store, [key], force=True).count == 1
    assert not eviction.pinned(store.root)


def test_expire_older_than(store: Store) -> None:
    keys = put_many(store, 4)  # the last 61 minutes old, the first 64
    assert upkeep.expire_older(store, 62.5 * 60).count == 2
    assert set(store.keys()) == set(keys[2:])


# What a store holds


def test_stats(store: Store) -> None:
    keys = put_many(store, 3)
    store.open(keys[0]).close()
    store.has("c" * 64)
    flip(store.path(keys[2]), 20)
    size = size_of_one(store)
    stats = upkeep.stats(store)
    assert (stats.objects, stats.damaged, stats.num_bytes, stats.pinned) == (3, 1, 3 * size, 0)
    assert stats.by_codec == {"none": eviction.Tally(2, 2 * size)} and list(stats.by_model) == ["a" * 64]
    assert stats.counts == UsageCounts(hits=1, misses=1, hit_bytes=size, writes=3, written_bytes=3 * size)
    assert stats.counts.hit_rate == 0.5


# Verifying and repairing


@pytest.fixture
def paths(store: Store) -> list[Path]:
    return sorted(store.put(make_chunk(seed)) for seed in range(4))


def test_a_whole_store(store: Store, paths: list[Path]) -> None:
    report = verify(store)
    assert (report.objects, report.problems, report.repaired) == (4, {}, ())
    assert report.num_bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("offset", [0, 20, 700, -1, -40])
def test_repair_takes_out_the_damaged_and_no_other(store: Store, paths: list[Path], offset: int) -> None:
    flip(paths[1], offset)
    assert list(verify(store).problems) == [paths[1].stem] and paths[1].exists()
    report = verify(store, repair=True)
    assert list(report.problems) == [*report.repaired] == [paths[1].stem]
    assert store.keys() == [paths[0].stem, paths[2].stem, paths[3].stem]
    assert verify(store).problems == {}


def test_an_object_under_another_name_is_removed(store: Store, paths: list[Path]) -> None:
    shutil.copy(paths[0], paths[1])
    assert verify(store, repair=True).repaired == (paths[1].stem,)
    assert store.keys() == [paths[0].stem, paths[2].stem, paths[3].stem]


def test_an_object_of_another_version_stays(store: Store, paths: list[Path]) -> None:
    paths[0].write_bytes(paths[0].read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    report = verify(store, repair=True)
    assert list(report.problems) == [paths[0].stem] and report.repaired == () and paths[0].exists()


def test_what_the_system_does_not_let_be_read_stays(
    store: Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "preadv", fail)
    report = verify(store, repair=True)
    assert len(report.problems) == 4 and report.repaired == () and all(path.exists() for path in paths)


def test_one_that_was_replaced_meanwhile_stays(
    store: Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = paths[0].read_bytes()
    flip(paths[0], -1)
    check, calls = ObjectFile.verify, []

    def replaced(file: ObjectFile) -> None:
        calls.append(file.path)
        try:
            check(file)
        finally:
            if calls.count(paths[0]) == 1:
                paths[0].write_bytes(whole)

    monkeypatch.setattr(ObjectFile, "verify", replaced)
    assert verify(store, repair=True).repaired == () and paths[0].read_bytes() == whole


def test_one_that_disappears_meanwhile_is_no_problem(store: Store, paths: list[Path]) -> None:
    report = verify(store, on_object=lambda _: paths[3].unlink(missing_ok=True))
    assert report.problems == {} and report.objects == 3


def test_what_another_process_repaired_meanwhile_is_no_problem(
    store: Store, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was taken out, one was compiled again, between reading all objects and taking out the damaged ones."""
    whole = paths[1].read_bytes()
    for path in paths[:3]:
        flip(path, -1)
    take_out_all = upkeep._take_out_all

    def later(store: Store, problems: dict[str, str], check: upkeep.Check | None) -> tuple[str, ...]:
        paths[0].unlink()
        paths[1].write_bytes(whole)
        return take_out_all(store, problems, check)

    monkeypatch.setattr(upkeep, "_take_out_all", later)
    report = verify(store, repair=True)
    assert list(report.problems) == [*report.repaired] == [paths[2].stem]
