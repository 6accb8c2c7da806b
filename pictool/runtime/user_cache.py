"""The user's cache directory: files that may be lost but are costly to compute (weight hashes, probes, profiles)."""

from __future__ import annotations

import os
import tempfile
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
    """
    with suppress(OSError):
        make_private(path.parent)
        descriptor, temp = tempfile.mkstemp(".tmp", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(temp, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
