"""Directories in which something is measured, where a store is; those of killed processes are removed later."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = ".pic-scratch-"
SCRATCH = re.compile(re.escape(_PREFIX) + "[a-z0-9_]{8}")  # as `mkdtemp` makes it


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the first of its parents that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


@contextmanager
def memory_directory() -> Iterator[Path]:
    """A new directory in memory, where the system has such, for what cannot be written elsewhere; removed at the end.

    Raises:
        OSError: it cannot be made.
    """
    shared = Path("/dev/shm")
    with scratch_directory(shared if os.access(shared, os.W_OK) else tempfile.gettempdir()) as directory:
        yield directory


@contextmanager
def scratch_directory(parent: str | os.PathLike[str]) -> Iterator[Path]:
    """A new directory inside `parent`, locked while this process uses it, and removed at the end.

    What killed processes left there is removed first; so does `gc` of a store that is there.

    Raises:
        OSError: it cannot be made.
    """
    remove_scratch(Path(parent))
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists():  # else another process removed it before it was locked
                yield path
                return
        finally:
            shutil.rmtree(path, ignore_errors=True)  # what stays is removed by a gc
            if fd >= 0:
                os.close(fd)


def remove_scratch(parent: Path) -> list[int]:
    """Remove the directories in `parent` whose processes are gone; the bytes of each. One in use stays."""
    return [size for path in _directories(parent) if (size := _remove_unlocked(path)) is not None]


def abandoned_scratch(parent: Path) -> list[Path]:
    """What `remove_scratch` would remove."""
    return [path for path in _directories(parent) if _remove_unlocked(path, dry_run=True) is not None]


def _directories(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob(f"{_PREFIX}*") if SCRATCH.fullmatch(path.name))


def _remove_unlocked(path: Path, dry_run: bool = False) -> int | None:
    with suppress(OSError):  # in use, gone meanwhile, no directory, or another user's
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
            if not dry_run:
                shutil.rmtree(path)
            return size
        finally:
            os.close(fd)
    return None
