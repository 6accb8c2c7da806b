"""Eviction, expiry and pins: the least recently used goes first, nothing that is kept goes, whatever the clock says."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from chunks import flip, make_chunk, put_many, set_age

from pictool.errors import StoreError
from pictool.store import eviction as space
from pictool.store import upkeep as life
from pictool.store.entries import Entry, entries
from pictool.store.files import atomic_write
from pictool.store.store import Store
from pictool.store.usage import Counts


def size_of_one(store: Store) -> int:
    return store.path(store.keys()[0]).stat().st_size


def test_gc_evicts_what_was_used_least_recently(store: Store) -> None:
    keys = put_many(store, 6)
    one = size_of_one(store)
    done = life.gc(store, 4 * one)
    assert set(store.keys()) == set(keys[2:])
    assert (done.evicted.count, done.evicted.num_bytes, done.num_bytes) == (2, 2 * one, 4 * one)
    assert life.gc(store, 4 * one).evicted.count == 0


@pytest.mark.parametrize("use", ["open", "has"])
def test_a_hit_makes_an_object_the_last_to_go(store: Store, use: str) -> None:
    keys = put_many(store, 4)
    store.open(keys[0]).close() if use == "open" else store.has(keys[0])
    life.gc(store, 2 * size_of_one(store))
    assert set(store.keys()) == {keys[0], keys[3]}


def test_looking_is_no_use(store: Store) -> None:
    keys = put_many(store, 3)
    store.peek(keys[0]).close()
    list(store.objects())
    life.gc(store, size_of_one(store))
    assert store.keys() == [keys[2]]


@pytest.mark.parametrize("way", ["gc", "put", "expire"])
def test_objects_are_removed_side_by_side(store: Store, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two removals meet: one after the other, the first would wait until it fails."""
    keys, remove, meeting = put_many(store, 4), space.remove, threading.Barrier(2)

    def together(entry: Entry) -> bool:
        meeting.wait(30)
        return remove(entry)

    monkeypatch.setattr(space, "remove", together)
    one = size_of_one(store)
    if way == "gc":
        life.gc(store, 2 * one)
    elif way == "put":
        Store(store.root, max_bytes=4 * one).put(make_chunk(9))  # 3.6 objects stay at most: two of four go
    else:
        life.expire(store, keys[:2])
    assert not set(keys[:2]) & set(store.keys()) and set(keys[2:]) <= set(store.keys())


def test_gc_without_a_size_removes_no_object(store: Store) -> None:
    put_many(store, 3)
    assert life.gc(store).evicted.count == 0 and len(store.keys()) == 3
    assert life.gc(Store(store.root / "absent"), 10).num_bytes == 0


def test_every_put_keeps_the_budget(store: Store) -> None:
    one = store.put(make_chunk(0)).stat().st_size
    small = Store(store.root, max_bytes=5 * one)
    for seed in range(1, 40):
        path = small.put(make_chunk(seed))
        held = sum(small.path(key).stat().st_size for key in small.keys())
        assert path.exists() and held <= 5 * one


def test_putting_again_takes_no_more_room(store: Store) -> None:
    one = store.put(make_chunk(0)).stat().st_size
    small = Store(store.root, max_bytes=2 * one + 10)
    small.put(make_chunk(1))
    for _ in range(5):
        small.put(make_chunk(1))
    assert len(small.keys()) == 2


def test_what_can_never_fit_is_refused_and_evicts_nothing(store: Store) -> None:
    keys = put_many(store, 3)
    with pytest.raises(StoreError, match="but the store may hold 1,000; allow it more"):
        Store(store.root, max_bytes=1000).put(make_chunk(9, 50))
    assert set(store.keys()) == set(keys)


def test_a_store_full_of_pins_says_so(store: Store) -> None:
    keys = put_many(store, 2)
    for key in keys:
        life.pin(store, key)
    with pytest.raises(StoreError, match="pinned objects fill"):
        Store(store.root, max_bytes=2 * size_of_one(store)).put(make_chunk(9))
    assert set(store.keys()) == set(keys)


def test_pinned_objects_stay_until_they_are_unpinned(store: Store) -> None:
    keys = put_many(store, 3)
    life.pin(store, keys[0])
    life.gc(store, 0)
    life.expire_older(store, 1)
    assert store.keys() == [keys[0]]
    with pytest.raises(StoreError, match=f"^{keys[0][:12]}: is pinned"):
        life.expire(store, [keys[0]])
    life.unpin(store, keys[0])
    assert life.expire(store, [keys[0]]).count == 1 and store.keys() == []


def test_expire_names_what_is_not_there_and_removes_nothing(store: Store) -> None:
    keys = put_many(store, 2)
    with pytest.raises(StoreError, match=f"^{'c' * 12}: no such object"):
        life.expire(store, [keys[0], "c" * 64])
    assert len(store.keys()) == 2


def test_forced_expiry_takes_the_pin_along(store: Store) -> None:
    (key,) = put_many(store, 1)
    life.pin(store, key)
    assert life.expire(store, [key], force=True).count == 1
    assert not space.pinned(store.root)


def test_expire_older_than(store: Store) -> None:
    keys = put_many(store, 4)  # the last 61 minutes old, the first 64
    assert life.expire_older(store, 62.5 * 60).count == 2
    assert set(store.keys()) == set(keys[2:])


# A clock that was wrong for a while


def test_what_a_wrong_clock_used_in_the_future_goes_in_its_turn(store: Store) -> None:
    keys = put_many(store, 3)
    one = size_of_one(store)
    set_age(store.path(keys[0]), -(10**8))
    life.gc(store, 2 * one)
    assert set(store.keys()) == {keys[0], keys[2]}
    assert store.path(keys[0]).stat().st_mtime <= time.time()
    set_age(store.path(keys[2]), -1)
    store.path(keys[2]).touch()
    life.gc(store, one)
    assert store.keys() == [keys[2]]


def test_no_age_is_so_odd_that_a_gc_fails(store: Store) -> None:
    keys = put_many(store, 3)
    for key, when in zip(keys, (0, -5, 2**33), strict=True):
        os.utime(store.path(key), (when, when))
    life.expire_older(store, 0)
    life.gc(store, 0)
    assert store.keys() == []


# Litter, and the count of bytes


def test_gc_removes_temp_files_of_the_dead_only(store: Store) -> None:
    store.put(make_chunk(1))
    dead = store.root / "tmp" / ".dead.0123.tmp"
    dead.write_bytes(b"half an object")
    with atomic_write(store.root / "out", store.root / "tmp") as file:
        done = life.gc(store)
        file.write(b"x")
    assert (done.litter.count, done.litter.num_bytes) == (1, 14)
    assert not list((store.root / "tmp").iterdir()) and (store.root / "out").read_bytes() == b"x"


@pytest.mark.parametrize("held", [b"", b"nonsense", b"0" * 20, b"9" * 20, b"1" * 30])
def test_a_wrong_count_is_put_right_by_gc(store: Store, held: bytes) -> None:
    put_many(store, 3)
    (store.root / "lock").write_bytes(held)
    life.gc(store)
    assert int((store.root / "lock").read_bytes()[:20]) == 3 * size_of_one(store)


def test_a_count_that_is_too_high_evicts_nothing_that_fits(store: Store) -> None:
    """As after a writer was killed between counting and writing."""
    put_many(store, 3)
    (store.root / "lock").write_bytes(b"9" * 20)
    Store(store.root, max_bytes=10 * size_of_one(store)).put(make_chunk(9))
    assert len(store.keys()) == 4


def test_an_object_that_is_used_while_gc_lists_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = put_many(store, 2)

    def use_then(root: Path) -> object:
        found = list(entries(root))
        store.open(keys[0]).close()
        return found

    monkeypatch.setattr(space, "entries", use_then)
    life.gc(store, size_of_one(store))
    assert keys[0] in store.keys()


# What a store holds


def test_usage(store: Store) -> None:
    keys = put_many(store, 3)
    store.open(keys[0]).close()
    store.has("c" * 64)
    flip(store.path(keys[2]), 20)
    one = size_of_one(store)
    found = life.stats(store)
    assert (found.objects, found.damaged, found.num_bytes, found.pinned) == (3, 1, 3 * one, 0)
    assert found.by_codec == {"none": space.Tally(2, 2 * one)} and list(found.by_model) == ["a" * 64]
    assert found.counts == Counts(hits=1, misses=1, hit_bytes=one, writes=3, written_bytes=3 * one)
    assert found.counts.hit_rate == 0.5
