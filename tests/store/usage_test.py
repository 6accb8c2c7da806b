"""Counts of use, and hits of each object: none is lost or counted twice, and a damaged file costs no object."""

from __future__ import annotations

import errno
import gc as collector
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pictool.core import Geometry, Target
from pictool.store.directory import MARK, ensure_store
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.side import usage
from pictool.store.side.usage import (
    HITS_FILE,
    Counters,
    UsageCounts,
    add_hits,
    forget_hits,
    read_counts,
    read_hits,
)
from pictool.store.store import Store
from pictool.store.upkeep import expire, gc

A, B = "a" * 64, "b" * 64
TARGET = Target("LlamaForCausalLM", A, B, "float32", Geometry(1, 1, 1))


@pytest.fixture(autouse=True)
def is_marked(tmp_path: Path) -> None:
    """Nothing is counted in a directory that is no store."""
    ensure_store(tmp_path)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "stats"


def test_counts_are_written_when_the_counter_is_let_go(directory: Path) -> None:
    counters = Counters(directory)
    counters.add(UsageCounts(hits=2, hit_bytes=10))
    counters.add(UsageCounts(misses=1))
    assert read_counts(directory) == UsageCounts()
    del counters
    assert read_counts(directory) == UsageCounts(hits=2, misses=1, hit_bytes=10)


def test_counts_go_to_the_store_that_they_are_of_wherever_the_process_is_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        ensure_store(tmp_path / name / ".pic")
    monkeypatch.chdir(tmp_path / "here")
    counters = Counters(Path(".pic/stats"))
    counters.add(UsageCounts(hits=1))
    monkeypatch.chdir(tmp_path / "there")
    counters.flush()
    assert read_counts(tmp_path / "here/.pic/stats") == UsageCounts(hits=1)
    assert not (tmp_path / "there/.pic/stats").exists()


def test_a_file_system_that_is_gone_is_no_traceback_at_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.is_dir` raises what `os.path.isdir` takes for a no: a stale handle of NFS, a broken disk."""
    counters = Counters(directory)
    counters.add(UsageCounts(hits=1))

    def stat(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "stat", stat)
    counters.flush()
    monkeypatch.undo()
    assert not directory.exists()


@pytest.mark.parametrize("busy_s", [0.0, 0.2])
def test_an_interrupt_while_the_last_counts_are_written_is_not_lost(
    busy_s: float, directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor is it raised in the finalizer, from which only a traceback would come, however busy the machine is."""
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(busy_s)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    counters = Counters(directory)
    counters.add(UsageCounts(hits=1))

    def interrupted(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(usage, "may_write", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            del counters
            for _ in range(1000):  # a longer sleep would end first
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == ""


def test_frames_are_read_while_nothing_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 hangs if a finalizer starts a thread meanwhile."""
    read = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: {} if collector.isenabled() else read())
    frame = usage._frame_of(threading.get_ident())
    assert frame is not None and collector.isenabled()


def test_threads_lose_no_counts(directory: Path) -> None:
    counters = Counters(directory)

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
    assert read_counts(directory).hits == 2000


ADD_COUNTS = "import sys; from pathlib import Path; from pictool.store.side.usage import Counters, UsageCounts\n"
ADD_COUNTS += "c = Counters(Path(sys.argv[1]))\nfor _ in range(100): c.add(UsageCounts(writes=1)); c.flush()"


def test_processes_lose_no_counts(directory: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ADD_COUNTS, str(directory)]) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    assert read_counts(directory).writes == 400


FORK = "import os, sys; from pathlib import Path; from pictool.store.side.usage import Counters, UsageCounts\n"
FORK += "c = Counters(Path(sys.argv[1])); c.add(UsageCounts(hits=1))\n"
FORK += "if os.fork() == 0: c.add(UsageCounts(misses=1)); c.flush(); os._exit(0)\nos.wait()"


def test_a_fork_does_not_count_again_what_its_parent_counted(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(directory)], check=True, timeout=60)
    assert read_counts(directory) == UsageCounts(hits=1, misses=1)


def test_what_cannot_be_written_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "absent" / "stats", tmp_path / "file" / "stats", tmp_path / "file"):
        counters = Counters(directory)
        counters.add(UsageCounts(hits=1))
        counters.flush()
    assert set(os.listdir(tmp_path)) == {"file", "tmp", MARK}


def test_a_torn_file_counts_as_nothing(directory: Path) -> None:
    directory.mkdir()
    (directory / "00").write_bytes(b"torn")
    assert read_counts(directory) == UsageCounts()


# Hits of each object


def put(store: Store, token: int) -> str:
    tokens = np.asarray([token], dtype=np.int32)
    meta = ObjectMeta(TARGET.key(tokens, 0, "none"), TARGET, 1, 0, "none")
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
    assert read_counts(store.root / "stats").hits == 4


ADD_HITS = "import sys; from pathlib import Path; from pictool.store.side.usage import Counters, UsageCounts\n"
ADD_HITS += "c = Counters(Path(sys.argv[1]) / 'stats')\n"
ADD_HITS += "for i in range(100): c.add(UsageCounts(hits=1), hit='ab'[i % 2] * 64); c.flush()"


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
        assert add_hits(tmp_path, {A: 1}, 2.0) and read_hits(tmp_path) == {A: before[A] + 1}


def test_a_file_that_another_holds_is_waited_for_at_the_end_only(tmp_path: Path) -> None:
    assert add_hits(tmp_path, {A: 1}, 2.0)
    other = sqlite3.connect(tmp_path / HITS_FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    counters = Counters(tmp_path / "stats")
    counters.add(UsageCounts(hits=1), hit=A)
    counters._pending.flush(0.01)
    assert read_hits(tmp_path) == {A: 1} and read_counts(tmp_path / "stats").hits == 1
    other.execute("ROLLBACK")
    other.close()
    del counters  # nothing new was counted, and what was kept is written
    assert read_hits(tmp_path) == {A: 2} and read_counts(tmp_path / "stats").hits == 1


def test_damaged_hits_are_unknown_and_then_begun_anew(tmp_path: Path) -> None:
    (tmp_path / HITS_FILE).write_bytes(b"no database at all, and long enough to be one" * 40)
    assert read_hits(tmp_path) is None
    assert add_hits(tmp_path, {A: 2}, 2.0) and read_hits(tmp_path) == {A: 2}


def test_where_nothing_can_be_written_nothing_is_counted(tmp_path: Path) -> None:
    (tmp_path / HITS_FILE).mkdir()
    assert add_hits(tmp_path, {A: 2}, 0.01) and read_hits(tmp_path) is None
    assert add_hits(tmp_path / "absent", {A: 2}, 0.01) and read_hits(tmp_path / "absent") == {}


def test_gc_forgets_what_is_gone(store: Store) -> None:
    first, second = put(store, 1), put(store, 2)
    for key in (first, second):
        store.open(key).close()
    store.counters.flush()
    expire(store, [first])
    assert store.hits() == {first: 1, second: 1}
    gc(store)
    assert store.hits() == {second: 1}
    forget_hits(store.root, lambda: [second])
    assert store.hits() == {second: 1}


def test_what_a_killed_process_had_begun_is_rolled_back(tmp_path: Path) -> None:
    """Its journal is left, and the file is changed in part."""
    assert add_hits(tmp_path, {A: 5}, 2.0)
    begin = (
        "import os, sqlite3, sys; db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1'); db.execute('BEGIN IMMEDIATE'); db.execute('UPDATE hits SET count = 9')\n"
        "db.executemany('INSERT INTO hits VALUES (?, 1)', [(f'{i:064x}',) for i in range(5000)])\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", begin, str(tmp_path / HITS_FILE)], check=False)
    assert (tmp_path / f"{HITS_FILE}-journal").stat().st_size
    assert read_hits(tmp_path) == {A: 5}
