"""The index follows the files: what is new, gone, replaced or damaged; and it may be lost at any time."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from chunks import make_chunk

from pictool.store.database import DATABASE
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store


def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The objects that are opened from now on."""
    paths: list[Path] = []
    init = ObjectFile.__init__

    def spied(self: ObjectFile, path: Path) -> None:
        paths.append(Path(path))
        init(self, path)

    monkeypatch.setattr(ObjectFile, "__init__", spied)
    return paths


def without(store: Store) -> list[object]:
    """The listing of a copy that never had an index."""
    copy = Store(store.root.with_name("copy"))
    shutil.copytree(store.root, copy.root, ignore=shutil.ignore_patterns(f"{DATABASE}*"))
    objects = listing(copy)
    shutil.rmtree(copy.root)
    return objects


def listing(store: Store) -> list[object]:
    return [
        (stored.key, stored.num_bytes, stored.meta, stored.text, stored.problem is None, stored.used_ns)
        for stored in store.objects()
    ]


def test_no_object_is_opened_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sorted(store.put(make_chunk(seed)) for seed in range(4))
    files = opened(monkeypatch)
    first = listing(store)
    assert sorted(files) == paths
    assert listing(store) == first and len(files) == 4
    new = store.put(make_chunk(9))
    assert len(listing(store)) == 5 and files[4:] == [new]


def test_it_follows_the_files(store: Store) -> None:
    paths = sorted(store.put(make_chunk(seed)) for seed in range(6))
    listing(store)
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    shutil.copy(paths[3], paths[2])
    os.utime(paths[4], (1, 1))
    store.put(make_chunk(7))
    assert listing(store) == without(store)
    assert listing(store) == without(store)


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_lost_index_is_made_anew(store: Store, is_empty: bool) -> None:
    for seed in range(3):
        store.put(make_chunk(seed))
    first = listing(store)
    index = store.root / DATABASE
    index.write_bytes(b"") if is_empty else index.unlink()
    assert listing(store) == first
    assert listing(store) == first and sqlite3.connect(index).execute("SELECT count(*) FROM objects").fetchone() == (3,)


@pytest.mark.parametrize("damage", [b"nonsense" * 600, b"SQLite format 3\0" + b"\xff" * 5000], ids=["text", "header"])
def test_without_a_database_all_objects_are_opened(store: Store, damage: bytes) -> None:
    for seed in range(3):
        store.put(make_chunk(seed))
    first = listing(store)
    (store.root / DATABASE).write_bytes(damage)
    assert listing(store) == first == listing(store)


def test_pages_that_are_damaged_in_the_middle(store: Store) -> None:
    for seed in range(40):
        store.put(make_chunk(seed))
    first = listing(store)
    index = store.root / DATABASE
    whole = index.read_bytes()
    for at in range(4096, len(whole), 4096):
        index.write_bytes(whole[:at] + b"\xaa" * 4096 + whole[at + 4096 :])
        assert listing(store) == first


def test_records_that_make_no_sense_are_read_again(store: Store) -> None:
    store.put(make_chunk(1))
    first = listing(store)
    with sqlite3.connect(store.root / DATABASE) as db:
        db.execute("UPDATE objects SET meta = '{}'")
    assert listing(store) == first


def test_a_database_of_another_version_is_left_as_it_is(store: Store) -> None:
    store.put(make_chunk(1))
    first = listing(store)
    with sqlite3.connect(store.root / DATABASE) as db:
        db.execute("CREATE TABLE more (x)")
        db.execute("PRAGMA user_version = 99")
    before = (store.root / DATABASE).read_bytes()
    assert listing(store) == first and (store.root / DATABASE).read_bytes() == before


def test_a_place_where_no_index_can_be_is_listed_all_the_same(store: Store) -> None:
    store.put(make_chunk(1))
    (store.root / DATABASE).mkdir()
    assert len(listing(store)) == 1


def test_listing_goes_on_after_a_key(store: Store) -> None:
    keys = sorted(store.put(make_chunk(seed)).stem for seed in range(9))
    assert [stored.key for stored in store.objects(keys[3])] == keys[4:]
    assert [stored.key for stored in store.objects(keys[3][:1])] == [key for key in keys if key > keys[3][:1]]
    assert list(store.objects("g")) == []


@pytest.mark.parametrize("name", ["a b", "ü?#%", "new\nline", "-x", "tab\t'\"", os.fsdecode(b"\xff\xfe")])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path / name)
    path = store.put(make_chunk(1))
    assert [stored.path for stored in store.objects()] == [path]
    assert store.has(path.stem) and (store.root / DATABASE).exists()
