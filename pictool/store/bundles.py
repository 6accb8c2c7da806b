"""Several objects as one file: archives, which hold the objects' bytes, and object lists, which name their files.

An archive is what `ar` makes of `.o` files: objects to carry from one store to another.

    archive := zstd frame (with its own checksum) of a tar, which any `tar --zstd` lists and unpacks:
               "archive.json"  {"format": "pictool.archive", "keys": [key, …], "version": "1"}
               key.kvo …       the objects, in this order, each byte for byte as in the store

The same objects give the same bytes. An object is taken from an archive only once its checksums hold.

An object list is a thin archive (`ar -T`): what `pic compile -o` writes when one text becomes several objects.

    list := a safetensors file without tensors, its metadata
            {"checksum": BLAKE3 of `objects`, "format": "pictool.list", "objects": JSON list, "version": "1"}
            where `objects` has for each member [name of a file beside the list, key of the object in it]

A list is accepted only as this module writes it, so that no bit of it is outside the checksum; and a member only with
the key in the list, so that an object that was written over it later is refused.
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
from pictool.store.files import atomic_write, open_regular
from pictool.store.format import ObjectFile
from pictool.store.store import Store

ARCHIVE_FORMAT, ARCHIVE_VERSION, MANIFEST = "pictool.archive", "1", "archive.json"
LIST_FORMAT, LIST_VERSION = "pictool.list", "1"
_MAX_MANIFEST_BYTES = 1 << 28
_MAX_LIST_BYTES = 1 << 24
_TAR_BLOCK = 1 << 20
_ZSTD_LEVEL = 3
_COMPILE_AGAIN = "compile its text again"


@dataclass(frozen=True)
class Imported:
    """Keys that an archive held; `new` are those that the store had not."""

    keys: tuple[str, ...]
    new: tuple[str, ...]


def export_archive(
    store: Store, keys: Sequence[str], path: Path, on_object: Callable[[str], None] | None = None
) -> int:
    """Write objects to one archive; returns its bytes. Every object is checked before it goes in.

    Raises:
        PicError: an object is missing or damaged, or the archive cannot be written; nothing is written then.
    """
    keys = sorted(set(keys))
    manifest = json.dumps({"format": ARCHIVE_FORMAT, "keys": keys, "version": ARCHIVE_VERSION}).encode()
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    with (
        atomic_write(path) as file,
        compressor.stream_writer(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as tar,
    ):
        tar.addfile(_tar_info(MANIFEST, len(manifest)), BytesIO(manifest))
        for key in keys:
            with store.peek_local(key) as object_file:
                object_file.verify()
                with open(object_file.fileno(), "rb", closefd=False) as content:
                    tar.addfile(_tar_info(f"{key}.kvo", object_file.num_bytes), content)
            if on_object:
                on_object(key)
    return path.stat().st_size


def import_archive(store: Store, path: Path, on_object: Callable[[str], None] | None = None) -> Imported:
    """Insert the objects of an archive into a store. An intact object that the store already has stays as it is.

    Raises:
        InputError: not an archive, damaged or truncated; the objects before the damage are in the store.
        StoreError: the store cannot be written.
    """
    new: list[str] = []
    with _open_archive(path) as tar:
        keys = _read_manifest(path, tar)
        for key in keys:
            content = _next_member(path, tar, f"{key}.kvo")
            if not _has_intact(store, key):
                store.insert(key, content)
                new.append(key)
            if on_object:
                on_object(key)
        if tar.next() is not None:
            raise _archive_error(path, "holds more than it says")
    return Imported(keys, tuple(new))


@contextmanager
def _open_archive(path: Path) -> Iterator[tarfile.TarFile]:
    """The tar in an archive, to be read from its beginning to its end."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with (
            open(open_regular(path), "rb") as file,
            decompressor.stream_reader(file) as stream,
            tarfile.open(fileobj=stream, mode="r|", bufsize=_TAR_BLOCK) as tar,
        ):
            yield tar
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (tarfile.TarError, zstandard.ZstdError, EOFError) as error:
        raise _archive_error(path, "not an archive, or truncated") from error
    except ForeignObjectError:
        raise
    except ObjectError as error:
        raise _archive_error(path, str(error)) from error


def _read_manifest(path: Path, tar: tarfile.TarFile) -> tuple[str, ...]:
    """The keys of the objects that follow."""
    try:
        manifest = json.loads(_next_member(path, tar, MANIFEST).read(_MAX_MANIFEST_BYTES))
        version, keys = manifest["version"], manifest["keys"]
        is_archive = (
            manifest["format"] == ARCHIVE_FORMAT and isinstance(keys, list) and all(map(is_key, map(str, keys)))
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _archive_error(path, "its manifest cannot be read") from error
    if not is_archive:
        raise _archive_error(path, "its manifest is not that of an archive")
    if version != ARCHIVE_VERSION:
        raise ForeignObjectError(f"{path}: archive version {version}, but this pic reads version {ARCHIVE_VERSION}")
    return tuple(keys)


def _next_member(path: Path, tar: tarfile.TarFile, name: str) -> IO[bytes]:
    """The content of the next member, which must have this name."""
    member = tar.next()
    if member is None or not member.isreg() or member.name != name:
        raise _archive_error(path, f"{name} is not where it should be")
    content = tar.extractfile(member)
    assert content is not None
    return content


def _tar_info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info


def _has_intact(store: Store, key: str) -> bool:
    try:
        with store.peek_local(key) as file:
            file.verify()
    except PicError:
        return False
    return True


def _archive_error(path: Path, why: str) -> InputError:
    return InputError(f"{path}: the archive is damaged ({why}); export it again, or fetch it again")


# Object lists


def write_object_list(path: Path, members: Sequence[str]) -> None:
    """Write a list that names its members, object files in the same directory, in order."""
    data = _encode_list([(name, _member_key(path.parent / name)) for name in members])
    with atomic_write(path) as file:
        file.write(data)


def is_object_list(path: Path) -> bool:
    """Whether a file is a list (intact or damaged), as its beginning tells."""
    return f'"format": "{LIST_FORMAT}"'.encode() in _read_file(path, 256)


def read_object_list(path: Path) -> list[Path]:
    """The members' paths.

    Raises:
        ObjectError: a damaged list, one that names something outside its directory, or a member that is another object.
    """
    members = _decode_list(path, _read_file(path, _MAX_LIST_BYTES))
    for name, key in members:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ObjectError(f"{path}: names {name!r}, which is not a file beside the list; {_COMPILE_AGAIN}")
        member = path.parent / name
        if (member_key := _member_key(member)) != key:
            raise ObjectError(f"{member}: holds the object {member_key[:12]}, but {path} {key[:12]}; {_COMPILE_AGAIN}")
    return [path.parent / name for name, _ in members]


def _encode_list(members: Sequence[tuple[str, str]]) -> bytes:
    """The bytes of a list of (name, key)."""
    objects = json.dumps(members)
    checksum = blake3(objects.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": LIST_FORMAT, "objects": objects, "version": LIST_VERSION}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _decode_list(path: Path, data: bytes) -> list[tuple[str, str]]:
    """The inverse of `_encode_list`, for the file at `path`."""
    try:
        metadata = json.loads(data[8:])["__metadata__"]
        version, members = metadata["version"], [(str(name), str(key)) for name, key in json.loads(metadata["objects"])]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ObjectError(f"{path}: the object list is damaged; {_COMPILE_AGAIN}") from error
    if version != LIST_VERSION:
        raise ForeignObjectError(
            f"{path}: list version {version}, but this pic reads version {LIST_VERSION}; {_COMPILE_AGAIN}"
        )
    if data != _encode_list(members):
        raise ObjectError(f"{path}: the object list is damaged; {_COMPILE_AGAIN}")
    return members


def _member_key(path: Path) -> str:
    with ObjectFile(path) as file:
        return file.meta.key


def _read_file(path: Path, count: int) -> bytes:
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(count)
    except OSError as error:
        raise ObjectError(f"{path}: cannot be opened ({error.strerror})") from error
