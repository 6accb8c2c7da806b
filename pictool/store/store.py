"""The store: a directory of objects named by key, safe for many processes at once.

.pic/objects/ab/abcdef….kvo     an object, visible only when complete
.pic/tmp/…                      being written; renamed into place after fsync
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pictool.errors import ObjectError, PicError, StoreError
from pictool.store.format import CompiledChunk, ObjectFile, ObjectMeta, write_object

DEFAULT_ROOT = ".pic"
_MIN_PREFIX = 4


@dataclass(frozen=True)
class StoredObject:
    """One line of a listing; `meta` is None, and `problem` says why, if the object cannot be read."""

    key: str
    path: Path
    num_bytes: int
    meta: ObjectMeta | None
    text: str
    problem: str | None


@contextmanager
def atomic_write(path: Path, temp_dir: Path | None = None) -> Iterator[BinaryIO]:
    """Write a file that becomes visible only when complete: temp file, fsync, rename, fsync of the directory.

    A symbolic link stays one: the file it names is replaced. A device or pipe (/dev/null) is written directly.

    Raises:
        StoreError: the disk is full, or the directory cannot be written; nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    temp = (temp_dir or target.parent) / f".{path.name[:16]}.{secrets.token_hex(8)}.tmp"
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            with path.open("wb") as file:
                yield file
            return
        temp.parent.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, target)
        _fsync_directory(target.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror or error}); nothing was changed") from error
    finally:
        with suppress(OSError):
            temp.unlink()


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Store:
    """Objects by key in a directory (argument, `PIC_STORE`, or `.pic`). Creating one touches nothing on disk."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root or os.environ.get("PIC_STORE") or DEFAULT_ROOT)

    def path(self, key: str) -> Path:
        return self.root / "objects" / key[:2] / f"{key}.kvo"

    def has(self, key: str) -> bool:
        """Whether an object with an undamaged header and the right length is there."""
        try:
            with ObjectFile(self.path(key)) as found:
                return found.meta.key == key
        except ObjectError:
            return False

    def open(self, key: str) -> ObjectFile:
        """Open an object by its whole key.

        Raises:
            StoreError: not in the store.
            ObjectError: there, but damaged, or the file is another object.
        """
        path = self.path(key)
        if not os.path.exists(path):
            raise StoreError(f"{key[:12]}: no such object in the store {self.root}; compile its text first")
        found = ObjectFile(path)
        if found.meta.key != key:
            found.close()
            raise ObjectError(f"{path}: holds the object {found.meta.key[:12]}, not what its name says")
        return found

    def put(self, chunk: CompiledChunk) -> Path:
        """Write an object atomically; an equal one that is there already is replaced by the same bytes."""
        path = self.path(chunk.meta.key)
        with atomic_write(path, self.root / "tmp") as file:
            write_object(file, chunk)
        return path

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self.files())

    def files(self) -> dict[str, tuple[int, int]]:
        """What every object's file is now, by key: when it was changed, in nanoseconds, and its bytes."""
        found = {}
        for directory in self.root.glob("objects/??"):
            with suppress(OSError), os.scandir(directory) as entries:
                for entry in entries:
                    key = entry.name.removesuffix(".kvo")
                    if key != entry.name and key[:2] == directory.name:
                        with suppress(OSError):
                            status = entry.stat()
                            found[key] = (status.st_mtime_ns, status.st_size)
        return found

    def resolve(self, prefix: str) -> str:
        """The whole key for an abbreviation of at least 4 hex digits, as in git."""
        if not re.fullmatch(rf"[0-9a-f]{{{_MIN_PREFIX},64}}", prefix):
            raise StoreError(f"{prefix!r}: neither a file nor a key (at least {_MIN_PREFIX} hex digits)")
        found = sorted(path.stem for path in self.root.glob(f"objects/{prefix[:2]}/{prefix}*.kvo"))
        if len(found) != 1:
            what = "no object" if not found else f"{len(found)} objects"
            raise StoreError(f"{prefix}: {what} with this key in the store {self.root}; see pic store ls")
        return found[0]

    def objects(self) -> Iterator[StoredObject]:
        """Every object with what its header says; damaged ones are listed with their problem."""
        for key in self.keys():
            if described := self.describe(key):
                yield described

    def stamp(self) -> tuple[int, ...]:
        """Changes whenever an object has come or gone: when its directories were changed, in nanoseconds."""
        found = []
        for path in (self.root / "objects", *self.root.glob("objects/??")):
            with suppress(OSError):
                found.append(path.stat().st_mtime_ns)
        return tuple(sorted(found))

    def describe(self, key: str) -> StoredObject | None:
        """An object with what its header says, or its problem; None if another process removed it meanwhile."""
        path = self.path(key)
        try:
            with self.open(key) as found:
                return StoredObject(key, path, found.num_bytes, found.meta, found.text(), None)
        except PicError as error:
            with suppress(FileNotFoundError):
                return StoredObject(key, path, path.stat().st_size, None, "", str(error))
        return None
