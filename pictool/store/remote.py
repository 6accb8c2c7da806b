"""A remote: objects at any URL that fsspec knows, laid out as a store is (`URL/objects/ab/KEY.kvo`).

Objects are read by ranges, with retries. No answer is trusted: `fetching.py` checks it as a local object is checked. A
push becomes visible whole: by a rename in a file system, by a put in an object storage, where that is one step.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from pictool.errors import InputError, RemoteError, StoreError
from pictool.store.entries import SUFFIX

_OBJECT_STORES = {"abfs", "abfss", "adl", "az", "gcs", "gs", "memory", "obs", "oci", "oss", "s3", "s3a", "tos"}
_READ_ONLY = {"http", "https"}
_TEMPORARY = {408, 425, 429}  # HTTP statuses below 500 after which trying again helps
_DENIED = {401, 403, 407}
_DOWN_S = 30.0  # for so long a remote that could not be reached gets no requests
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

    `timeout_s` is how long an http server may send nothing. Credentials, headers and end points are configured for
    fsspec (`FSSPEC_S3_ENDPOINT_URL`, `~/.config/fsspec/`).
    """

    def __init__(self, url: str, retry: Retry = Retry(), timeout_s: float = 30.0) -> None:
        self.url, self.retry, self.timeout_s = url.rstrip("/") or "/", retry, timeout_s
        self._down_until, self._down_why = 0.0, ""
        self._cancelled = threading.Event()

    def __str__(self) -> str:
        return _without_password(self.url)

    def name(self, key: str) -> str:
        """The name of an object in messages."""
        return f"{self}/{_relative(key)}"

    def __reduce__(self) -> tuple[type[Remote], tuple[str, Retry, float]]:
        return Remote, (self.url, self.retry, self.timeout_s)  # each process connects by itself

    def within(self, *names: str) -> Remote:
        """The remote of a store in a directory of this one's. It is cancelled with this one."""
        remote = Remote("/".join((self.url, *names)), self.retry, self.timeout_s)
        remote._cancelled = self._cancelled
        return remote

    def cancel(self) -> None:
        """Give up: no request is sent any more. One that was sent is not tried again, and no pause is waited for."""
        self._cancelled.set()

    def read(self, key: str, start: int, end: int, at_most: bool = False) -> bytes | None:
        """Bytes [start, end) of an object; None if there is no such object.

        With `at_most` an object may end before `end`, and a server that ignores ranges returns all of it.

        Raises:
            RemoteError: all attempts failed.
        """

        def request() -> bytes:
            data: bytes = self._files.cat_file(self._path(key), start=start, end=end)
            if at_most:
                return data
            if len(data) > end - start:  # the range was ignored
                data = data[start:end]
            if len(data) < end - start:
                raise _ShortRead(f"{len(data):,d} of {end - start:,d} bytes came")
            return data

        return self._attempt(key, request)

    def size(self, key: str) -> int | None:
        """Bytes of an object; None if there is no such object. Raises RemoteError."""
        return self._attempt(key, lambda: int(self._files.info(self._path(key))["size"]))

    def require_writable(self) -> None:
        """Raises StoreError if it can only be read."""
        if self._protocol in _READ_ONLY:
            raise StoreError(f"{self}: is read-only ({self._protocol}); push to the directory or bucket that it serves")

    def write(self, key: str, path: os.PathLike[str]) -> None:
        """Send an object's file; it appears whole or not at all.

        Raises:
            StoreError: it cannot be written there.
        """
        self.require_writable()
        try:
            done = self._attempt(key, lambda: self._put(path, self._path(key)))
        except RemoteError as error:
            raise StoreError(str(error).replace("cannot be fetched", "cannot be written")) from error
        if done is None:
            raise StoreError(f"{self.name(key)}: cannot be written (no such place); see whether {self} exists")

    def _put(self, path: os.PathLike[str], target: str) -> bool:
        if self._protocol in _OBJECT_STORES:
            self._files.put_file(os.fspath(path), target)
            return True
        temp = f"{target}.{secrets.token_hex(8)}.tmp"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            self._files.put_file(os.fspath(path), temp)
            self._files.mv(temp, target)
        except BaseException:
            with suppress(Exception):  # the first error is raised
                self._files.rm_file(temp)
            raise
        return True

    def _attempt(self, key: str, request: Callable[[], T]) -> T | None:
        """What a request returns, tried again after temporary problems; None if there is no such object."""
        self._require_up(key)
        for failures in range(1, self.retry.attempts + 1):
            if self._cancelled.is_set():
                raise RemoteError(f"{self.name(key)}: was given up", key)
            try:
                return request()
            except FileNotFoundError as error:
                if not isinstance(error.__cause__, Exception) or _status(error.__cause__) == 404:
                    return None
                problem: Exception = error.__cause__  # fsspec's http raises it for any problem
            except InputError:
                raise
            except Exception as error:  # whatever a file system raises
                problem = error
            if not _is_temporary(problem):
                break
            if failures < self.retry.attempts:
                self._cancelled.wait(self.retry.pause_s(failures))
        raise self._failed(key, problem, failures) from problem

    def _failed(self, key: str, problem: Exception, failures: int) -> RemoteError:
        if _status(problem) in _DENIED or isinstance(problem, PermissionError):
            return RemoteError(f"{self.name(key)}: access is denied ({_why(problem)}); see who may use {self}", key)
        why = f"{_why(problem)}, tried {failures} times" if failures > 1 else _why(problem)
        if isinstance(problem, OSError) and _status(problem) is None:
            self._down_until, self._down_why = time.monotonic() + _DOWN_S, why
        return self._unavailable(key, why)

    def _unavailable(self, key: str, why: str) -> RemoteError:
        return RemoteError(
            f"{self.name(key)}: cannot be fetched ({why}); try again later, or leave the remote out (--remote '')", key
        )

    def _require_up(self, key: str) -> None:
        if time.monotonic() < self._down_until:
            raise self._unavailable(key, self._down_why)

    def _path(self, key: str) -> str:
        return f"{self._root}/{_relative(key)}"

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


class _ShortRead(Exception):
    pass


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
    return not isinstance(error, PermissionError | NotImplementedError | TypeError | ValueError | IsADirectoryError)


def _why(error: Exception) -> str:
    """The reason of an error, in one line."""
    status = _status(error)
    if status is not None:
        return f"{status} {getattr(error, 'message', '')}".strip()
    text = getattr(error, "strerror", None) or str(error)
    text = "no answer in time" if isinstance(error, TimeoutError) and not text else text
    return _without_password(" ".join(f"{text or type(error).__name__}".split()))


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)


def _open_file_system(url: str, timeout_s: float) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it.

    Raises:
        InputError: a protocol that is unknown, or whose package is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = fsspec.core.split_protocol(url)[0] or "file"
    try:
        files, root = fsspec.core.url_to_fs(url, **_options(protocol, timeout_s))
    except ImportError as error:
        package = str(known_implementations[protocol]["class"]).split(".")[0]
        remedy = f"pip install {package}" if package != "fsspec" else str(error)
        raise InputError(
            f"remote {_without_password(url)}: no package for {protocol} is installed; {remedy}"
        ) from error
    except ValueError as error:
        name = _without_password(url)
        raise InputError(
            f"remote {name}: cannot be opened ({error}); name a directory, or a URL of fsspec's"
        ) from error
    return files, str(root)


def _options(protocol: str, timeout_s: float) -> dict[str, Any]:
    """The options for opening a file system, besides those in the user's configuration of fsspec."""
    if protocol not in ("http", "https"):
        return {}
    import aiohttp
    from fsspec.config import conf

    configured = conf.get(protocol, {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, timeout_s), sock_read=timeout_s)
    return {
        "timeout": configured.get("timeout", timeout),
        "headers": {"Accept-Encoding": "identity", **configured.get("headers", {})},
    }
