"""A remote: objects at any URL that fsspec knows, laid out as a store is (`URL/objects/ab/KEY.kvo`).

Objects are read by ranges, with retries, bounded in bytes and in time. No answer is trusted: `fetching.py` checks it as
a local object is checked. A push becomes visible whole: in a directory by temp file, fsync and rename, in other file
systems by a rename, in an object storage by a put, where that is one step.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pictool.errors import InputError, ObjectError, RemoteError, StoreError
from pictool.reading import NotRegularError, open_regular
from pictool.store.directory import ensure_store, is_store, require_store
from pictool.store.entries import SUFFIX, temp_candidates
from pictool.store.files import atomic_write, locked_for_change, read_at, remove_stale_temp
from pictool.store.objects.format import EncodedObject, ObjectFile
from pictool.store.objects.header import Header, HeaderError, header_bytes
from pictool.store.signatures import MAX_BYTES as MAX_SIGNATURES
from pictool.store.signatures import SUFFIX as SIGNED
from pictool.store.signatures import Signed, merge
from pictool.urls import without_credentials

_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "obs", "oci", "oss", "s3", "s3a", "tos"}
_READ_ONLY = {"http", "https"}
_TEMPORARY = {408, 425, 429}  # HTTP statuses below 500 after which trying again helps
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # of a file system: no later attempt is another
_DENIED = {401, 403, 407}
_DOWN_S = 30.0  # for so long a remote that could not be reached gets no requests
_FIRST = 1 << 16  # bytes in which a header mostly is
_TRAILER = 1 << 16  # bytes at an object's end that are compared
_PIECE = 1 << 20  # bytes of a file that are read at once
MIN_RATE = 8192.0  # bytes per second
T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How often a request is tried, and the pauses between: `first_s`, twice that, …, `most_s`, less up to a half."""

    attempts: int = 4
    first_s: float = 0.2
    most_s: float = 5.0

    def pause_s(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        longest: float = min(self.most_s, self.first_s * 2 ** (failures - 1))
        return longest * random.uniform(0.5, 1)


class Remote:
    """Objects at a URL: s3, gs, http, a directory, … It connects at the first request.

    A server may send nothing for `timeout_s`; after that a transfer that falls behind `min_rate` bytes per second is
    given up, so that a request of n bytes ends within `timeout_s` + n / `min_rate`. Credentials, headers and end points
    are configured for fsspec (`FSSPEC_S3_ENDPOINT_URL`, `~/.config/fsspec/`).
    """

    def __init__(self, url: str, retry: Retry = Retry(), timeout_s: float = 30.0, min_rate: float = MIN_RATE) -> None:
        self.url, self.retry, self.timeout_s, self.min_rate = url.rstrip("/") or "/", retry, timeout_s, min_rate
        self._down_until, self._down_why = 0.0, ""
        self._cancelled = threading.Event()

    def __str__(self) -> str:
        return without_credentials(self.url)

    def name(self, key: str) -> str:
        """The name of an object in messages."""
        return f"{self}/{_relative(key)}"

    def __reduce__(self) -> tuple[type[Remote], tuple[str, Retry, float, float]]:
        return type(self), (self.url, self.retry, self.timeout_s, self.min_rate)  # each process connects by itself

    def within(self, *names: str) -> Remote:
        """The remote of a store in a directory of this one's. It is cancelled with this one."""
        remote = Remote("/".join((self.url, *names)), self.retry, self.timeout_s, self.min_rate)
        remote._cancelled = self._cancelled
        return remote

    def cancel(self) -> None:
        """Give up: no request is sent any more. One that was sent is not tried again, and no pause is waited for."""
        self._cancelled.set()

    # Reading

    def read_first(self, key: str, count: int) -> tuple[bytes, bool] | None:
        """The first `count` bytes of an object, or all if it is smaller; and whether ranges of it can be read.

        None if there is no such object. Raises RemoteError as `read`.
        """
        return self._attempt(key, lambda: self._read_range(self._path(key), 0, count))

    def read(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes [start, end) of an object; None if there is no such object.

        Raises:
            RemoteError: all attempts failed.
        """

        def request() -> bytes:
            data, _ = self._read_range(self._path(key), start, end)
            _require_all(len(data), end - start)
            return data

        return self._attempt(key, request)

    def with_header(self, key: str, first: bytes) -> bytes:
        """The beginning of an object with all of its header, of which `first` has a part.

        Raises:
            HeaderError: not an object. RemoteError: as `read`.
        """
        length = header_bytes(first)
        return first if len(first) >= length else first + (self.read(key, len(first), length) or b"")

    def read_all(self, key: str, num_bytes: int, write: Callable[[int, bytes], None]) -> bool | None:
        """Pass a whole object of `num_bytes` to `write(offset, data)` as it comes: from a server that ignores ranges.

        None if there is no such object. An attempt that follows a failed one begins at offset 0 again.

        Raises:
            RemoteError: all attempts failed, or it is longer.
        """

        def request() -> bool:
            offset = 0

            def take(data: bytes) -> None:
                nonlocal offset
                write(offset, data)
                offset += len(data)

            self._files.read_all(self._path(key), num_bytes, take, self._allowed_s)
            _require_all(offset, num_bytes)
            return True

        return self._attempt(key, request)

    def read_signatures(self, key: str) -> bytes:
        """The sidecar of an object; nothing, if there is none. Raises RemoteError."""
        found = self._attempt(key, lambda: self._read_range(self._path(key) + SIGNED, 0, MAX_SIGNATURES))
        return b"" if found is None else found[0]

    def _read_range(self, path: str, start: int, end: int) -> tuple[bytes, bool]:
        """Bytes [start, end) of a file, fewer where it ends; and whether ranges can be read. One attempt."""
        if self._protocol in _READ_ONLY:
            data, has_ranges = self._files.read_range(path, start, end, self._allowed_s)
            return data, has_ranges or len(data) < end - start
        if self._directory is not None:
            return _read_local(path, start, end), True
        from fsspec.asyn import AsyncFileSystem

        is_async = isinstance(self._files, AsyncFileSystem)
        limit = {"timeout": self._allowed_s(end - start)} if is_async else {}
        data = self._files.cat_file(path, start=start, end=end, **limit)
        return bytes(data[: end - start]), True

    # Writing

    def require_writable(self) -> None:
        """Raises StoreError if it can only be read, or is a directory of somebody else's files."""
        if self._protocol in _READ_ONLY:
            raise StoreError(f"{self}: is read-only ({self._protocol}); push to the directory or bucket that it serves")
        if self._directory is not None:
            require_store(self._directory)

    def whole_bytes(self, key: str) -> int | None:
        """Bytes of an object that it has, as far as its beginning tells: the header names the key, and its file is as
        long as that says. None if there is none, or another. The data are not read.

        Raises:
            RemoteError: all attempts failed.
        """
        found = self.read_first(key, _FIRST)
        if found is None:
            return None
        first, _ = found
        try:
            first = self.with_header(key, first)
            length = header_bytes(first)
            header = Header.parse(first[8:length])
        except HeaderError:
            return None
        size = length + header.data_bytes
        return size if header.meta.key == key and self._size(key) == size else None

    def _size(self, key: str) -> int | None:
        return self._attempt(key, lambda: int(self._files.info(self._path(key))["size"]))

    def has_same(self, own: ObjectFile | EncodedObject) -> bool:
        """Whether it has this object, whole.

        A directory's file is read to its end, and checked as any object is. Elsewhere its size, its header (which holds
        a checksum of every part) and its last 64 KiB are compared, so that of a small object all is: an object storage
        shows no half object. Raises RemoteError.
        """
        key, size = own.meta.key, own.num_bytes
        if self._directory is not None:
            found = self._checked(self._path(key), key)
            return found is not None and found[1] == own.header()
        if size <= _TRAILER:
            first = self.read_first(key, size + 1)
            return first is not None and first[0] == own.read(0, size)
        if self._size(key) != size:
            return False
        header, trailer = own.header(), size - _TRAILER
        if self.read(key, 0, len(header)) != header:
            return False
        return self.read(key, trailer, size) == own.read(trailer, size)

    def another(self, own: ObjectFile | EncodedObject) -> int | None:
        """Bytes of another object of this key that it has, whole; None if there is none.

        Somebody has compiled the same chunk in another pack, so that last bits differ. A directory's file is read and
        checked to its end, elsewhere the header is. Raises RemoteError.
        """
        key, header = own.meta.key, own.header()
        if self._directory is not None:
            found = self._checked(self._path(key), key)
            return found[0] if found is not None and found[1] != header else None
        size = self.whole_bytes(key)
        return None if size is None or self.read(key, 0, len(header)) == header else size  # ours, but damaged

    def _checked(self, path: str, key: str) -> tuple[int, bytes] | None:
        """Bytes and header of an object in a directory, if every checksum of it holds, and it is of this key."""
        try:
            with ObjectFile(path, self.name(key)) as there:
                there.verify()
                there.require_key(key)
                return there.num_bytes, there.header()
        except ObjectError:
            return None

    def write(self, key: str, source: os.PathLike[str] | EncodedObject) -> None:
        """Send an object, from its file or from memory; it appears whole or not at all.

        Raises:
            StoreError: it cannot be written there.
        """
        self.require_writable()
        try:
            done = self._attempt(key, lambda: self._put(source, self._path(key)), is_write=True)
        except RemoteError as error:
            raise StoreError(str(error).replace("cannot be fetched", "cannot be written")) from error
        if done is None:
            raise StoreError(f"{self.name(key)}: cannot be written (no such place); check that {self} exists")

    def write_signatures(self, signed: Signed, sidecar: bytes) -> None:
        """Add signatures to those that it has of an object; in a directory, whoever else does at the same time.

        Raises StoreError and RemoteError.
        """
        there = self.read_signatures(signed.key)
        if merge(sidecar, there, digest=signed.digest) != there:
            self.require_writable()
            path = self._path(signed.key) + SIGNED
            with nullcontext() if self._directory is None else locked_for_change(Path(path), self._directory / "tmp"):
                merged = merge(sidecar, self.read_signatures(signed.key), digest=signed.digest)
                self._attempt(signed.key, lambda: self._put(merged, path), is_write=True)

    def remove_stale_temps(self) -> int:
        """Remove the temp files that killed pushes left in a directory; returns how many.

        A push holds a lock on its temp file, as a store's writers do. Other file systems have no such locks.
        """
        if self._directory is None or not is_store(self._directory) or (self._directory / "tmp").is_symlink():
            return 0
        temps = [path for path in temp_candidates(self._directory) if path.is_file() and not path.is_symlink()]
        return sum(remove_stale_temp(path) is not None for path in temps)

    def _put(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> bool:
        if self._directory is not None:
            if not self._directory.is_dir():
                self._directory.mkdir(parents=True, exist_ok=True)  # for whom the umask says: it is there to be shared
            ensure_store(self._directory)
            _put_local(source, Path(target), self._directory / "tmp")
            return True
        if self._protocol in _OBJECT_STORES:
            self._send(source, target)
            return True
        temp = f"{self._root}/tmp/{Path(target).name.partition('.')[0]}.{secrets.token_hex(8)}.tmp"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.makedirs(temp.rpartition("/")[0], exist_ok=True)
        try:
            self._send(source, temp)
            self._files.mv(temp, target)
        except BaseException:
            with suppress(Exception):  # the first error is raised
                self._files.rm_file(temp)
            raise
        return True

    def _send(self, source: os.PathLike[str] | EncodedObject | bytes, target: str) -> None:
        if isinstance(source, EncodedObject):
            self._files.pipe_file(target, source.read(0, source.num_bytes))
        elif isinstance(source, bytes):
            self._files.pipe_file(target, source)
        else:
            self._files.put_file(os.fspath(source), target)

    # Attempts

    def _attempt(self, key: str, request: Callable[[], T], is_write: bool = False) -> T | None:
        """What a request returns, tried again after temporary problems; None if there is no such object.

        A write says nothing of whether other objects can be read, and is tried whatever became of them.
        """
        if not is_write and time.monotonic() < self._down_until:
            raise self._unavailable(key, self._down_why)
        for failures in range(1, self.retry.attempts + 1):
            if self._cancelled.is_set():
                raise RemoteError(f"{self.name(key)}: was cancelled", key)
            try:
                return request()
            except FileNotFoundError:
                return None
            except (InputError, StoreError, RemoteError):
                raise
            except Exception as error:  # whatever a file system raises
                problem: Exception = error
            except CancelledError:  # of a request within the file system
                problem = ConnectionAbortedError("the request was cancelled")
            if not _is_temporary(problem):
                break
            if failures < self.retry.attempts:
                self._cancelled.wait(self.retry.pause_s(failures))
        raise self._failed(key, problem, failures, is_write) from problem

    def _failed(self, key: str, problem: Exception, failures: int, is_write: bool) -> RemoteError:
        if _status(problem) in _DENIED or isinstance(problem, PermissionError):
            return RemoteError(
                f"{self.name(key)}: access denied ({_why(problem)}); check the permissions of {self}", key
            )
        why = f"{_why(problem)}, tried {failures} times" if failures > 1 else _why(problem)
        if isinstance(problem, OSError) and _status(problem) is None and not is_write:
            self._down_until, self._down_why = time.monotonic() + _DOWN_S, why
        return self._unavailable(key, why)

    def _unavailable(self, key: str, why: str) -> RemoteError:
        return RemoteError(
            f"{self.name(key)}: cannot be fetched ({why}); try again later, or omit the remote (--remote '')", key
        )

    def _path(self, key: str) -> str:
        return f"{self._root}/{_relative(key)}"

    def _allowed_s(self, num_bytes: int) -> float:
        """How long a transfer of so many bytes may take."""
        return self.timeout_s + num_bytes / self.min_rate

    @cached_property
    def _directory(self) -> Path | None:
        """The directory that it is; None if it is none of this machine's file systems."""
        return Path(self._root or "/") if self._protocol in ("file", "local") else None

    @cached_property
    def _file_system(self) -> tuple[Any, str]:
        return _open_file_system(self.url, self.timeout_s)

    @property
    def _files(self) -> Any:
        return self._file_system[0]

    @property
    def _root(self) -> str:
        return self._file_system[1].rstrip("/")

    @property
    def _protocol(self) -> str:
        name = self._files.protocol
        return name if isinstance(name, str) else str(name[0])


def _require_all(count: int, num_bytes: int) -> None:
    if count < num_bytes:
        raise EOFError(f"only {count:,d} of {num_bytes:,d} bytes arrived")


def _relative(key: str) -> str:
    return f"objects/{key[:2]}/{key}{SUFFIX}"


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, if it has one."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _is_temporary(error: Exception) -> bool:
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _TEMPORARY
    if isinstance(error, OSError) and error.errno in _FULL:
        return False
    return not isinstance(error, PermissionError | NotImplementedError | TypeError | ValueError | IsADirectoryError)


def _why(error: Exception) -> str:
    """The reason of an error, in one line."""
    status = _status(error)
    if status is not None:
        return f"{status} {getattr(error, 'message', '')}".strip()
    text = getattr(error, "strerror", None) or str(error)
    text = "no answer in time" if isinstance(error, TimeoutError) and not text else text
    return without_credentials(" ".join(f"{text or type(error).__name__}".split()))


def _open_file_system(url: str, timeout_s: float) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        InputError: a protocol that is unknown, or whose package is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = fsspec.core.split_protocol(url)[0] or "file"
    try:
        if protocol in _READ_ONLY:
            from pictool.store.remote.http import HttpFiles, http_options

            return HttpFiles(**http_options(fsspec.config.conf.get(protocol, {}), timeout_s)), url
        files, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = str(known_implementations[protocol]["class"]).split(".")[0]
        remedy = f"pip install {package}" if package != "fsspec" else str(error)
        raise InputError(
            f"remote {without_credentials(url)}: no package for {protocol} is installed; {remedy}"
        ) from error
    except ValueError as error:
        name = without_credentials(url)
        raise InputError(
            f"remote {name}: cannot be opened ({without_credentials(str(error))}); use a directory or an fsspec URL"
        ) from error
    return files, str(root)


def _read_local(path: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a regular file, fewer where it ends; a pipe or a device is refused, and not waited for."""
    try:
        fd = open_regular(Path(path))
    except NotRegularError as error:
        raise ValueError(error.strerror) from error
    try:
        return read_at(fd, start, end - start)
    finally:
        os.close(fd)


def _put_local(source: os.PathLike[str] | EncodedObject | bytes, target: Path, temp_dir: Path) -> None:
    if isinstance(source, EncodedObject | bytes):
        with atomic_write(target, temp_dir) as copy:
            copy.writelines([source] if isinstance(source, bytes) else source.parts)
    else:
        with Path(source).open("rb") as file, atomic_write(target, temp_dir) as copy:
            shutil.copyfileobj(file, copy, _PIECE)
