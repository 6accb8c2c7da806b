"""Files that are whole or absent, whatever happens to the writer; who may read them; a lock that ends with its holder.

Who may read: a store is made for its owner alone (0700), and what is new in it has the permissions of the directory
that it is in. So a directory that was shared (`chmod -R g+rwX`) stays shared. A file that is written elsewhere (`-o`)
has the permissions that the umask gives.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import resource
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pictool.errors import UnwritableStoreError
from pictool.reading import NotRegularError, open_regular

Publish = Callable[[Path, Path], None]  # makes a complete temp file visible under its name
LOCK = "lock"  # of a store; holds the bytes of all objects, as decimal text
_OTHER_FILES = 128  # that a process has open beside objects
_OWNER_ONLY = 0o700
_TEMP = re.compile(r"\..*\.[0-9a-f]{16}\.tmp", re.DOTALL)
_SHARED_BITS = 0o2777  # of a directory, that those in it inherit
_durable: set[tuple[int, int]] = set()  # directories whose names this process has seen on the disk: device, inode


@contextmanager
def atomic_write(
    path: Path, temp_dir: Path | None = None, publish: Publish | None = None, durable: bool = True
) -> Iterator[BinaryIO]:
    """Write a file that becomes visible only when complete: temp file, fsync, rename, fsync of the directory.

    A symbolic link stays one: the file it names is replaced. A device or pipe (/dev/null) is written directly.
    The temp file is locked while its writer lives: an unlocked one is stale (`remove_stale_temp`). Without `durable`
    nothing waits for the disk, and a power failure may leave a file that is damaged.

    `temp_dir` is that of a store: the file is then in the store, where links are not followed, and has its permissions.

    Raises:
        StoreError: the disk is full, or the directory cannot be written. No temp file stays, whatever is raised.
    """
    store = None if temp_dir is None else temp_dir.parent
    target = Path(os.path.realpath(path)) if store is None else path
    try:
        if store is None and path.exists() and not (path.is_file() or path.is_dir()):
            with path.open("wb") as file:
                yield file
            return
        make_directory(target.parent, store, durable)
        with _output_file(target) if temp_dir is None else _temp_file(temp_dir, path.name[:16], store) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            (publish or os.replace)(Path(file.name), target)
        if durable:
            fsync_directory(target.parent)
    except OSError as error:
        raise UnwritableStoreError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed"
        ) from error


@contextmanager
def _output_file(target: Path) -> Iterator[BinaryIO]:
    """A temp file for a target outside of stores, of which no gc knows: those that killed writers left are removed."""
    name = target.name[:16]
    for left in filter(is_temp, target.parent.glob(f".{glob.escape(name)}.*.tmp")):
        remove_stale_temp(left)
    with _temp_file(target.parent, name, None) as file:
        yield file


@contextmanager
def _temp_file(directory: Path, name: str, store: Path | None) -> Iterator[BinaryIO]:
    """A new file, locked; it is removed at the end unless it was renamed."""
    if store is not None:
        make_directory(directory, store)
    while True:
        temp = directory / f".{name}.{secrets.token_hex(8)}.tmp"
        try:
            with temp.open("xb") as file:
                if store is not None:
                    _inherit_mode(file.fileno(), directory)
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:  # else a gc removed it before it was locked
                    yield file
                    return
        finally:
            with suppress(OSError):
                temp.unlink()


def is_temp(path: Path) -> bool:
    """Whether this is the name of a temp file of ours, `.NAME.<16 hex>.tmp`. No other is ever removed."""
    return _TEMP.fullmatch(path.name) is not None


def remove_stale_temp(temp: Path, dry_run: bool = False) -> int | None:
    """Remove a temp file if its writer is gone; its size, or None if it stays. The lock is held meanwhile.

    What is no regular file has no writer. Another user's file that may not be opened stays. A dry run removes nothing.
    """
    assert is_temp(temp)
    try:
        fd = open_regular(temp, os.O_NOFOLLOW)
    except NotRegularError:
        if not dry_run:
            temp.unlink(missing_ok=True)
        return 0
    except (FileNotFoundError, PermissionError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(fd)
        if status.st_ino != temp.lstat().st_ino:  # it was renamed, and another has its name
            return None
        if not dry_run:
            temp.unlink()
        return status.st_size
    except (BlockingIOError, FileNotFoundError):
        return None
    finally:
        os.close(fd)


def make_directory(path: Path, store: Path | None = None, durable: bool = True) -> None:
    """Make a directory and what is missing above it, so that it outlives a power failure.

    Each is on the disk before one is made in it. So of those that a killed process made, the last one may not be: it is
    synchronised by whoever uses it next.

    Args:
        store: its directory, if this one is in a store: it is made for the owner alone, those in it as it is.
        durable: without, one that is there already is not synchronised.

    Raises:
        OSError: it cannot be made, or one in the store is a symbolic link.
    """
    if store is not None:
        require_no_links(path, store)
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    above = missing[-1].parent if missing else path
    if durable and _identity(above) not in _durable:
        with suppress(PermissionError):  # it is not ours
            fsync_directory(above.absolute().parent)
        _durable.add(_identity(above))
    for directory in reversed(missing):
        with suppress(FileExistsError):  # made meanwhile
            _make_one(directory, store)
        fsync_directory(directory.parent)
        _durable.add(_identity(directory))
    path.mkdir(exist_ok=True)  # raises if it is something else


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _make_one(directory: Path, store: Path | None) -> None:
    if store is None or not directory.is_relative_to(store):
        directory.mkdir()
        return
    directory.mkdir(_OWNER_ONLY)
    if directory != store:
        directory.chmod(directory.parent.stat().st_mode & _SHARED_BITS)


def require_no_links(path: Path, store: Path) -> None:
    """Refuse a directory that is reached through a link in a store: what is changed there is elsewhere.

    Raises:
        OSError: it, or one above it in the store, is a link. `objects` may be one.
    """
    if path.is_relative_to(store):
        for directory in (path, *path.parents)[: len(path.parts) - len(store.parts)]:
            if directory != store / "objects" and directory.is_symlink():
                raise OSError(errno.ELOOP, f"{directory.name} is a symbolic link; remove it")


def make_file(path: Path) -> None:
    """Make an empty file with the permissions of its directory, if there is none; no link is followed.

    Raises:
        OSError: it cannot be made, or a link or something else has its name.
    """
    os.close(_open_own(path))


def read_at(fd: int, offset: int, count: int) -> bytes:
    """`count` bytes of a file from `offset` on, fewer where it ends."""
    parts = []
    while count > 0 and (part := os.pread(fd, count, offset)):
        parts.append(part)
        offset, count = offset + len(part), count - len(part)
    return b"".join(parts)


def advise_in_order(fd: int) -> None:
    """Tell the system that a file is read from its beginning to its end: it then reads farther ahead."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold the exclusive lock on a file (made if absent); yields its descriptor. The lock ends with the process.

    Raises:
        OSError: it cannot be made, or a link or something else has its name.
    """
    fd = _open_own(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def locked_for_change(path: Path, temp_dir: Path | None = None) -> Iterator[None]:
    """Hold a lock under which a file is read, changed and replaced (`atomic_write`).

    It is that of the store whose `temp_dir` is named; else that of the file itself, which is made, empty, if absent.
    Whoever waited for a file notices that it was replaced meanwhile, and locks the new one. A link is followed.

    Raises:
        StoreError: it cannot be made or written.
    """
    target = Path(os.path.realpath(path)) if temp_dir is None else temp_dir.parent / LOCK
    is_current = False
    try:
        make_directory(target.parent)
        while not is_current:
            with locked(target) as fd:
                with suppress(FileNotFoundError):
                    is_current = os.path.samestat(os.fstat(fd), target.stat())
                if is_current:
                    yield
    except OSError as error:
        raise UnwritableStoreError(
            f"{path}: cannot be written ({error.strerror or error}); nothing was changed"
        ) from error


def _open_own(path: Path) -> int:
    """Open a file of a store for reading and writing, or make it; through no link, and nothing but a regular file."""
    flags, fd = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, -1
    while fd < 0:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, _OWNER_ONLY & 0o666)
            _inherit_mode(fd, path.parent)
        except FileExistsError:
            with suppress(FileNotFoundError):  # removed meanwhile
                fd = _open_existing(path, flags)
    return fd


def _open_existing(path: Path, flags: int) -> int:
    problem = f"{path.name} is a link, or not a regular file; remove it"
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise OSError(error.errno, problem) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, problem)
    return fd


def _inherit_mode(fd: int, directory: Path) -> None:
    """Give a new file the permissions of its directory, less those to enter it."""
    with suppress(PermissionError):  # a file system without permissions
        os.fchmod(fd, directory.stat().st_mode & 0o666)


def allow_open_files(count: int) -> int:
    """Let this process have `count` files open beside a few, as far as the system allows; returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count + _OTHER_FILES:
        limit = count + _OTHER_FILES
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return count if soft == resource.RLIM_INFINITY else min(count, max(0, soft - _OTHER_FILES))
