"""Files that are whole or absent, whatever happens to the writer; and a lock that ends with its holder."""

from __future__ import annotations

import fcntl
import os
import resource
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pictool.errors import StoreError

Publish = Callable[[Path, Path], None]  # makes a complete temp file visible under its name
_OTHER_FILES = 128  # that a process has open beside objects


@contextmanager
def atomic_write(
    path: Path, temp_dir: Path | None = None, publish: Publish | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """Write a file that becomes visible only when complete: temp file, fsync, rename, fsync of the directory.

    A symbolic link stays one: the file it names is replaced. A device or pipe (/dev/null) is written directly.
    The temp file is locked while its writer lives: an unlocked one is litter (`remove_litter`). Without `durable`
    nothing waits for the disk, and a power failure may leave a file that is damaged.

    Raises:
        StoreError: the disk is full, or the directory cannot be written. No temp file stays, whatever is raised.
    """
    target = Path(os.path.realpath(path))
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            with path.open("wb") as file:
                yield file
            return
        make_directory(target.parent)
        with _temp_file(temp_dir or target.parent, path.name[:16]) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            (publish or os.replace)(Path(file.name), target)
        if durable:
            fsync_directory(target.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror or error}); nothing was changed") from error


@contextmanager
def _temp_file(directory: Path, name: str) -> Iterator[BinaryIO]:
    """A new file, locked; it is removed at the end unless it was renamed."""
    make_directory(directory)
    while True:
        temp = directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with temp.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # else a gc removed it as litter before it was locked
                    yield file
                    return
        finally:
            with suppress(OSError):
                temp.unlink()


def remove_litter(temp: Path) -> int | None:
    """Remove a temp file if its writer is gone; its size, or None if it stays. The lock is held meanwhile."""
    try:
        with temp.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temp.unlink()
            return os.fstat(file.fileno()).st_size
    except (BlockingIOError, FileNotFoundError):
        return None


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, so that it outlives a power failure."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in reversed(missing):
        fsync_directory(directory.parent)


def open_in_order(path: Path) -> int:
    """Open a file for reading from its beginning to its end: the system reads farther ahead. A pipe does not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a pipe takes no advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def read_at(fd: int, offset: int, count: int) -> bytes:
    """`count` bytes of a file from `offset` on, fewer where it ends."""
    parts = []
    while count > 0 and (part := os.pread(fd, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the exclusive lock on a file (made if absent); yields its descriptor. The lock ends with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def allow_open_files(count: int) -> int:
    """Let this process have `count` files open beside a few, as far as the system allows; returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count + _OTHER_FILES:
        limit = count + _OTHER_FILES
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, max(0, soft - _OTHER_FILES))
