"""Eviction: the least recently used goes first, a budget is kept, whatever the clock and the count say."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from chunks import make_chunk, put_many, set_age, size_of_one

from pictool.errors import StoreError
from pictool.store import eviction, upkeep
from pictool.store.entries import Entry, entries
from pictool.store.store import Store


def test_gc_evicts_what_was_used_least_recently(store: Store) -> None:
    keys = put_many(store, 6)
    size = size_of_one(store)
    done = upkeep.gc(store, 4 * size)
    assert set(store.keys()) == set(keys[2:])
    assert (done.evicted.count, done.evicted.num_bytes, done.num_bytes) == (2, 2 * size, 4 * size)
    assert upkeep.gc(store, 4 * size).evicted.count == 0


@pytest.mark.parametrize("use", ["open", "has"])
def test_a_hit_makes_an_object_the_last_to_go(store: Store, use: str) -> None:
    keys = put_many(store, 4)
    store.open(keys[0]).close() if use == "open" else store.has(keys[0])
    upkeep.gc(store, 2 * size_of_one(store))
    assert set(store.keys()) == {keys[0], keys[3]}


def test_peeking_is_no_use(store: Store) -> None:
    keys = put_many(store, 3)
    store.peek(keys[0]).close()
    list(store.objects())
    upkeep.gc(store, size_of_one(store))
    assert store.keys() == [keys[2]]


@pytest.mark.parametrize("way", ["gc", "put", "expire"])
def test_objects_are_removed_side_by_side(store: Store, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two removals meet: one after the other, the first would wait until it fails."""
    keys, remove, meeting = put_many(store, 4), eviction.remove, threading.Barrier(2)

    def together(entry: Entry) -> bool:
        meeting.wait(60)
        return remove(entry)

    monkeypatch.setattr(eviction, "remove", together)
    size = size_of_one(store)
    if way == "gc":
        upkeep.gc(store, 2 * size)
    elif way == "put":
        Store(store.root, max_bytes=4 * size).put(make_chunk(9))  # 3.6 objects stay at most: two of four go
    else:
        upkeep.expire(store, keys[:2])
    assert not set(keys[:2]) & set(store.keys()) and set(keys[2:]) <= set(store.keys())


def test_an_object_that_is_used_while_gc_lists_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = put_many(store, 2)

    def use_then(root: Path) -> object:
        objects = list(entries(root))
        store.open(keys[0]).close()
        return objects

    monkeypatch.setattr(eviction, "entries", use_then)
    upkeep.gc(store, size_of_one(store))
    assert keys[0] in store.keys()


# A budget


def test_every_put_keeps_the_budget(store: Store) -> None:
    size = store.put(make_chunk(0)).stat().st_size
    small = Store(store.root, max_bytes=5 * size)
    for seed in range(1, 40):
        path = small.put(make_chunk(seed))
        held = sum(small.path(key).stat().st_size for key in small.keys())
        assert path.exists() and held <= 5 * size


def test_putting_again_takes_no_more_room(store: Store) -> None:
    size = store.put(make_chunk(0)).stat().st_size
    small = Store(store.root, max_bytes=2 * size + 10)
    small.put(make_chunk(1))
    for _ in range(5):
        small.put(make_chunk(1))
    assert len(small.keys()) == 2


def test_what_can_never_fit_is_refused_and_evicts_nothing(store: Store) -> None:
    keys = put_many(store, 3)
    with pytest.raises(StoreError, match=" 1,000;"):
        Store(store.root, max_bytes=1000).put(make_chunk(9, 50))
    assert set(store.keys()) == set(keys)


def test_a_store_full_of_pins_says_so(store: Store) -> None:
    keys = put_many(store, 2)
    for key in keys:
        upkeep.pin(store, key)
    with pytest.raises(StoreError, match=str(store.root)):
        Store(store.root, max_bytes=2 * size_of_one(store)).put(make_chunk(9))
    assert set(store.keys()) == set(keys)


# A clock that was wrong for a while


def test_what_a_wrong_clock_used_in_the_future_goes_in_its_turn(store: Store) -> None:
    keys = put_many(store, 3)
    size = size_of_one(store)
    set_age(store.path(keys[0]), -(10**8))
    upkeep.gc(store, 2 * size)
    assert set(store.keys()) == {keys[0], keys[2]}
    assert store.path(keys[0]).stat().st_mtime <= time.time()
    set_age(store.path(keys[2]), -1)
    store.path(keys[2]).touch()
    upkeep.gc(store, size)
    assert store.keys() == [keys[2]]


def test_no_age_is_so_odd_that_a_gc_fails(store: Store) -> None:
    keys = put_many(store, 3)
    for key, when in zip(keys, (0, -5, 2**33), strict=True):
        os.utime(store.path(key), (when, when))
    upkeep.expire_older(store, 0)
    upkeep.gc(store, 0)
    assert store.keys() == []


# The count of bytes


@pytest.mark.parametrize("held", [b"", b"nonsense", b"0" * 20, b"9" * 20, b"1" * 30])
def test_a_wrong_count_is_put_right_by_gc(store: Store, held: bytes) -> None:
    put_many(store, 3)
    (store.root / "lock").write_bytes(held)
    upkeep.gc(store)
    assert int((store.root / "lock").read_bytes()[:20]) == 3 * size_of_one(store)


def test_a_count_that_is_too_high_evicts_nothing_that_fits(store: Store) -> None:
    """As after a writer was killed between counting and writing."""
    put_many(store, 3)
    (store.root / "lock").write_bytes(b"9" * 20)
    Store(store.root, max_bytes=10 * size_of_one(store)).put(make_chunk(9))
    assert len(store.keys()) == 4
