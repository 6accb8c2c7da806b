"""Scratch directories: gone at the end, and after a kill at the next use or gc; one in use stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pictool.store.scratch import remove_scratch, scratch_directory
from pictool.store.store import Store
from pictool.store.upkeep import gc


def kill_within(parent: Path) -> None:
    """Kill a process that has a scratch directory."""
    if (pid := os.fork()) == 0:
        with scratch_directory(parent) as inside:
            (inside / "measured").write_bytes(b"12345")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and len(list(parent.iterdir())) == 1


def test_it_is_gone_at_the_end(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as inside:
        (inside / "a").mkdir()
        assert inside.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_the_next_one_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    kill_within(tmp_path)
    with scratch_directory(tmp_path) as inside:
        assert list(tmp_path.iterdir()) == [inside]


def test_gc_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    kill_within(tmp_path)
    assert gc(Store(tmp_path)).litter.num_bytes == 5
    assert not list(tmp_path.glob(".pic-*"))


def test_one_in_use_stays(tmp_path: Path) -> None:
    with scratch_directory(tmp_path) as inside:
        assert remove_scratch(tmp_path) == [] and inside.is_dir()
        with scratch_directory(tmp_path) as other:
            assert inside.is_dir() and other != inside
