"""Archives: many objects as one file, what `ar` is to `.o`.

archive := zstd frame (with its own checksum) of a tar, which any `tar --zstd` lists and unpacks:
           "archive.json"  {"format": "pictool.archive", "keys": [key, …], "version": "1"}
           key.kvo …       the objects, in this order, each byte for byte as in the store

The same objects give the same bytes. Nothing is taken from an archive before its checksums hold.

Object lists: what `pic compile -o` writes when one text becomes several objects (a thin archive, as of `ar`).

list := a safetensors file without tensors, its metadata
        {"checksum": BLAKE3 of `objects`, "format": "pictool.list", "objects": JSON list, "version": "1"}
        where `objects` has for each member [name of a file beside the list, key of the object in it]

A list is accepted only as this module writes it, so that no bit of it is outside the checksum; and a member only with
the key that the list says, so that an object written over it later is not taken for it.
"""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

import zstandard
from blake3 import blake3

from pictool.errors import ForeignObjectError, InputError, ObjectError, PicError
from pictool.store.entries import is_key
from pictool.store.files import atomic_write
from pictool.store.format import ObjectFile
from pictool.store.store import Store

FORMAT, VERSION, MANIFEST = "pictool.archive", "1", "archive.json"
_MAX_MANIFEST = 1 << 28
_BLOCK = 1 << 20
_LEVEL = 3


@dataclass(frozen=True)
class Imported:
    """Keys that an archive held; `new` are those that the store had not."""

    keys: tuple[str, ...]
    new: tuple[str, ...]


def export(store: Store, keys: Sequence[str], path: Path, on_object: Callable[[str], None] | None = None) -> int:
    """Write objects to one archive; returns its bytes. Every object is checked before it goes in.

    Raises:
        PicError: an object is missing or damaged, or the archive cannot be written; nothing is written then.
    """
    keys = sorted(set(keys))
    manifest = json.dumps({"format": FORMAT, "keys": keys, "version": VERSION}).encode()
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    with (
        atomic_write(path) as file,
        compressor.stream_writer(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        tar.addfile(_member(MANIFEST, len(manifest)), BytesIO(manifest))
        for key in keys:
            with store.look_here(key) as found:
                found.verify()
                with open(found.fileno(), "rb", closefd=False) as content:
                    tar.addfile(_member(f"{key}.kvo", found.num_bytes), content)
            if on_object:
                on_object(key)
    return path.stat().st_size


def _member(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info


def import_archive(store: Store, path: Path, on_object: Callable[[str], None] | None = None) -> Imported:
    """Take the objects of an archive into a store. What the store has whole already is left as it is.

    Raises:
        InputError: not an archive, damaged or truncated; the objects before the damage are in.
        StoreError: the store cannot be written.
    """
    new: list[str] = []
    with _opened(path) as tar:
        keys = _keys(path, tar)
        for key in keys:
            content = _content(path, tar, f"{key}.kvo")
            if not _is_whole(store, key):
                store.adopt(key, content)
                new.append(key)
            if on_object:
                on_object(key)
        if tar.next() is not None:
            raise _damaged(path, "holds more than it says")
    return Imported(keys, tuple(new))


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The tar in an archive, read from its beginning to its end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with (
            path.open("rb") as file,
            decompressor.stream_reader(file) as stream,
            tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK) as tar,
        ):
            yield tar
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise _damaged(path, "not an archive, or truncated") from error
    except ForeignObjectError:
        raise
    except ObjectError as error:
        raise _damaged(path, str(error)) from error


def _keys(path: Path, tar: tarfile.TarFile) -> tuple[str, ...]:
    """What the manifest says the archive holds."""
    try:
        manifest = json.loads(_content(path, tar, MANIFEST).read(_MAX_MANIFEST))
        version, keys = manifest["version"], manifest["keys"]
        is_archive = manifest["format"] == FORMAT and isinstance(keys, list) and all(map(is_key, map(str, keys)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, "its manifest cannot be read") from error
    if not is_archive:
        raise _damaged(path, "its manifest is not that of an archive")
    if version != VERSION:
        raise ForeignObjectError(f"{path}: archive version {version}, but this pic reads version {VERSION}")
    return tuple(keys)


def _content(path: Path, tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """The next member, which has to have this name."""
    member = tar.next()
    if member is None or not member.isreg() or member.name != name:
        raise _damaged(path, f"{name} is not where it should be")
    content = tar.extractfile(member)
    assert content is not None
    return content


def _is_whole(store: Store, key: str) -> bool:
    try:
        with store.look_here(key) as found:
            found.verify()
    except PicError:
        return False
    return True


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: the archive is damaged ({why}); export it again, or fetch it again")


LIST_FORMAT, LIST_VERSION = "pictool.list", "1"
_MAX_BYTES = 1 << 24
_AGAIN = "compile its text again"


def write_object_list(path: Path, members: Sequence[str]) -> None:
    """Write a list that names its members, object files in the same directory, in order."""
    data = _encode([(member, _key(path.parent / member)) for member in members])
    with atomic_write(path) as file:
        file.write(data)


def is_object_list(path: Path) -> bool:
    """Whether a file is a list (whole or damaged), told by its beginning."""
    return f'"format": "{LIST_FORMAT}"'.encode() in _read(path, 256)


def read_object_list(path: Path) -> list[Path]:
    """The members' paths.

    Raises:
        ObjectError: a damaged list, one that names something outside its directory, or a member that is another object.
    """
    members = _decode(path, _read(path, _MAX_BYTES))
    for name, key in members:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ObjectError(f"{path}: names {name!r}, which is not a file beside the list; {_AGAIN}")
        if (found := _key(path.parent / name)) != key:
            raise ObjectError(f"{path.parent / name}: holds the object {found[:12]}, but {path} {key[:12]}; {_AGAIN}")
    return [path.parent / name for name, _ in members]


def _key(member: Path) -> str:
    with ObjectFile(member) as file:
        return file.meta.key


def _read(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise ObjectError(f"{path}: cannot be opened ({error.strerror})") from error


def _encode(members: Sequence[tuple[str, str]]) -> bytes:
    objects = json.dumps(members)
    checksum = blake3(objects.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": LIST_FORMAT, "objects": objects, "version": LIST_VERSION}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _decode(path: Path, data: bytes) -> list[tuple[str, str]]:
    try:
        metadata = json.loads(data[8:])["__metadata__"]
        version, members = metadata["version"], [(str(name), str(key)) for name, key in json.loads(metadata["objects"])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ObjectError(f"{path}: the object list is damaged; {_AGAIN}") from error
    if version != LIST_VERSION:
        raise ForeignObjectError(f"{path}: list version {version}, but this pic reads version {LIST_VERSION}; {_AGAIN}")
    if data != _encode(members):
        raise ObjectError(f"{path}: the object list is damaged; {_AGAIN}")
    return members
