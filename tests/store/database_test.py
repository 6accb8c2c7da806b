"""The database of a store: what earlier versions kept in six files moves over once, and damage costs no lease."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from old_stores import COUNTS, LEASE, A, B, write_old
from unprivileged import unprivileged

from pictool.errors import StoreError, UnwritableStoreError
from pictool.store import database
from pictool.store.database import DATABASE, JOURNAL, reading, writing
from pictool.store.directory import MARK, ensure_store
from pictool.store.folders import FolderObject, read_compiled, read_folders
from pictool.store.leases import LeasedObject, Leases, leased_keys
from pictool.store.sources import Source, add_sources, read_sources
from pictool.store.usage import read_counts, read_hits


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ensure_store(tmp_path / "store")
    return tmp_path / "store"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name not in ("pictool-store", "tmp")}


def require_all(root: Path) -> bool:
    assert read_hits(root) == {A: 3} and read_counts(root) == COUNTS
    assert read_sources(root) == {A: Source("a.txt", "m")} and read_compiled(root) == []
    assert read_folders(root) == [FolderObject(os.fsdecode(b"/n\xff"), "t", A, os.fsdecode(b"\xff.txt"))]
    lease = Leases(root).find(LEASE, "t")
    assert lease is not None and lease.objects == (LeasedObject(A, 7),) and leased_keys(root) == {A}
    return True


def test_what_an_earlier_version_kept_moves_once(root: Path) -> None:
    write_old(root)
    require_all(root)
    assert names(root) == {DATABASE, JOURNAL}
    require_all(root)
    with reading(root) as db:
        assert db.execute("SELECT name FROM readings").fetchall() == [("x",)]


@pytest.mark.parametrize("is_moved", [True, False])
def test_version_0_3_refuses_a_store_with_leases_that_it_does_not_see(root: Path, is_moved: bool) -> None:
    assert (root / MARK).read_text().splitlines()[0] == "pictool store 1"
    if is_moved:
        write_old(root)
    else:
        Leases(root).add("t", "m", [LeasedObject(A, 1)], 4e9)
    assert leased_keys(root) == {A} and (root / MARK).read_text().splitlines()[0] == "pictool store 2"
    ensure_store(root)


def test_what_is_no_store_yet_is_read_as_it_is(root: Path) -> None:
    write_old(root)
    (root / "lock").write_text("0" * 20)  # it had objects
    (root / "pictool-store").unlink()
    before = names(root)
    require_all(root)
    assert names(root) == before and DATABASE not in before


def test_what_cannot_be_written_is_read_as_it_is() -> None:
    with TemporaryDirectory(prefix="pic-read-only-") as name:  # which everybody may enter, as those of pytest are not
        root = Path(name)
        ensure_store(root)
        write_old(root)
        before = names(root)
        for path in (root, root / "stats"):
            path.chmod(0o555)
        assert unprivileged(lambda: require_all(root))
        assert names(root) == before and DATABASE not in before
        root.chmod(0o755)


def test_in_what_is_no_store_nothing_is_made_anew(root: Path) -> None:
    Leases(root).add("t", "m", [LeasedObject(A, 1)], 4e9)
    with reading(root) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'hits'").fetchone()
    (root / "lock").write_text("0" * 20)  # it had objects
    (root / "pictool-store").unlink()
    with (root / DATABASE).open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xaa" * 4096)
    before = (root / DATABASE).read_bytes()
    assert read_hits(root) is None and (root / DATABASE).read_bytes() == before
    assert leased_keys(root) == {A}


@pytest.mark.parametrize("call", ["unlink", "rmdir"])
def test_a_kill_before_the_old_files_are_gone_moves_nothing_twice(root: Path, call: str) -> None:
    write_old(root)
    script = (
        "import os, signal, sys; from pathlib import Path; from pictool.store.database import writing\n"
        f"Path.{call} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with writing(Path(sys.argv[1])): pass"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    assert ended.returncode == -signal.SIGKILL
    require_all(root)
    Leases(root).remove(LEASE, "t")
    assert names(root) - {"stats"} == {DATABASE, JOURNAL} and leased_keys(root) == frozenset()


def test_what_an_older_process_writes_later_moves_too(root: Path) -> None:
    Leases(root).add("t", "m", [LeasedObject(B, 1)], 4e9)
    write_old(root, "leases", "hits")
    assert leased_keys(root) == {A, B} and Leases(root).count() == 2


def test_damaged_files_of_an_earlier_version_cost_no_lease(root: Path) -> None:
    write_old(root)
    for name in ("hits", "sources", "index"):
        (root / f"{name}.sqlite3").write_bytes(b"no database" * 99)
    (root / "folders.sqlite3").unlink()
    (root / "folders.sqlite3").symlink_to(root / "hits.sqlite3")
    assert read_hits(root) == {} and leased_keys(root) == {A} and read_counts(root) == COUNTS
    assert names(root) == {DATABASE, JOURNAL, "folders.sqlite3"}


def test_damaged_leases_of_an_earlier_version_are_named(root: Path) -> None:
    write_old(root)
    (root / "leases.sqlite3").write_bytes(b"no database" * 99)
    with pytest.raises(StoreError, match=r"leases\.sqlite3"):
        leased_keys(root)
    assert read_hits(root) is None and (root / "hits.sqlite3").exists()
    (root / "leases.sqlite3").unlink()
    assert leased_keys(root) == frozenset() and read_hits(root) == {A: 3}


def test_a_damaged_table_is_made_anew_and_leases_are_kept(root: Path) -> None:
    Leases(root).add("t", "m", [LeasedObject(A, 1)], 4e9)
    add_sources(root, {f"{number:064x}": Source("x" * 900, "m") for number in range(100)})
    with reading(root) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sources'").fetchone()
    with (root / DATABASE).open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xaa" * 4096)
    said: list[str] = []
    assert read_sources(root, said.append) == {} and len(said) == 1
    assert read_sources(root, said.append) == {} and len(said) == 1
    assert leased_keys(root) == {A} and not list((root / "tmp").iterdir())


def test_a_transaction_is_whole_or_nothing(root: Path) -> None:
    with pytest.raises(StoreError), writing(root) as db:
        db.execute("INSERT INTO hits VALUES ('x', 1)")
        db.execute("INSERT INTO hits VALUES ('x', 1)")
    assert read_hits(root) == {}
    with pytest.raises(UnwritableStoreError), writing(root.parent):
        pass


@pytest.mark.parametrize("name", [DATABASE, JOURNAL, f"{DATABASE}-wal"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nothing")])
def test_what_sqlite_would_follow_or_wait_for_is_named(root: Path, name: str, make: Callable[[Path], None]) -> None:
    if name != DATABASE:
        with writing(root):
            pass
        (root / name).unlink(missing_ok=True)
    make(root / name)
    for use in (reading, writing):
        with pytest.raises(StoreError, match=name), use(root):
            pass
    assert os.path.lexists(root / name)


def test_a_disk_that_fails_for_a_moment_costs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Leases(root).add("t", "m", [LeasedObject(A, 1)], 4e9)
    before = (root / DATABASE).read_bytes()

    def fail(*_: object, **__: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        with pytest.raises(StoreError), writing(root):
            pass
    assert (root / DATABASE).read_bytes() == before and leased_keys(root) == {A}


def test_it_is_bounded_how_long_others_are_waited_for(root: Path) -> None:
    with writing(root):
        pass
    with closing(sqlite3.connect(root / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for use in (reading, writing):
            with pytest.raises(StoreError, match=str(root)), use(root, 0.01):
                pass
    assert database.WAIT_S == 30
