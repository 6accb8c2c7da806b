"""Side databases that are damaged, forged or no files: made again or left out, and never in the way of an object."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import spoilt
from chunks import make_chunk

from pictool.store import upkeep
from pictool.store.index import INDEX_FILE
from pictool.store.store import Store
from pictool.store.usage import HITS_FILE, read_counts, read_hits

ENDLESS = (
    "CREATE VIEW {0} AS WITH RECURSIVE c AS (SELECT '0' AS key, 1 AS count UNION ALL SELECT key, count + 1 FROM c) "
    "SELECT key, count, 1, 1, '{{}}', 'x' FROM c"
)
STATEMENTS: dict[str, tuple[str, ...]] = {
    "an endless view": ("DROP TABLE {0}", ENDLESS),
    "a trigger": ("CREATE TRIGGER t BEFORE INSERT ON {0} BEGIN SELECT RAISE(ABORT, 'x'); END",),
    "another table": ("DROP TABLE {0}", "CREATE TABLE {0} (key, x)"),
    "one more table": ("CREATE TABLE more (x)",),
    "no table": ("DROP TABLE {0}",),
    "another version": ("PRAGMA user_version = 99",),
    "a key that is no text": ("UPDATE {0} SET key = key || CAST(x'ff' AS TEXT)",),
}
OF_INDEX: dict[str, tuple[str, ...]] = {
    f"{column} {value[:20]}": (f"UPDATE {{0}} SET {column} = {value}",)
    for column in ("inode", "bytes", "used", "meta", "text")
    for value in ("NULL", "'x'", "x'ff'", "CAST(x'ff' AS TEXT)", "-1", "1e300", "9e999", "'[]'", f"'{'[' * 50_000}'")
}
OF_HITS: dict[str, tuple[str, ...]] = {
    f"count {value}": (f"UPDATE {{0}} SET count = {value}",)
    for value in ("'x'", "x'ff'", "-1", "1e300", "9e999", "9223372036854775807")
}


def files(name: str) -> list[tuple[str, Callable[[Path], object]]]:
    """What may happen to a file of a store's directory."""
    return [(variation.name, variation.spoil) for variation in spoilt.of_file(name)]


def statements(name: str, table: str, listed: dict[str, tuple[str, ...]]) -> list[tuple[str, Callable[[Path], object]]]:
    def change(root: Path, texts: tuple[str, ...]) -> None:
        with sqlite3.connect(root / name) as db:
            for text in texts:
                db.execute(text.format(table))
        db.close()

    return [(title, lambda root, texts=texts: change(root, texts)) for title, texts in listed.items()]  # type: ignore[misc]


def journals(name: str) -> list[tuple[str, Callable[[Path], object]]]:
    cases: list[tuple[str, Callable[[Path], object]]] = []
    for more in ("-journal", "-wal"):
        cases.append((f"{more} is a pipe", lambda root, more=more: os.mkfifo(root / (name + more))))  # type: ignore[misc]
        cases.append((f"{more} is garbage", lambda root, more=more: (root / (name + more)).write_bytes(b"x" * 5000)))  # type: ignore[misc]
    return cases


CASES: dict[str, list[tuple[str, Callable[[Path], object]]]] = {
    INDEX_FILE: files(INDEX_FILE) + statements(INDEX_FILE, "objects", STATEMENTS | OF_INDEX) + journals(INDEX_FILE),
    HITS_FILE: files(HITS_FILE) + statements(HITS_FILE, "hits", STATEMENTS | OF_HITS) + journals(HITS_FILE),
    "stats": [*files("stats/00"), ("the most", lambda root: (root / "stats/00").write_bytes(b"\xff" * 56))],
}


def listing(store: Store) -> list[Any]:
    return [(each.key, each.num_bytes, each.meta, each.text, each.problem) for each in store.objects()]


def use(root: Path, keys: list[str]) -> list[Any]:
    """Use a store in every way that touches what is beside its objects; returns its listing."""
    store = Store(root)
    for key in keys:
        store.open(key).close()
    store.counters.flush()
    listed = listing(store)
    upkeep.stats(store), read_counts(root / "stats"), read_hits(root), upkeep.gc(store)
    return listed


@pytest.mark.parametrize("name", CASES)
def test_whatever_happens_to_it_the_store_is_as_before(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "getpid", lambda pid=os.getpid(): pid - pid % 16)  # counts go to stats/00
    first = Store(tmp_path / "first")
    keys = [first.put(make_chunk(seed)).stem for seed in range(3)]
    expected = use(first.root, keys)
    assert len(expected) == 3
    root = tmp_path / "store"
    for title, damage in CASES[name]:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(first.root, root)
        use(root, keys)  # the index knows the copied files
        damage(root)
        try:
            assert use(root, keys) == expected and use(root, keys) == expected
        except Exception as error:
            raise AssertionError(title) from error


@pytest.mark.parametrize("title", [title for title, _ in CASES[HITS_FILE] if "directory" not in title])
def test_hits_are_counted_again_after_the_damage(title: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    key = store.put(make_chunk(1)).stem
    use(store.root, [key])
    dict(CASES[HITS_FILE])[title](store.root)
    use(store.root, [key])
    use(store.root, [key])
    assert (read_hits(store.root) or {}).get(key, 0) >= 1 or title.startswith("count")


def test_hits_that_can_be_read_are_kept(tmp_path: Path) -> None:
    """One damaged count does not cost the others."""
    store = Store(tmp_path / "store")
    keys = [store.put(make_chunk(seed)).stem for seed in range(3)]
    use(store.root, keys)
    with sqlite3.connect(store.root / HITS_FILE) as db:
        db.execute("UPDATE hits SET count = 'x' WHERE key = ?", (keys[0],))
        db.execute("INSERT INTO hits VALUES (CAST(x'ff' AS TEXT), 1)")
    hits = read_hits(store.root)
    assert hits is not None and (hits[keys[1]], hits[keys[2]]) == (1, 1) and keys[0] not in hits
