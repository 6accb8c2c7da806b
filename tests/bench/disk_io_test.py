"""Plain files: read whole through the page cache and past it, where the system can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pictool.bench import disk_io


def test_plain_files_are_read_whole_through_the_cache_and_past_it(tmp_path: Path) -> None:
    path, data = tmp_path / "x", os.urandom(3 * 4096 + 100)
    disk_io.write_file(path, data)
    assert path.read_bytes() == data
    buffer = memoryview(bytearray(4096))
    assert disk_io.read_file(path, buffer) == len(data)
    assert bytes(buffer[:100]) == data[-100:]
    assert disk_io.read_direct(path) in (len(data), None)


def test_a_file_that_was_just_read_is_in_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "x"
    disk_io.write_file(path, bytes(8192))
    assert disk_io.is_cached(path) in (True, None)


def test_a_file_system_without_direct_reads_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    path = tmp_path / "x"
    disk_io.write_file(path, b"x")
    monkeypatch.setattr(os, "open", refuse)
    assert disk_io.read_direct(path) is None
