"""The log of requests that `pic serve --request-log` writes: keyed hashes of what prompts are made of, and no text.

A line of JSON for each request: `{"pic_request": 1, "time", "tenant", "tokens", "linked", "seconds", "segments"}`.
`segments` are `[kind, is_marked, [[hash, bytes], …]]`: blocks cut by content, hashed by BLAKE2b under a random key of
the tenant. Who does not have the keys (FILE.keys) cannot tell whether a text was in a request, nor compare tenants.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pictool.errors import InputError
from pictool.estimate.hashing import Rolling
from pictool.estimate.segments import BYTES_PER_TOKEN, Segment, TokenScale, split_text
from pictool.reading import parse_json, read_file

_KEY_BYTES, _HASH_BYTES = 32, 8
_MAX_WAITING = 1000  # requests that wait to be written; more are not logged
_BEGIN = b'{"pic_request":'  # of every line
_MAX_KEYS = 16 << 20  # bytes of their file


@dataclass(frozen=True)
class Named:
    """An object that a request names: its key, and its tokens."""

    key: str
    num_tokens: int


@dataclass(frozen=True)
class Request:
    """What is logged of a request. `segments` are texts, token ids, and objects by name."""

    time: float
    tenant: str
    segments: tuple[Segment | Named, ...]
    tokens: int
    linked: int
    seconds: float


class RequestLog:
    """Writes requests to a file, in a thread of its own, and never fails because of it.

    Where the file cannot be written any more, that is told to `warn` once, and nothing is logged from then on.

    Args:
        max_bytes: of the file and the one before it (FILE.1) together.

    Raises:
        InputError: the file, or that of its keys, cannot be used.
    """

    def __init__(self, path: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._path, self._max_bytes, self._warn = path, max_bytes, warn
        self._keys_path = path.with_name(f"{path.name}.keys")
        self._keys = _read_keys(self._keys_path)
        for own in (path, path.with_name(f"{path.name}.1")):
            _require_log(own)
        self._thread, self._waiting = ThreadPoolExecutor(1, "pic-log"), threading.Semaphore(_MAX_WAITING)
        self._scale, self._is_broken, self._num_lost = TokenScale(BYTES_PER_TOKEN), False, 0
        try:
            self._file = _open(path)
        except OSError as error:
            raise InputError(f"--request-log {path}: cannot be written ({error.strerror})") from error

    def add(self, request: Request) -> None:
        """Log a request soon. Returns at once; if too many wait, it is not logged."""
        if self._is_broken:
            return
        if not self._waiting.acquire(blocking=False):
            self._num_lost += 1
            return
        self._thread.submit(self._write, request)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._thread.shutdown()
        os.close(self._file)
        if self._num_lost:
            self._warn(f"{self._path}: {self._num_lost} requests came too fast to be logged")

    def _write(self, request: Request) -> None:
        try:
            if not self._is_broken:
                self._append(json.dumps(self._record(request), separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            self._is_broken = True
            self._warn(
                f"{self._path}: cannot be written ({error.strerror}); requests are answered, and not logged any more"
            )
        finally:
            self._waiting.release()

    def _append(self, line: bytes) -> None:
        """Write a whole line, or nothing of it."""
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._max_bytes // 2:
            os.replace(self._path, self._path.with_name(f"{self._path.name}.1"))
            os.close(self._file)
            self._file, size = _open(self._path), 0
        try:
            written = os.write(self._file, line)
        except OSError:
            os.ftruncate(self._file, size)
            raise
        if written < len(line):  # the disk is full
            os.ftruncate(self._file, size)
            raise OSError(28, "No space left on device")

    def _record(self, request: Request) -> dict[str, Any]:
        key = self._key_of(request.tenant)
        segments = [part for segment in request.segments for part in self._parts(segment, key)]
        return {
            "pic_request": 1, "time": round(request.time, 3), "tenant": request.tenant, "tokens": request.tokens,
            "linked": request.linked, "seconds": round(request.seconds, 4), "segments": segments,
        }  # fmt: skip

    def _parts(self, segment: Segment | Named, key: bytes) -> Iterable[list[Any]]:
        if isinstance(segment, Named):
            yield ["document", True, [[_hash(segment.key.encode(), key), max(1, BYTES_PER_TOKEN * segment.num_tokens)]]]
            return
        content = segment.content
        assert isinstance(content, str | np.ndarray)
        if isinstance(content, str):
            is_whole = segment.is_marked or segment.kind == "assistant"
            for kind, text in [(segment.kind, content)] if is_whole else split_text(segment.kind, content):
                yield [kind, segment.is_marked, self._blocks(text.encode(errors="surrogatepass"), key)]
        else:
            yield [segment.kind, segment.is_marked, self._blocks(content.astype("<i4").tobytes(), key)]

    def _blocks(self, data: bytes, key: bytes) -> list[list[Any]]:
        rolling = Rolling(np.frombuffer(data, dtype=np.uint8), int.from_bytes(key[:7], "little"))
        ends = self._scale.cut(rolling, np.asarray([0]), np.asarray([len(data)])).tolist()
        return [[_hash(data[start:end], key), end - start] for start, end in zip([0, *ends], ends, strict=False)]

    def _key_of(self, tenant: str) -> bytes:
        """A tenant's key; a new one is kept before it is used."""
        if tenant not in self._keys:
            keys = {**self._keys, tenant: secrets.token_bytes(_KEY_BYTES)}
            beside = self._keys_path.with_name(f"{self._keys_path.name}.new")
            beside.unlink(missing_ok=True)
            written = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(written, "wb") as file:
                file.write(json.dumps({name: value.hex() for name, value in keys.items()}).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._keys_path)
            self._keys = keys
        return self._keys[tenant]


def _hash(data: bytes, key: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES, key=key).hexdigest()


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _require_log(path: Path) -> None:
    """Refuse a file that we did not write: a log is appended to, and the one before it replaced."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            begin = file.read(len(_BEGIN)) if is_file else b"no file"
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"--request-log {path}: cannot be read ({error.strerror})") from error
    if begin not in (b"", _BEGIN):
        raise InputError(f"--request-log {path}: is no log of requests; name another file")


def _read_keys(path: Path) -> dict[str, bytes]:
    """The keys of tenants. Raises InputError: others may read them, or they are none."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InputError(f"{path}: others may read these keys; chmod 600 it first")
        keys = {str(name): bytes.fromhex(value) for name, value in parse_json(read_file(path, _MAX_KEYS)).items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is no file of keys; remove it with its log, and a new one is made") from error
    if any(len(key) != _KEY_BYTES for key in keys.values()):
        raise InputError(f"{path}: is no file of keys; remove it with its log, and a new one is made")
    return keys
