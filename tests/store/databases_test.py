"""Side databases: what sqlite cannot use makes way; what cannot be judged, and what is just going, stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pictool.store.side.databases import clear_place


def test_what_is_no_file_makes_way(tmp_path: Path) -> None:
    path, journal = tmp_path / "x.sqlite3", tmp_path / "x.sqlite3-journal"
    path.symlink_to(path)
    os.mkfifo(journal)
    (tmp_path / "x.sqlite3-wal").symlink_to("nothing")
    clear_place(path)
    assert not list(tmp_path.iterdir())


def test_a_database_whose_disk_fails_for_a_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite3"
    path.write_bytes(b"hits")

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        with pytest.raises(OSError, match="Input/output error"):
            clear_place(path)
    assert path.read_bytes() == b"hits"


def test_a_journal_that_goes_while_it_is_looked_at_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a process that counts hits would lose them, whenever another one writes at the same time."""
    journal = tmp_path / "x.sqlite3-journal"
    journal.write_bytes(b"of another process")
    stat = os.stat

    def remove_first(path: Any, **more: Any) -> os.stat_result:
        if os.fspath(path) == str(journal):
            journal.unlink(missing_ok=True)
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", remove_first)
    clear_place(tmp_path / "x.sqlite3")
