"""Files of the user's cache: whole or not there, and nothing is left of one that cannot be written."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pictool.runtime.memory.user_cache import write_cache_file


def fails(*_: Any) -> Any:
    raise OSError("no")


@pytest.fixture(params=["write", "replace", "lock"])
def failing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file can become longer than 2 bytes, or none can be renamed, or locked."""
    if request.param != "write":
        monkeypatch.setattr(*((os, "replace") if request.param == "replace" else (fcntl, "flock")), fails)
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for data in (b"first", b"second"):
        write_cache_file(path, data)
        assert path.read_bytes() == data and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_the_cache_is_its_user_s_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_cache_file(tmp_path / "cache" / "pictool" / "kind" / "name", b"data")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in sorted((tmp_path / "cache").rglob("*"))]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.usefixtures("failing")
def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"ok")
    write_cache_file(path, b"new")
    write_cache_file(tmp_path / "other", b"new")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"ok"


def test_nothing_is_left_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_cache_file(tmp_path / "file", b"new")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    write_cache_file(tmp_path / "file" / "within", b"new")


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    pid = os.fork()
    if pid == 0:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_cache_file(path, b"killed, and longer")
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and not path.exists()
    write_cache_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_process_is_writing_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with path.with_suffix(".tmp").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        write_cache_file(path, b"mine")
        assert not path.exists() and other.name == str(tmp_path / "file.tmp")
