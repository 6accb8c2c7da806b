"""The object file, `.kvo`: one valid safetensors file per compiled chunk, written and read.

    file     := header-length(u64, little endian) header data
    header   := canonical JSON (sorted keys, no spaces), padded with spaces to a multiple of 8
                {"__metadata__": metadata, tensor-name: {"data_offsets": [a, b], "dtype": …, "shape": […]}, …}
    data     := tokens key0 value0 key1 value1 … [fixups] text          (no gaps; kv0 kv1 … if coded)

    tokens           I32         [n]                        token ids of the chunk, without sinks
    layers.LLL.key   F32|BF16|F16 [kv_heads, n, head_dim]   keys before rotation (no position in them)
    layers.LLL.value F32|BF16|F16 [kv_heads, n, head_dim]
    layers.LLL.kv    U8         [bytes]                     instead of the two, if the codec is not "none" (codecs/)
    fixups           F16         [n]                        optional: how much a token's KV depends on what precedes it
    text             U8          [bytes]                    the source text, UTF-8

    metadata (strings only):
    format      "pictool.kvo"
    version     "1"
    key         sha256 of what determines the content (`Target.key`)
    architecture, model, tokenizer, dtype, layers, kv_heads, head_dim      the target
    tokens      the number of tokens
    sinks       the number of dummy tokens before the chunk when it was compiled
    codec       how KV is coded
    fixups      how the table was made ("self-8x60"); only if there is one
    parent      only of a block of a prefix chain: the key of the block before it, "" for the first (`chains.py`)
    rotation    only of such a block, and only where rotation depends on the prompt's length: how it was rotated
    salted      only of an object with a salt: how the salt entered the key (`Identity`)
    checksums   JSON: {"fixups"?: h, "layers": [h of key||value or kv, …], "text": h, "tokens": h}
    header      checksum of the header itself, written with this field empty

Every checksum h is BLAKE3 (256 bit, hex). The header is accepted only in its canonical form, so that no bit of the
file is outside a checksum. A reader checks the header when it opens a file, and each part before it returns it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from pictool.core import FixupTable, Geometry, Target, TokenIds
from pictool.errors import ForeignObjectError, InputError, ObjectError, UnreadableObjectError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Buffer as Buffer
from pictool.store.codecs.base import CodingError, LayerShape
from pictool.store.files import open_in_order

FORMAT, VERSION = "pictool.kvo", "1"
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
MAX_HEADER = 100_000_000  # bytes, what safetensors itself allows
_MAX_CHANNELS = 1 << 20  # of one token in one layer; a header that states more is no object's
_MAX_RATIO = 400_000  # no codec makes more of a byte
_OPTIONAL = ("fixups", "parent", "rotation", "salted")  # fields of the metadata that not every object has
_DAMAGED = "the object is damaged; delete it, or compile it again (pic compile --force)"


@dataclass(frozen=True)
class ObjectMeta:
    """What an object's header says of it. `fixups` is how its table was made; None if it has none.

    `parent` is set for a block of a prefix chain: the key of the block before it, "" for the first. `rotation` and
    `salted` are what else entered the key, None for most objects.
    """

    key: str
    target: Target
    num_tokens: int
    sinks: int
    codec: str
    fixups: str | None = None
    parent: str | None = None
    rotation: str | None = None
    salted: str | None = None

    @property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.target.geometry, self.num_tokens, self.target.dtype)

    def own_key(self, tokens: TokenIds) -> str:
        """The key that an object with this header and these tokens has. Another `key` in it is a forgery."""
        if self.parent is None:
            extra: dict[str, Any] = {"sinks": self.sinks, "codec": self.codec}
        else:
            extra = {"parent": self.parent, "rotation": self.rotation or ""}
        return self.target.recompute_key(extra, tokens, self.salted)

    def require(self, target: Target, name: str) -> None:
        """Refuse an object of another model, tokenizer, dtype or shape with a message that names both sides.

        Raises:
            ForeignObjectError: `name` says which object in the message.
        """
        for field in ("architecture", "model", "tokenizer", "dtype", "geometry"):
            own, expected = getattr(self.target, field), getattr(target, field)
            if own != expected:
                raise ForeignObjectError(
                    f"{name}: made for {field} {_short(own)}, but this link uses {field} {_short(expected)}; "
                    "compile the text again with this model"
                )


@dataclass(frozen=True)
class CompiledChunk:
    """A chunk's KV in memory, ready to be written. `layers` holds (key, value) bytes in the target's dtype.

    `fixups` are the bytes of the table, float16 [n], if `meta` says that there is one.
    """

    meta: ObjectMeta
    text: str
    tokens: TokenIds
    layers: Sequence[tuple[Buffer, Buffer]]
    fixups: Buffer | None = None


def write_object(file: BinaryIO, chunk: CompiledChunk) -> None:
    """Write one object; the same chunk gives the same bytes.

    Raises:
        InputError: KV that its codec cannot keep.
    """
    import numpy as np

    text, tokens = chunk.text.encode(), np.asarray(chunk.tokens, dtype="<i4").tobytes()
    assert (chunk.fixups is None) == (chunk.meta.fixups is None)
    layers, tables = _coded_layers(chunk), [] if chunk.fixups is None else [chunk.fixups]
    checksums = {"layers": [checksum(*parts) for parts in layers], "text": checksum(text), "tokens": checksum(tokens)}
    checksums |= {"fixups": checksum(*tables)} if tables else {}
    entries = tensor_entries(chunk.meta, len(text), [len(parts[0]) for parts in layers])
    data = [tokens, *(part for parts in layers for part in parts), *tables, text]
    assert [len(part) for part in data] == [
        entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values()
    ]
    header = {"__metadata__": metadata_of(chunk.meta, checksums)} | entries
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    file.writelines([struct.pack("<Q", len(raw)) + raw, *data])


class ObjectFile:
    """An open object. The header is checked; every part is checked before it is returned. A context manager.

    Raises:
        ObjectError: not an object, damaged or truncated.
        ForeignObjectError: another format version or an unknown codec.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path, self.name = Path(path), name or str(Path(path))  # messages call it by its name
        try:
            self._fd = open_in_order(self.path)
        except OSError as error:
            raise UnreadableObjectError(f"{self.name}: cannot be opened ({error.strerror})") from error
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise self._fail("not an object file (nor a regular file at all)")
            self.num_bytes = status.st_size
            header, raw = self._read_header()
            self.meta, self._checksums = self._parse(header)
            self._entries = self._require_tensors(header, raw)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> ObjectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fileno(self) -> int:
        """Its descriptor, positioned at the beginning of the file: all reads here name their offset."""
        return self._fd

    def header(self) -> bytes:
        """The bytes of the header, with its length: equal ones are those of equal objects, since it has every checksum."""
        return bytes(self._read(0, self._data_start))

    def touch(self, used_ns: int | None = None) -> None:
        """Mark the file as used now, or at `used_ns`. One that may not be written to keeps the time that it has."""
        with suppress(OSError):
            os.utime(self._fd, ns=(used_ns or time.time_ns(),) * 2)

    def tokens(self) -> TokenIds:
        """int32 [n]."""
        import numpy as np

        return np.frombuffer(self._part("tokens", self._checksums["tokens"], "tokens"), dtype="<i4")

    def text(self) -> str:
        try:
            return bytes(self._part("text", self._checksums["text"], "text")).decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"its text is not UTF-8; {_DAMAGED}") from error

    def fixups(self) -> FixupTable | None:
        """The table of fixups, float16 [n]; None if the object has none."""
        import numpy as np

        if self.meta.fixups is None:
            return None
        return np.frombuffer(self._part("fixups", self._checksums["fixups"], "fixups"), dtype="<f2")

    def layer(self, index: int, into: memoryview | None = None) -> tuple[memoryview, memoryview]:
        """Key and value bytes of one layer, each `[kv_heads, n, head_dim]` in the target's dtype; one read.

        `into` is memory of at least `layer_bytes` that they are read (and decoded) to.
        """
        if self.meta.codec == "none":
            data = self.stored_layer(index, into)
        else:
            coded = self.stored_layer(index)
            if self.layer_bytes > _MAX_RATIO * len(coded):
                raise self._fail(f"layer {index} is too short for what the header says; {_DAMAGED}")
            data = memoryview(bytearray(self.layer_bytes)) if into is None else into[: self.layer_bytes]
            try:
                codecs()[self.meta.codec].decode(coded, self.meta.shape, data)
            except CodingError as error:
                raise self.undecodable(index, error) from error
        return data[: len(data) // 2], data[len(data) // 2 :]

    def undecodable(self, layer: int, error: CodingError) -> ObjectError:
        """The error for a layer whose checksum holds, but which no encoder wrote."""
        return self._fail(f"layer {layer} cannot be decoded ({error}); {_DAMAGED}")

    def stored_layer(self, index: int, into: memoryview | None = None) -> memoryview:
        """The bytes of one layer as they are in the file, checked but not decoded."""
        names = _layer_names(index, self.meta.codec)
        return self._part(f"layer {index}", self._checksums["layers"][index], *names, into=into)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's key and value together, decoded."""
        return self.meta.shape.num_bytes

    def stored_bytes(self, index: int) -> int:
        """Bytes that one layer takes in the file."""
        names = _layer_names(index, self.meta.codec)
        return int(self._entries[names[-1]]["data_offsets"][1] - self._entries[names[0]]["data_offsets"][0])

    @property
    def checksums(self) -> dict[str, Any]:
        """The checksums in the header: of the tokens, of the text, of the table, and a list for the layers."""
        return dict(self._checksums)

    def require_key(self, key: str) -> None:
        """Check that this is the object `key`: by its header, and by the key recomputed from its content.

        Raises:
            ObjectError: another object, or one that only says that it is this one.
        """
        if self.meta.key != key:
            raise self._fail(f"holds the object {self.meta.key[:12]}, not what its name says; compile or push it again")
        if self.meta.own_key(self.tokens()) != key:
            raise self._fail(
                f"its key {key[:12]} is not that of its content (a forged object, or one with a salt of pic 0.1); "
                "compile its text again"
            )

    def verify(self) -> None:
        """Read and check everything, its key too."""
        self.require_key(self.meta.key)
        self.text(), self.fixups()
        for index in range(self.meta.target.geometry.layers):
            self.layer(index)

    def _fail(self, why: str) -> ObjectError:
        return ObjectError(f"{self.name}: {why}")

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        data, done = memoryview(bytearray(count)) if into is None else into[:count], 0
        while done < count:
            try:
                num_read = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise UnreadableObjectError(f"{self.name}: cannot be read ({error.strerror})") from error
            if not num_read:
                raise self._fail(f"truncated at {offset + done} bytes; {_DAMAGED}")
            done += num_read
        return data

    def _read_header(self) -> tuple[dict[str, Any], bytes]:
        """The header, which matches its checksum, and its bytes."""
        if self.num_bytes < 8:
            raise self._fail("not an object file (shorter than a header)")
        (length,) = struct.unpack("<Q", self._read(0, 8))
        if length > min(MAX_HEADER, self.num_bytes - 8):
            raise self._fail("not an object file, or truncated within its header")
        self._data_start, raw = 8 + length, bytes(self._read(8, length))
        try:
            header = json.loads(raw)
            metadata = header["__metadata__"]
            is_object = metadata["format"] == FORMAT
            is_intact = _is_sealed(raw, str(metadata.get("header")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._fail("not an object file, or its header is damaged") from error
        if not is_object:
            raise self._fail(f"not an object file (its format is {metadata['format']!r})")
        if metadata.get("version") != VERSION:
            theirs = f"format version {metadata.get('version')}"
            raise ForeignObjectError(f"{self.name}: {theirs}, but this pic reads version {VERSION}; compile it again")
        if not is_intact:
            raise self._fail(f"the header does not match its checksum; {_DAMAGED}")
        return dict(header), raw

    def _parse(self, header: Mapping[str, Any]) -> tuple[ObjectMeta, dict[str, Any]]:
        """What the metadata says of the object, and the checksums of its parts."""
        fields = header["__metadata__"]
        for field, known in (("codec", tuple(codecs())), ("dtype", tuple(DTYPES))):
            if fields.get(field, known[0]) not in known:
                raise ForeignObjectError(
                    f"{self.name}: {field} {fields[field]!r}, but this pic knows {', '.join(known)}"
                )
        try:
            meta, checksums = meta_of(fields), json.loads(fields["checksums"])
            is_as_written = fields == metadata_of(meta, checksums) | {"header": fields["header"]}
            is_object = is_as_written and _is_sound(meta, checksums, len(header) - 1)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}") from error
        if not is_object:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}")
        return meta, checksums

    def _require_tensors(self, header: Mapping[str, Any], raw: bytes) -> dict[str, dict[str, Any]]:
        """The tensors are exactly those that the metadata implies, in canonical form; the file is exactly as long."""
        expected = tensor_entries(self.meta, 0, self._coded_sizes(header))
        start, end = expected["text"]["data_offsets"][0], self.num_bytes - self._data_start
        expected["text"] |= {"data_offsets": [start, end], "shape": [end - start]}
        if end < start or raw != canonical({**expected, "__metadata__": header["__metadata__"]}):
            raise self._fail(f"{self.num_bytes} bytes long, which is not what its header describes; {_DAMAGED}")
        return expected

    def _coded_sizes(self, header: Mapping[str, Any]) -> list[int]:
        """The bytes of every layer that the header states, if layers are coded. Decoding tells whether that is true."""
        if self.meta.codec == "none":
            return []
        names = (name for layer in range(self.meta.target.geometry.layers) for name in _layer_names(layer, "coded"))
        try:
            sizes = [int(header[name]["shape"][0]) for name in names]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}") from error
        if not all(0 < size <= self.num_bytes for size in sizes):
            raise self._fail(f"the header is not that of an object; {_DAMAGED}")
        return sizes

    def _part(self, name: str, expected: str, *tensors: str, into: memoryview | None = None) -> memoryview:
        """The bytes of adjacent tensors, whose checksum is the expected one."""
        start, end = self._entries[tensors[0]]["data_offsets"][0], self._entries[tensors[-1]]["data_offsets"][1]
        data = self._read(self._data_start + start, end - start, into)
        if checksum(data) != expected:
            raise self._fail(f"{name} does not match its checksum; {_DAMAGED}")
        return data


def header_bytes(first: bytes) -> int:
    """The bytes that the length (8 bytes) and the header take, of an object that begins with `first`.

    Raises:
        ObjectError: not the beginning of an object.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > MAX_HEADER:
        raise ObjectError("not an object, or its header is damaged")
    return 8 + length


def stated_size(first: bytes) -> int:
    """The bytes of a whole object, as its header says it, which is not checked yet. `first` has all of the header.

    Raises:
        ObjectError: not an object's header.
    """
    length = header_bytes(first)
    try:
        header = json.loads(first[8:length])
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        is_size = len(first) >= length and all(type(end) is int and 0 <= end < 1 << 60 for end in ends)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ObjectError("not an object, or its header is damaged") from error
    if not ends or not is_size:
        raise ObjectError("not an object, or its header is damaged")
    return length + max(ends)


def checksum(*parts: Buffer) -> str:
    """BLAKE3 of the parts, one after the other, in hex."""
    digest = blake3()  # one thread: parts are small, and many threads cost more than they give
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def canonical(header: Mapping[str, Any]) -> bytes:
    """The only bytes in which a header is accepted."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def seal(header: Mapping[str, Any]) -> str:
    """The header's own checksum: over its canonical form with the field `header` empty."""
    return checksum(canonical({**header, "__metadata__": {**header["__metadata__"], "header": ""}}))


def metadata_of(meta: ObjectMeta, checksums: Mapping[str, Any]) -> dict[str, str]:
    """The header's metadata, but for its own checksum."""
    target, geometry = meta.target, meta.target.geometry
    values = {
        "format": FORMAT, "version": VERSION, "key": meta.key, "architecture": target.architecture,
        "model": target.model, "tokenizer": target.tokenizer, "dtype": target.dtype, "layers": geometry.layers,
        "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim, "tokens": meta.num_tokens,
        "sinks": meta.sinks, "codec": meta.codec, "checksums": json.dumps(checksums, sort_keys=True),
    }  # fmt: skip
    values |= {name: value for name in _OPTIONAL if (value := getattr(meta, name)) is not None}
    return {name: str(value) for name, value in values.items()}


def meta_of(fields: Mapping[str, str]) -> ObjectMeta:
    """The inverse of `metadata_of`, less the checksums. Raises KeyError or ValueError for what it never returned."""
    geometry = Geometry(int(fields["layers"]), int(fields["kv_heads"]), int(fields["head_dim"]))
    target = Target(fields["architecture"], fields["model"], fields["tokenizer"], fields["dtype"], geometry)
    optional = {name: fields.get(name) for name in _OPTIONAL}
    return ObjectMeta(
        fields["key"], target, int(fields["tokens"]), int(fields["sinks"]), fields["codec"], **optional
    )


def tensor_entries(meta: ObjectMeta, text_bytes: int, coded_bytes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The header's entry of every tensor, in data order. `coded_bytes` are those of each layer, if layers are coded."""
    geometry = meta.target.geometry
    kv = (*DTYPES[meta.target.dtype], [geometry.kv_heads, meta.num_tokens, geometry.head_dim])
    shapes = {"tokens": ("I32", 4, [meta.num_tokens])}
    for layer in range(geometry.layers):
        entry = kv if meta.codec == "none" else ("U8", 1, [coded_bytes[layer]])
        shapes |= dict.fromkeys(_layer_names(layer, meta.codec), entry)
    if meta.fixups is not None:
        shapes["fixups"] = ("F16", 2, [meta.num_tokens])
    entries, offset = {}, 0
    for name, (dtype, width, shape) in {**shapes, "text": ("U8", 1, [text_bytes])}.items():
        end = offset + width * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return entries


@lru_cache(maxsize=1 << 12)
def _layer_names(layer: int, codec: str) -> tuple[str, ...]:
    """The tensors of a layer: key and value, or the two coded as one."""
    parts = ("key", "value") if codec == "none" else ("kv",)
    return tuple(f"layers.{layer:03d}.{part}" for part in parts)


def _coded_layers(chunk: CompiledChunk) -> list[tuple[Buffer, ...]]:
    """The bytes of every layer's tensors; layers are coded in parallel."""
    assert len(chunk.layers) == chunk.meta.target.geometry.layers
    codec, shape = codecs()[chunk.meta.codec], chunk.meta.shape
    assert all(len(key) == len(value) == shape.num_bytes // 2 for key, value in chunk.layers)
    if chunk.meta.codec == "none":
        return list(chunk.layers)
    try:
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(chunk.layers))) as threads:
            return [(coded,) for coded in threads.map(lambda pair: codec.encode(pair[0], pair[1], shape), chunk.layers)]
    except CodingError as error:
        raise InputError(f"{chunk.text[:40]!r}: cannot be coded as {chunk.meta.codec} ({error})") from error


def _is_sealed(raw: bytes, own_seal: str) -> bool:
    """Whether the bytes of a header, if they are canonical, have the checksum that they hold; `seal` in one pass."""
    field = f'"header":{json.dumps(own_seal)}'.encode()
    text = raw.rstrip(b" ").replace(field, b'"header":""')
    return raw.count(field) == 1 and checksum(text + b" " * (-len(text) % 8)) == own_seal


def _is_sound(meta: ObjectMeta, checksums: Mapping[str, Any], num_tensors: int) -> bool:
    """Whether the numbers can be those of an object with so many tensors, and every part has a checksum."""
    geometry = meta.target.geometry
    counts = (geometry.layers, geometry.kv_heads, geometry.head_dim, meta.num_tokens, meta.sinks + 1)
    optional = {"fixups"} if meta.fixups is not None else set()
    if not all(0 < count < 1 << 31 for count in counts) or geometry.kv_heads * geometry.head_dim > _MAX_CHANNELS:
        return False
    if num_tensors != geometry.layers * len(_layer_names(0, meta.codec)) + 2 + len(optional):
        return False
    layers = checksums["layers"]
    has_layers = isinstance(layers, list) and len(layers) == geometry.layers
    return has_layers and set(checksums) == {"layers", "text", "tokens"} | optional


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if re.fullmatch(r"[0-9a-f]{64}", text) else text
