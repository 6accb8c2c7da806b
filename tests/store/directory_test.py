"""What makes a directory a store. Files of others stay, whatever setting names their directory."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from chunks import content, make_chunk, put_many

from pictool.errors import StoreError
from pictool.serve.files import Files
from pictool.store import upkeep
from pictool.store.directory import MARK, is_marked
from pictool.store.leases import LeasedObject, Leases
from pictool.store.objects.format import write_object
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import push
from pictool.store.scratch import scratch_directory
from pictool.store.sources import Source, add_sources, read_sources
from pictool.store.store import Store
from pictool.store.usage import UsageCounts

TEMP = ".half.0123456789abcdef.tmp"
# As the versions without a mark wrote them.
SCHEMAS = {
    "index": "CREATE TABLE objects (key TEXT PRIMARY KEY, inode INT, bytes INT, used INT, meta TEXT, text TEXT) "
    "WITHOUT ROWID",
    "hits": "CREATE TABLE hits (key TEXT PRIMARY KEY, count INT NOT NULL) WITHOUT ROWID",
    "sources": "CREATE TABLE sources (key TEXT PRIMARY KEY, source TEXT NOT NULL, model TEXT NOT NULL) WITHOUT ROWID",
    "leases": "CREATE TABLE leases (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, expires REAL "
    "NOT NULL, body TEXT NOT NULL) WITHOUT ROWID",
}


def write_database(path: Path, schema: str, row: tuple[object, ...] | None = None) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(schema)
        if row is not None:
            db.execute(f"INSERT INTO {path.stem} VALUES ({', '.join('?' * len(row))})", row)


def make_earlier(root: Path, num_objects: int = 2) -> list[str]:
    """A store as version 0.2 left it: objects, a lock, temp file, counts, side databases, a store within; its keys."""
    keys, num_bytes = [], 0
    root.mkdir(parents=True, exist_ok=True)
    for number in range(num_objects):
        chunk = make_chunk(number)
        path = root / "objects" / chunk.meta.key[:2] / f"{chunk.meta.key}.kvo"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            write_object(file, chunk)
        keys.append(chunk.meta.key)
        num_bytes += path.stat().st_size
    (root / "lock").write_text(f"{num_bytes:020d}")
    for name in ("tmp", "pins", "stats", "eval/results", "files/local"):
        (root / name).mkdir(parents=True)
    (root / "tmp" / TEMP).write_bytes(b"half")
    (root / "stats" / "03").write_bytes(bytes(56))
    (root / "eval" / "results" / "0123456789ab.jsonl").write_text("{}\n")
    for name, schema in SCHEMAS.items():
        row = {"hits": (keys[0], 3), "sources": (keys[0], "a.txt", "m")}.get(name) if keys else None
        write_database(root / f"{name}.sqlite3", schema, row)
    return keys


def home(root: Path) -> None:
    """With what pic would write, too: temp files, databases, links."""
    for name in ("tmp/thesis.doc", f"tmp/{TEMP}", "a/b/tmp/draft", "pins/map", "stats/00", "stats/2024.csv", "lock"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    for name in ("index", "hits", "sources", "leases"):
        write_database(root / f"{name}.sqlite3", "CREATE TABLE album (name TEXT)")
    (root / "check.json").write_text("{}")


def repository(root: Path) -> None:
    """A bare git repository: its objects are in directories of two digits."""
    for name in ("HEAD", "objects/9a/76725a01a82ff29a5d4166c093fcab9e8448605b", "objects/pack/x.idx", "tmp/x"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")


def web_project(root: Path) -> None:
    (root / "objects").mkdir()
    (root / "manage.py").write_text("mine")
    write_database(root / "index.sqlite3", "CREATE TABLE django_session (id TEXT)")


def only_a_database(root: Path) -> None:
    write_database(root / "index.sqlite3", "CREATE TABLE objects (id TEXT); ".rstrip("; "))
    write_database(root / "hits.sqlite3", "CREATE TABLE charts (id TEXT)")


def only_temp_files(root: Path) -> None:
    (root / "tmp").mkdir()
    (root / "tmp" / "notes.tmp").write_text("mine")


def later_store(root: Path) -> None:
    (root / MARK).write_text("pictool store 3\n")
    (root / "tmp").mkdir()
    (root / "tmp" / TEMP).write_text("theirs")


FOREIGN = [home, repository, web_project, only_a_database, only_temp_files, later_store]


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in sorted(root.rglob("*"))
    }


CHANGES: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(make_chunk(1)),
    "gc": lambda store: upkeep.gc(store, 0),
    "gc, dry": lambda store: upkeep.would_collect(store, 0),
    "expire": lambda store: upkeep.expire_older(store, 0),
    "unpin": lambda store: upkeep.unpin(store, "map"),
    "repair": lambda store: upkeep.verify(store, repair=True),
    "within": lambda store: store.within("eval", "01234567").put(make_chunk(1)),
    "lease": lambda store: Leases(store.root).add("t", "m", [LeasedObject("a" * 64, 1)], 1e12),
    "upload": lambda store: Files(store.root).add("t", "name", "user_data", b"text"),
    "write to remote": lambda store: Remote(str(store.root)).write("a" * 64, Path(__file__)),
}


@pytest.mark.parametrize("make", FOREIGN)
def test_a_directory_with_other_files_is_left_as_it_is(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    before = tree(tmp_path)
    for name, change in CHANGES.items():
        with pytest.raises(StoreError, match=f"^{tmp_path}: "):
            change(Store(tmp_path))
        assert tree(tmp_path) == before, name
    store = Store(tmp_path)
    assert list(store.objects(chains=True)) == [] and store.hits() in ({}, None) and read_sources(tmp_path) == {}
    assert store.has("c" * 64) is False and Remote(str(tmp_path)).remove_stale_temps() == 0
    store.counters.flush()
    add_sources(tmp_path, {"c" * 64: Source("a.txt", "m")})
    assert upkeep.stats(store).objects == 0 and tree(tmp_path) == before


def test_the_message_names_the_files_and_the_remedy(tmp_path: Path) -> None:
    home(tmp_path)
    with pytest.raises(StoreError) as raised:
        Store(tmp_path).put(make_chunk(1))
    assert str(raised.value).startswith(f"{tmp_path}: is not a store")
    assert "(a, check.json, hits.sqlite3 and 7 more)" in str(raised.value)


def test_a_push_changes_nothing_at_a_share_of_other_files(store: Store, tmp_path: Path) -> None:
    (key,), share = put_many(store, 1), tmp_path / "share"
    home(share)
    before = tree(share)
    with pytest.raises(StoreError, match=f"^{share}: "):
        push(Store(store.root, remote=str(share)), [key])
    assert tree(share) == before


def test_a_missing_or_empty_directory_becomes_a_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)
    (tmp_path / "killed" / "tmp").mkdir(parents=True)
    (tmp_path / "killed" / "tmp" / TEMP).touch()
    for name in ("new", "empty", "volume", "killed"):
        Store(tmp_path / name).put(make_chunk(1))
        assert is_marked(tmp_path / name)
    assert (tmp_path / "new" / MARK).read_text().splitlines()[0] == "pictool store 1" and not caplog.messages


@pytest.mark.parametrize("num_objects", [2, 0])
def test_a_store_of_an_earlier_version_is_adopted_at_the_first_write(tmp_path: Path, num_objects: int) -> None:
    keys, said = make_earlier(tmp_path / "store", num_objects), list[str]()
    store = Store(tmp_path / "store", on_warning=said.append)
    store.put(make_chunk(9))
    store.put(make_chunk(8))
    assert is_marked(store.root) and len(said) == 1 and MARK in said[0]
    upkeep.gc(store)
    assert not list((store.root / "tmp").iterdir()) and set(keys) < set(store.keys())
    assert upkeep.verify(store).problems == {} and upkeep.stats(store).counts.writes == 2
    assert store.hits() == dict.fromkeys(keys[:1], 3) and list(read_sources(store.root)) == keys[:1]
    Leases(store.root).add("t", "m", [], 1e12)


def test_a_store_of_an_earlier_version_is_read_without_a_mark(tmp_path: Path, far: Store) -> None:
    keys = make_earlier(tmp_path / "store")
    before, store = tree(tmp_path), Store(tmp_path / "store")
    assert [entry.key for entry in store.objects()] == sorted(keys) and store.hits() == {keys[0]: 3}
    with store.peek(keys[0]) as file:
        file.verify()
    assert upkeep.verify(store).problems == {} and list(read_sources(store.root)) == keys[:1]
    assert upkeep.would_collect(store)[0] and tree(tmp_path) == before
    near = Store(far.root, remote=str(store.root))
    assert near.fetch(keys[0]) and tree(tmp_path / "store") == before_of(before)


def before_of(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    return {name.removeprefix("store/"): data for name, data in tree.items() if name.startswith("store/")}


def test_a_hit_is_the_first_write_too(tmp_path: Path) -> None:
    keys, said = make_earlier(tmp_path), list[str]()
    store = Store(tmp_path, on_warning=said.append)
    assert store.has(keys[0]) and store.has(keys[1]) and len(said) == 1
    store.counters.flush()
    assert upkeep.stats(store).counts.hits == 2


def test_a_store_of_an_earlier_version_as_remote_is_adopted(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (key,), there = [store.put(make_chunk(7)).stem], tmp_path / "there"
    make_earlier(there)
    with caplog.at_level(logging.WARNING):
        push(Store(store.root, remote=str(there)), [key])
    assert len(caplog.messages) == 1 and MARK in caplog.messages[0] and is_marked(there) and key in Store(there).keys()
    assert not (there / "tmp" / TEMP).exists()


def test_stores_within_that_an_evaluation_left_are_evidence(tmp_path: Path) -> None:
    make_earlier(tmp_path / "eval" / "01234567")
    (tmp_path / "other.txt").write_text("mine")
    upkeep.gc(Store(tmp_path))
    assert is_marked(tmp_path) and is_marked(tmp_path / "eval" / "01234567")
    assert not (tmp_path / "eval" / "01234567" / "tmp" / TEMP).exists()


def test_gc_leaves_what_is_not_ours_in_a_store(store: Store) -> None:
    """Another name, or a directory two below that only looks like a store."""
    store.put(make_chunk(1))
    foreign = store.root / "a" / "b"
    for path in (foreign / "objects" / "x", foreign / "tmp" / TEMP, store.root / "tmp" / "notes.tmp"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    for name in (".pic-scratch-notes", ".pic-scratch-0123ABCD"):
        (store.root / name).mkdir()
    assert upkeep.gc(store).litter.count == 0
    with scratch_directory(store.root):
        pass
    assert (foreign / "tmp" / TEMP).exists() and (store.root / "tmp" / "notes.tmp").exists()
    assert (store.root / ".pic-scratch-notes").exists() and (store.root / ".pic-scratch-0123ABCD").exists()


def test_gc_removes_a_store_that_a_killed_process_left_in_its_scratch_directory(store: Store) -> None:
    store.put(make_chunk(1))
    left = store.root / ".pic-scratch-01234567"
    Store(left / "objects").put(make_chunk(2))
    assert upkeep.gc(store).litter.count == 1 and not left.exists()
    with scratch_directory(store.root) as used:
        key = Store(used / "objects").put(make_chunk(3)).stem
        assert upkeep.gc(store, 0).litter.count == 0
        assert list(Store(used / "objects").keys()) == [key], "of a process that runs"


def _put(root: Path, number: int) -> str:
    return Store(root).put(make_chunk(number)).stem


def test_many_processes_make_one_store(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4) as processes:
        for trial in range(3):
            root = tmp_path / str(trial)
            keys = set(processes.map(_put, [root] * 8, range(8)))
            assert set(Store(root).keys()) == keys and is_marked(root) and not list((root / "tmp").iterdir())


# Links in a store


@pytest.mark.parametrize(
    "name", ["pins", "stats", "tmp", "files", "check.json", "eval", "hits.sqlite3", "store.sqlite3", "shard"]
)
def test_no_link_in_a_store_is_followed_for_writing_or_deleting(store: Store, tmp_path: Path, name: str) -> None:
    """As a repository may have them: a store with a mark, and a link to somewhere else in it."""
    key = store.put(make_chunk(1)).stem
    other = Store(tmp_path / "victim")
    other.put(make_chunk(1))
    upkeep.pin(other, key)
    other.has(key)
    other.counters.flush()
    (other.root / "check.json").write_text("{}")  # of version 0.3
    Files(other.root).add("t", "name", "user_data", b"text")
    (other.root / "tmp" / TEMP).write_text("half")
    uploaded = Files(other.root).list("t")[0]
    other.within("eval", "01234567").put(make_chunk(3))
    place = store.path(key).parent if name == "shard" else store.root / name
    target = other.path(key).parent if name == "shard" else other.root / name
    if place.is_dir():
        place.rename(tmp_path / "away")
    place.symlink_to(target)
    before, mark_ns = tree(other.root), other.path(key).stat().st_mtime_ns
    pins: list[Callable[[], None]] = [lambda: upkeep.pin(store, key), lambda: upkeep.unpin(store, key)]
    runs: list[Callable[[], object]] = [*(partial(change, store) for change in CHANGES.values()), *pins]
    for run in runs:
        try:
            run()
        except StoreError as error:
            assert "link" in str(error) or "no such object" in str(error)
    assert not Files(store.root).remove("t", uploaded.id)
    store.counters.add(UsageCounts(), key)
    store.counters.flush()
    assert tree(other.root) == before and other.path(key).stat().st_mtime_ns == mark_ns


def test_objects_may_be_a_link_to_a_directory_of_objects_alone(store: Store, tmp_path: Path) -> None:
    store.ensure_store()
    (tmp_path / "big").mkdir()
    (store.root / "objects").symlink_to(tmp_path / "big")
    key = store.put(make_chunk(1)).stem
    assert list(content(store)) == [key] and upkeep.gc(store, 0).evicted.count == 1
    (tmp_path / "big" / "thesis").write_text("mine")
    with pytest.raises(StoreError, match=r"\(objects/thesis\)"):
        store.put(make_chunk(1))


def test_a_mark_that_is_a_link_or_another_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("pictool store 1\n")
    for name in ("link", "text", "pipe"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("mine")
    (tmp_path / "link" / MARK).symlink_to(tmp_path / "mark")
    (tmp_path / "text" / MARK).write_text("hello\n")
    os.mkfifo(tmp_path / "pipe" / MARK)
    for name in ("link", "text", "pipe"):
        with pytest.raises(StoreError, match=f"^{tmp_path / name}: "):
            Store(tmp_path / name).put(make_chunk(1))
