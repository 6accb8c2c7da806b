"""The user's cache directory: files that may be lost but are costly to compute (weight hashes, profiles)."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pictool"


def make_private(directory: Path) -> None:
    """Make a directory in the cache, and what is missing above it, for this user alone."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def write_cache_file(path: Path, data: bytes) -> None:
    """Write a file that is whole or not there, for this user alone. If it cannot be written, nothing is left behind
    and nothing raised.

    All writers of a file use one temp file, each under its lock: what a killed one left is overwritten by the next.
    """
    with suppress(OSError):
        make_private(path.parent)
        temp = path.with_suffix(".tmp")
        with open(os.open(temp, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if temp.stat().st_ino != os.fstat(file.fileno()).st_ino:
                    return  # it was written, and renamed, before it was locked here
                file.truncate(0)
                file.write(data)
                file.flush()
                os.replace(temp, path)
            except BlockingIOError:  # another process is writing the same
                return
            except BaseException:
                with suppress(OSError):
                    os.unlink(temp)
                raise
