"""Plain files to compare objects with: written with fsync, read in blocks, through the page cache or past it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pictool.bench.prompts import require_disk
from pictool.errors import InputError
from pictool.store.objects.format import Buffer
from pictool.store.scratch import scratch_directory

BLOCK = 8 << 20  # bytes of one read


@contextmanager
def temporary_directory(parent: str | os.PathLike[str], num_bytes: int) -> Iterator[Path]:
    """A new directory inside `parent`, with room for so many bytes. It is removed at the end, also after an error.

    Raises:
        InputError: no such directory, or not enough room.
    """
    if not Path(parent).is_dir():
        raise InputError(f"{parent}: no such directory to measure in; create it, or name another with --store")
    require_disk(Path(parent), num_bytes)
    with ExitStack() as resources:
        try:
            directory = resources.enter_context(scratch_directory(parent))
        except OSError as error:
            raise InputError(
                f"{parent}: cannot be written ({error.strerror}); name another directory with --store"
            ) from error
        yield directory


def write_file(path: Path, data: Buffer) -> None:
    """Write a file and wait until its data are on the device."""
    with path.open("wb", buffering=0) as file:
        view, done = memoryview(data), 0
        while done < len(view):
            done += file.write(view[done:])
        os.fsync(file.fileno())


def read_file(path: Path, buffer: memoryview) -> int:
    """Read a whole file in blocks, each into the same memory. Returns its size in bytes."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return _read_blocks(fd, buffer)
    finally:
        os.close(fd)


def read_direct(path: Path) -> int | None:
    """Read a whole file past the page cache (O_DIRECT); None where the system or the file system has no such mode."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        with mmap.mmap(-1, BLOCK) as pages, memoryview(pages) as buffer:  # aligned, as O_DIRECT needs it
            return _read_blocks(fd, buffer)
    finally:
        os.close(fd)


def _read_blocks(fd: int, buffer: memoryview) -> int:
    offset = 0
    while got := os.preadv(fd, [buffer], offset):
        offset += got
    return offset


def is_cached(path: Path) -> bool | None:
    """Whether the page cache holds the file's first or last page; None where the system does not tell.

    Asking may start a read-ahead: drop the file from the cache again before reading is timed.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    fd = os.open(path, os.O_RDONLY)
    try:
        return any(_is_page_cached(fd, offset) for offset in (0, max(0, os.fstat(fd).st_size - 1)))
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    finally:
        os.close(fd)


def _is_page_cached(fd: int, offset: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
