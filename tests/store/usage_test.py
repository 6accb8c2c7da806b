"""Counts of use, and hits of each object: none is lost or counted twice, and a damaged file costs no object."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pictool.core import Geometry, Target
from pictool.store import usage
from pictool.store.database import DATABASE, JOURNAL
from pictool.store.directory import MARK, ensure_store
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.store.upkeep import expire, gc
from pictool.store.usage import Counters, UsageCounts, read_counts, read_hits

IMPORTS = "import sys; from pathlib import Path; from pictool.store.usage import Counters, UsageCounts\n"
IMPORTS += "c = Counters(Path(sys.argv[1]))\n"
A, B = "a" * 64, "b" * 64
TARGET = Target("LlamaForCausalLM", A, B, "float32", Geometry(1, 1, 1))


@pytest.fixture(autouse=True)
def is_marked(tmp_path: Path) -> None:
    """Nothing is counted in a directory that is no store."""
    ensure_store(tmp_path)


def add_hits(root: Path, key: str, count: int = 1) -> None:
    counters = Counters(root)
    for _ in range(count):
        counters.add(UsageCounts(), key)
    counters.flush()


def test_counts_are_written_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(tmp_path)
    counters.add(UsageCounts(hits=2, hit_bytes=10))
    assert read_counts(tmp_path) == UsageCounts() and not (tmp_path / DATABASE).exists()
    monkeypatch.setattr(usage, "_FLUSH_S", 0.0)
    counters.add(UsageCounts(misses=1))
    assert read_counts(tmp_path) == UsageCounts(hits=2, misses=1, hit_bytes=10)


def test_counts_are_written_at_the_end_of_a_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", f"{IMPORTS}c.add(UsageCounts(hits=1))", str(tmp_path)], check=True)
    assert read_counts(tmp_path) == UsageCounts(hits=1)


def test_an_interrupt_at_the_end_of_a_process_is_no_traceback(tmp_path: Path) -> None:
    script = f"{IMPORTS}c.add(UsageCounts(hits=1))\n"
    script += "def interrupt(root): raise KeyboardInterrupt\nimport pictool.store.usage as u; u.may_write = interrupt"
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=True)
    assert ended.stderr == b""


def test_counts_go_to_the_store_that_they_are_of_wherever_the_process_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        ensure_store(tmp_path / name / ".pic")
    monkeypatch.chdir(tmp_path / "here")
    counters = Counters(Path(".pic"))
    counters.add(UsageCounts(hits=1))
    monkeypatch.chdir(tmp_path / "there")
    counters.flush()
    assert read_counts(tmp_path / "here/.pic") == UsageCounts(hits=1)
    assert not (tmp_path / "there/.pic" / DATABASE).exists()


def test_a_file_system_that_is_gone_is_no_traceback_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Path.is_dir` raises what `os.path.isdir` takes for a no: a stale handle of NFS, a broken disk."""
    counters = Counters(tmp_path)
    counters.add(UsageCounts(hits=1))

    def stat(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "stat", stat)
    counters.flush()
    monkeypatch.undo()
    assert not (tmp_path / DATABASE).exists()


def test_threads_lose_no_counts(tmp_path: Path) -> None:
    counters = Counters(tmp_path)

    def count() -> None:
        for _ in range(500):
            counters.add(UsageCounts(hits=1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.flush()
    counters.flush()
    assert read_counts(tmp_path).hits == 2000


ADD_COUNTS = IMPORTS + "for _ in range(100): c.add(UsageCounts(writes=1)); c.flush()"


def test_processes_lose_no_counts(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ADD_COUNTS, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert read_counts(tmp_path).writes == 400


FORK = IMPORTS + "import os\nc.add(UsageCounts(hits=1))\n"
FORK += "if os.fork() == 0: c.add(UsageCounts(misses=1)); c.flush(); os._exit(0)\nos.wait()"


def test_a_fork_does_not_count_again_what_its_parent_counted(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], check=True, timeout=60)
    assert read_counts(tmp_path) == UsageCounts(hits=1, misses=1)


def test_in_what_is_no_store_nothing_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "absent", tmp_path / "file", tmp_path / "file" / "x"):
        counters = Counters(root)
        counters.add(UsageCounts(hits=1))
        counters.flush()
        assert read_counts(root) == UsageCounts()
    assert set(os.listdir(tmp_path)) == {"file", "tmp", MARK}


# Hits of each object


def put(store: Store, token: int) -> str:
    tokens = np.asarray([token], dtype=np.int32)
    meta = ObjectMeta(TARGET.key(tokens, "none"), TARGET, 1, "none")
    store.put(CompiledChunk(meta, "text", tokens, [(bytes(4), bytes(4))]))
    return meta.key


def test_what_is_opened_to_be_used_is_counted_and_what_is_looked_at_is_not(store: Store) -> None:
    first, second = put(store, 1), put(store, 2)
    for _ in range(3):
        store.open(first).close()
    assert store.has(second) and not store.has(A)
    store.peek(second).close()
    assert store.hits() == {}  # in memory so far
    store.counters.flush()
    assert store.hits() == {first: 3, second: 1}
    assert read_counts(store.root).hits == 4


ADD_HITS = IMPORTS + "for i in range(100): c.add(UsageCounts(hits=1), hit='ab'[i % 2] * 64); c.flush()"


def test_processes_lose_no_hits(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ADD_HITS, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert read_hits(tmp_path) == {A: 200, B: 200}


def test_a_process_that_is_killed_leaves_whole_counts(tmp_path: Path) -> None:
    endless = ADD_HITS.replace("range(100)", "iter(int, 1)").replace("'ab'[i % 2] * 64", "'a' * 64")
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", endless, str(tmp_path)])
        while not (read_hits(tmp_path) or {}).get(A):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before = read_hits(tmp_path)
        assert before is not None and set(before) == {A}
        add_hits(tmp_path, A)
        assert read_hits(tmp_path) == {A: before[A] + 1}


def test_what_others_keep_from_being_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_WAIT_S", 0.01)
    add_hits(tmp_path, A)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        add_hits(tmp_path, A)
        assert read_hits(tmp_path) == {A: 1}
        other.execute("ROLLBACK")
    add_hits(tmp_path, A)
    assert read_hits(tmp_path) == {A: 3}


@pytest.mark.parametrize("is_file", [True, False])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, is_file: bool) -> None:
    path = tmp_path / DATABASE
    path.write_bytes(b"no database at all, and long enough to be one" * 40) if is_file else path.mkdir()
    add_hits(tmp_path, A)
    assert read_hits(tmp_path) is None and read_counts(tmp_path) == UsageCounts()
    path.unlink() if is_file else path.rmdir()
    add_hits(tmp_path, A)
    assert read_hits(tmp_path) == {A: 2}, "nothing is lost"


def test_gc_forgets_what_is_gone(store: Store) -> None:
    first, second = put(store, 1), put(store, 2)
    for key in (first, second):
        store.open(key).close()
    store.counters.flush()
    expire(store, [first])
    assert store.hits() == {first: 1, second: 1}
    gc(store)
    assert store.hits() == {second: 1}


def test_what_a_killed_process_had_begun_is_rolled_back(tmp_path: Path) -> None:
    """Its journal is left, and the file is changed in part."""
    add_hits(tmp_path, A, 5)
    begin = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1'); db.execute('BEGIN IMMEDIATE'); db.execute('UPDATE hits SET count = 9')\n"
        "db.executemany('INSERT INTO hits VALUES (?, 1)', [(f'{i:064x}',) for i in range(5000)])\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", begin, str(tmp_path / DATABASE)], check=False)
    assert (tmp_path / JOURNAL).stat().st_size
    assert read_hits(tmp_path) == {A: 5}
