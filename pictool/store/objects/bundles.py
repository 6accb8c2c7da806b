"""Several objects as one file: archives, which hold the objects' bytes, and object lists, which name their files.

An archive is what `ar` makes of `.o` files: objects to carry from one store to another.

    archive := zstd frame (with its own checksum) of a tar, which any `tar --zstd` lists and unpacks:
               "archive.json"  {"format": "pictool.archive", "keys": [key, …], "version": "1"}, and "signatures":
                               {key: the object's sidecar} if there are some
               key.kvo …       the objects, in this order, each byte for byte as in the store

The same objects give the same bytes. An archive is read by this grammar alone (no extended tar header, no sparse
member, no second member of a name), and taken as a whole or not at all.

An object list is a thin archive (`ar -T`): what `pic compile -o` writes when one text becomes several objects.

    list := a safetensors file without tensors, its metadata
            {"checksum": BLAKE3 of `objects`, "format": "pictool.list", "objects": JSON list, "version": "1"}
            where `objects` has for each member [name of a file beside the list, key of the object in it]

A list is accepted only as this module writes it, so that no bit of it is outside the checksum; and a member only with
the key in the list, so that an object that was written over it later is refused.
"""

from __future__ import annotations

import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

import zstandard
from blake3 import blake3

from pictool.errors import ForeignObjectError, InputError, ObjectError, PicError
from pictool.reading import NotRegularError, open_regular
from pictool.store import eviction
from pictool.store.entries import Entry, is_key
from pictool.store.files import atomic_write
from pictool.store.objects.format import ObjectFile
from pictool.store.objects.header import HeaderError, header_bytes, stated_size
from pictool.store.signatures import merge, read_sidecar, require_signed_file, sign_file
from pictool.store.store import Store

ARCHIVE_FORMAT, ARCHIVE_VERSION, MANIFEST = "pictool.archive", "1", "archive.json"
LIST_FORMAT, LIST_VERSION = "pictool.list", "1"
_MAX_MANIFEST_BYTES = 1 << 26
_MAX_LIST_BYTES = 1 << 24
_MAX_WINDOW = 1 << 27  # bytes of memory that zstd may take
_ZSTD_LEVEL = 3
_COMPILE_AGAIN = "compile its text again"
_APART = "apart"  # of a member of a list that does not continue the one before it


@dataclass(frozen=True)
class ImportResult:
    """Keys that an archive held; `new` are those that the store had not."""

    keys: tuple[str, ...]
    new: tuple[str, ...]


def export_archive(
    store: Store, keys: Sequence[str], path: Path, on_object: Callable[[str], None] | None = None
) -> int:
    """Write objects to one archive; returns its bytes. Every object is checked before it goes in.

    Raises:
        PicError: an object is missing or damaged, or there are too many for one archive, or it cannot be written;
            nothing is written then.
    """
    keys = sorted(set(keys))
    fields: dict[str, Any] = {"format": ARCHIVE_FORMAT, "keys": keys}
    if signatures := {key: sidecar.decode() for key in keys if (sidecar := merge(read_sidecar(store.path(key))))}:
        fields["signatures"] = signatures
    manifest = json.dumps(fields | {"version": ARCHIVE_VERSION}).encode()
    if len(manifest) > _MAX_MANIFEST_BYTES:
        raise InputError(f"{path}: {len(keys):,d} objects are too many for one archive; push them in parts")
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
    if store.trust is not None and store.trust.key is not None:
        sign_file(store.trust.key, path)
    return path.stat().st_size


def import_archive(store: Store, path: Path, on_object: Callable[[str], None] | None = None) -> ImportResult:
    """Insert the objects of an archive into a store. An intact object that the store already has stays as it is.

    The archive is read twice: all of it is checked before anything is written. A store that requires signatures takes
    an archive that a trusted key signed as a whole.

    Raises:
        InputError: not an archive, damaged or truncated, or larger than the room here; nothing of it is in the store.
        StoreError: the store cannot be written; nothing of it is in the store.
    """
    with _reads_archive(path), _open_file(path) as file:
        require_signed_file(store.trust, path)
        keys = _scan(path, file, store)
        new: list[str] = []
        try:
            for key, _, content, sidecar in _members(path, file):
                if not _has_intact(store, key):
                    store.insert(key, content)
                    new.append(key)
                if sidecar:
                    store.add_signatures(key, sidecar)
                if on_object:
                    on_object(key)
        except BaseException:
            _remove(store, new)
            raise
    return ImportResult(keys, tuple(new))


def _scan(path: Path, file: BinaryIO, store: Store) -> tuple[str, ...]:
    """Check all of an archive but the objects' data: order, names, sizes, room for them, the frame's checksum."""
    keys, total, free = [], 0, _free_bytes(store)
    room = free if store.max_bytes is None else store.max_bytes
    for key, size, content, _ in _members(path, file):
        keys.append(key)
        if not store.path(key).exists():
            total += size
            if total > room or size > free:
                room = min(room, free)
                raise InputError(
                    f"{path}: needs at least {total:,d} bytes, but {room:,d} are available; free space or raise "
                    "max_size"
                )
        if (stated := _stated_size(path, key, content)) != size:
            raise _archive_error(path, f"{key}.kvo has {size:,d} bytes, but its header says {stated:,d}")
    return tuple(keys)


def _stated_size(path: Path, key: str, content: IO[bytes]) -> int:
    """The bytes of an object as the header at its beginning says it."""
    try:
        first = content.read(8)
        return stated_size(first + content.read(header_bytes(first) - 8))
    except HeaderError as error:
        raise _archive_error(path, f"{key}.kvo: {error}") from error


class _RegularMember(tarfile.TarInfo):
    """A member of a tar. Any but a regular one is refused by its first block, before `tarfile` reads more of it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            info = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end
            raise tarfile.ReadError("it ends early, or contains something that is not a member") from error
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.size < 0:
            raise tarfile.ReadError(f"{info.name!r} is not a regular member")
        return info


def _members(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, IO[bytes], bytes]]:
    """The objects of an archive: key, bytes, content and sidecar, from its beginning on, to be read in this order."""
    file.seek(0)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    with (
        decompressor.stream_reader(file, closefd=False) as stream,
        tarfile.open(fileobj=stream, mode="r|", tarinfo=_RegularMember) as tar,
    ):
        size, content = _next_member(path, tar, MANIFEST)
        if size > _MAX_MANIFEST_BYTES:
            raise _archive_error(path, f"its manifest has {size:,d} bytes")
        for key, sidecar in _read_manifest(path, content.read()).items():
            yield key, *_next_member(path, tar, f"{key}.kvo"), sidecar
        assert tar.fileobj is not None
        if (
            tar.next() is not None
            or len(rest := tar.fileobj.read(tarfile.RECORDSIZE + 1)) > tarfile.RECORDSIZE
            or any(rest)
        ):
            raise _archive_error(path, "it contains more than its manifest lists")


def _next_member(path: Path, tar: tarfile.TarFile, name: str) -> tuple[int, IO[bytes]]:
    """The bytes and the content of the next member, which must have this name."""
    info = tar.next()
    content = None if info is None or info.name != name else tar.extractfile(info)
    if info is None or content is None:
        raise _archive_error(path, f"{name} is not in its place")
    return info.size, content


@contextmanager
def _reads_archive(path: Path) -> Iterator[None]:
    """Turn the problems of reading an archive to an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (zstandard.ZstdError, tarfile.TarError) as error:
        raise _archive_error(path, f"not an archive, or truncated: {error}") from error
    except ForeignObjectError:
        raise
    except ObjectError as error:
        raise _archive_error(path, str(error)) from error


def _open_file(path: Path) -> BinaryIO:
    """A file for reading; what is none, as a pipe, cannot be read twice and is not waited for."""
    try:
        return open(open_regular(path), "rb")
    except NotRegularError as error:
        raise InputError(f"{path}: {error.strerror}; save the archive to a file") from error


def _free_bytes(store: Store) -> int:
    """Bytes that are free where a store is, or would be."""
    root = store.root.absolute()
    disk = os.statvfs(next(path for path in (root, *root.parents) if path.exists()))
    return disk.f_bavail * disk.f_frsize


def _remove(store: Store, keys: Sequence[str]) -> None:
    """Take out again what was imported before an archive turned out damaged."""
    entries = [entry for key in keys if (entry := Entry.of(store.path(key)))]
    if entries:
        with suppress(OSError, PicError):  # the first error is raised
            eviction.remove_all(store.root, entries)


def _read_manifest(path: Path, data: bytes) -> dict[str, bytes]:
    """The keys of the objects that follow, each once, with their sidecars."""
    try:
        manifest = json.loads(data)
        version, keys, signatures = manifest["version"], manifest["keys"], manifest.get("signatures", {})
        is_archive = (
            manifest["format"] == ARCHIVE_FORMAT and isinstance(keys, list) and all(map(is_key, map(str, keys)))
        )
        sidecars = {key: str(text).encode("utf-8", "replace") for key, text in signatures.items()}
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _archive_error(path, "its manifest cannot be read") from error
    if not is_archive or len(set(keys)) != len(keys):
        raise _archive_error(path, "its manifest is not that of an archive")
    if version != ARCHIVE_VERSION:
        raise ForeignObjectError(f"{path}: archive version {version}, but this pic reads version {ARCHIVE_VERSION}")
    return {key: sidecars.get(key, b"") for key in keys}


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
    return InputError(f"{path}: the archive is damaged ({why}); create it again, or fetch it again")


# Object lists


@dataclass(frozen=True)
class ListMember:
    """An object of a list. One that `continues` follows the one before it in a prompt without a separator."""

    path: Path
    continues: bool


def write_object_list(path: Path, members: Sequence[ListMember]) -> None:
    """Write a list that names its members, object files in the same directory, in order."""
    kinds = [[] if member.continues or not index else [_APART] for index, member in enumerate(members)]
    data = _encode_list([
        [member.path.name, _member_key(member.path), *kind] for member, kind in zip(members, kinds, strict=True)
    ])  # fmt: skip
    with atomic_write(path) as file:
        file.write(data)


def is_object_list(path: Path) -> bool:
    """Whether a file is a list (intact or damaged), as its beginning tells."""
    return f'"format": "{LIST_FORMAT}"'.encode() in _read_file(path, 256)


def read_object_list(path: Path) -> list[ListMember]:
    """The members, in order.

    Raises:
        ObjectError: a damaged list, one that names something outside its directory, or a member that is another object.
    """
    members = _decode_list(path, _read_file(path, _MAX_LIST_BYTES))
    for name, key, *_ in members:
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ObjectError(f"{path}: names {name!r}, which is not a file beside the list; {_COMPILE_AGAIN}")
        member = path.parent / name
        if (member_key := _member_key(member)) != key:
            raise ObjectError(
                f"{member}: contains the object {member_key[:12]}, but {path} lists {key[:12]}; {_COMPILE_AGAIN}"
            )
    return [ListMember(path.parent / name, index > 0 and not kind) for index, (name, _, *kind) in enumerate(members)]


def _encode_list(members: Sequence[Sequence[str]]) -> bytes:
    """The bytes of a list of name and key, and `_APART` of what does not continue the object before it."""
    objects = json.dumps(members)
    checksum = blake3(objects.encode()).hexdigest()
    metadata = {"checksum": checksum, "format": LIST_FORMAT, "objects": objects, "version": LIST_VERSION}
    raw = json.dumps({"__metadata__": metadata}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _decode_list(path: Path, data: bytes) -> list[list[str]]:
    """The inverse of `_encode_list`, for the file at `path`."""
    try:
        metadata = json.loads(data[8:])["__metadata__"]
        version, entries = metadata["version"], json.loads(metadata["objects"])
        members = [[str(name), str(key), *kind] for name, key, *kind in entries]
        if not all(kind in ([], [_APART]) for _, _, *kind in members):
            raise ValueError
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
