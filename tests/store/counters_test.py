"""Counts of use: none is lost or counted twice, by threads, processes and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pictool.store.usage import Counters, Counts, read_counts, reset_counts


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "stats"


def test_counts_are_written_when_the_counter_is_let_go(directory: Path) -> None:
    counters = Counters(directory)
    counters.add(Counts(hits=2, hit_bytes=10))
    counters.add(Counts(misses=1))
    assert read_counts(directory) == Counts()
    del counters
    assert read_counts(directory) == Counts(hits=2, misses=1, hit_bytes=10)


def test_threads(directory: Path) -> None:
    counters = Counters(directory)

    def count() -> None:
        for _ in range(500):
            counters.add(Counts(hits=1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters.flush()
    counters.flush()
    assert read_counts(directory).hits == 2000


ADD = "import sys; from pathlib import Path; from pictool.store.usage import Counters, Counts\n"
ADD += "c = Counters(Path(sys.argv[1]))\nfor _ in range(100): c.add(Counts(writes=1)); c.flush()"


def test_processes(directory: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", ADD, str(directory)]) for _ in range(4)]
    assert [one.wait(60) for one in running] == [0] * 4
    assert read_counts(directory).writes == 400


FORK = "import os, sys; from pathlib import Path; from pictool.store.usage import Counters, Counts\n"
FORK += "c = Counters(Path(sys.argv[1])); c.add(Counts(hits=1))\n"
FORK += "if os.fork() == 0: c.add(Counts(misses=1)); c.flush(); os._exit(0)\nos.wait()"


def test_a_fork_does_not_count_again_what_its_parent_counted(directory: Path) -> None:
    subprocess.run([sys.executable, "-c", FORK, str(directory)], check=True, timeout=60)
    assert read_counts(directory) == Counts(hits=1, misses=1)


def test_what_cannot_be_written_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "absent" / "stats", tmp_path / "file" / "stats", tmp_path / "file"):
        counters = Counters(directory)
        counters.add(Counts(hits=1))
        counters.flush()
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_torn_file_counts_as_nothing_and_reset_forgets(directory: Path) -> None:
    directory.mkdir()
    (directory / "00").write_bytes(b"torn")
    assert read_counts(directory) == Counts()
    counters = Counters(directory)
    counters.add(Counts(hits=1))
    counters.flush()
    reset_counts(directory)
    assert read_counts(directory) == Counts()
