"""A file system of fsspec's that goes wrong as it is told: `hostile://` (renames), and `oci://` (an object storage)."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from typing import Any, ClassVar

from fsspec import AbstractFileSystem, register_implementation

from hostile.values import NUMBERS, SHAPES, text

Behave = Callable[[], Any]


class HostileFiles(AbstractFileSystem):  # type: ignore[misc]
    """Files in memory; a method in `faults` does that instead."""

    protocol: Any = "hostile"
    cachable = False
    files: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[dict[str, Behave]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).split("://")[-1].rstrip("/")

    def _call(self, name: str, honest: Behave) -> Any:
        return self.faults[name]() if name in self.faults else honest()

    def _content(self, path: str) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self.files[path]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> Any:
        return self._call("cat_file", lambda: self._content(path)[start:end])

    def info(self, path: str, **_: Any) -> Any:
        return self._call("info", lambda: {"name": path, "size": len(self._content(path)), "type": "file"})

    def put_file(self, lpath: str, rpath: str, **_: Any) -> Any:
        def honest() -> None:
            with open(lpath, "rb") as file:
                self.files[self._strip_protocol(rpath)] = file.read()

        return self._call("put_file", honest)

    def mv(self, path1: str, path2: str, **_: Any) -> Any:
        def honest() -> None:
            self.files[self._strip_protocol(path2)] = self.files.pop(self._strip_protocol(path1))

        return self._call("mv", honest)

    def makedirs(self, path: str, exist_ok: bool = False) -> Any:
        return self._call("makedirs", lambda: None)

    def rm_file(self, path: str) -> Any:
        return self._call("rm_file", lambda: self.files.pop(self._strip_protocol(path), None))

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        names = [name for name in self.files if name.startswith(self._strip_protocol(path))]
        entries = [{"name": name, "size": len(self.files[name]), "type": "file"} for name in names]
        return self._call("ls", lambda: entries if detail else names)


class HostileBucket(HostileFiles):
    protocol = "oci"


register_implementation("hostile", HostileFiles, clobber=True)
register_implementation("oci", HostileBucket, clobber=True)


def raising(error: BaseException) -> Behave:
    def fail() -> Any:
        raise error

    return fail


def draw_faults(draw: random.Random) -> tuple[str, dict[str, Behave]]:
    """What goes wrong, by method, and what that is called."""
    method = draw.choice(("cat_file", "cat_file", "cat_file", "info", "put_file", "mv", "makedirs", "ls", "rm_file"))
    message = text(draw)
    errors: tuple[BaseException, ...] = (
        OSError(draw.choice((errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ELOOP, 9999)), message),
        OSError(message),
        OSError(),
        ValueError(message),
        KeyError(message),
        RuntimeError(message),
        TypeError(message),
        AttributeError(message),
        IndexError(),
        EOFError(),
        FileNotFoundError(message),
        PermissionError(message),
        IsADirectoryError(message),
        FileExistsError(message),
        TimeoutError(),
        ConnectionResetError(),
        NotImplementedError(),
        AssertionError(message),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
        StopIteration(),
        ImportError(message),
        MemoryError(),
        RecursionError(),
        asyncio.CancelledError(),
        TimeoutError(),
        ZeroDivisionError(),
        Exception(message),
    )
    size = draw.choice((*NUMBERS, *SHAPES, "x", "5"))
    values: tuple[Any, ...] = (
        None,
        b"",
        "text",
        0,
        [],
        {},
        bytes(5),
        bytearray(b"x"),
        bytes(1 << 21),
        {"size": size},
        {"size": size},
        {"size": size, "type": "directory"},
        [{"name": text(draw), "size": size}],
        [None],
        ["../../x"],
        float("nan"),
        object(),
    )
    if draw.random() < 0.5:
        error = draw.choice(errors)
        return f"{method} raises {type(error).__name__} {str(error)[:30]!r}", {method: raising(error)}
    returned = draw.choice(values)
    return f"{method} returns {str(returned)[:40]!r}", {method: lambda: returned}
