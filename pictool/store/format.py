"""The object file, `.kvo`: one valid safetensors file per compiled chunk.

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
    architecture, model, tokenizer, dtype, layers, kv_heads, head_dim      the target; tokens, sinks, codec: their
                number, dummy tokens in front, how KV is coded
    fixups      how the table was made ("self-8x60"); only if there is one
    parent      only of a block of a prefix chain: the key of the block before it, "" for the first (`chains.py`)
    checksums   JSON: {"fixups"?: h, "layers": [h of key||value or kv, …], "text": h, "tokens": h}
    header      checksum of the header itself, written with this field empty

Every checksum h is BLAKE3 (256 bit, hex). The header is accepted only in its canonical form, so that no bit of the
file is outside a checksum. A reader checks the header when it opens a file and each part before it hands it out.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pictool.core import FixupTable, TokenIds
from pictool.errors import ForeignObjectError, ObjectError, UnreadableObjectError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import CodingError
from pictool.store.files import open_in_order
from pictool.store.header import (
    DTYPES,
    FORMAT,
    VERSION,
    canonical,
    checksum,
    is_sealed,
    is_sound,
    layer_names,
    meta_of,
    metadata_of,
    table_of,
    tensor_entries,
    tokens_of,
)
from pictool.store.header import CompiledChunk as CompiledChunk
from pictool.store.header import ObjectMeta as ObjectMeta
from pictool.store.writer import write_object as write_object

_MAX_HEADER = 100_000_000  # what safetensors itself allows
_MAX_RATIO = 400_000  # no codec makes more of a byte
_DAMAGED = "the object is damaged; delete it, or compile it again (pic compile --force)"


class ObjectFile:
    """An open object. The header is checked; every part is checked before it is handed out. A context manager.

    Raises:
        ObjectError: not an object, damaged or truncated.
        ForeignObjectError: another format version or an unknown codec.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path, self.name = Path(path), name or str(Path(path))  # the name stands in messages
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
        """Its descriptor, at the beginning of the file: what is read here goes by offsets."""
        return self._fd

    def touch(self, used_ns: int | None = None) -> None:
        """Mark the file as used now, or at `used_ns`. One that may not be written to keeps the time that it has."""
        with suppress(OSError):
            os.utime(self._fd, ns=(used_ns or time.time_ns(),) * 2)

    def tokens(self) -> TokenIds:
        """int32 [n]."""
        return tokens_of(self._part("tokens", self._checksums["tokens"], "tokens"))

    def text(self) -> str:
        try:
            return bytes(self._part("text", self._checksums["text"], "text")).decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"its text is not UTF-8; {_DAMAGED}") from error

    def fixups(self) -> FixupTable | None:
        """The table of fixups, float16 [n]; None if the object has none."""
        if self.meta.fixups is None:
            return None
        return table_of(self._part("fixups", self._checksums["fixups"], "fixups"))

    def layer(self, index: int, into: memoryview | None = None) -> tuple[memoryview, memoryview]:
        """Key and value bytes of one layer, each `[kv_heads, n, head_dim]` in the target's dtype; one read.

        `into` is memory of `layer_bytes` at least that they are read (and decoded) to.
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
        """What to raise for a layer whose bytes are whole, but which no encoder wrote."""
        return self._fail(f"layer {layer} cannot be decoded ({error}); {_DAMAGED}")

    def stored_layer(self, index: int, into: memoryview | None = None) -> memoryview:
        """The bytes of one layer as they are in the file, checked but not decoded."""
        names = layer_names(index, self.meta.codec)
        return self._part(f"layer {index}", self._checksums["layers"][index], *names, into=into)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's key and value together, decoded."""
        return self.meta.shape.num_bytes

    def stored_bytes(self, index: int) -> int:
        """Bytes that one layer takes in the file."""
        names = layer_names(index, self.meta.codec)
        return int(self._entries[names[-1]]["data_offsets"][1] - self._entries[names[0]]["data_offsets"][0])

    @property
    def checksums(self) -> dict[str, Any]:
        """What the header says they are: BLAKE3 of the tokens, the text, and a list for the layers."""
        return dict(self._checksums)

    def verify(self) -> None:
        """Read and check everything."""
        self.tokens(), self.text(), self.fixups()
        for index in range(self.meta.target.geometry.layers):
            self.layer(index)

    def _fail(self, why: str) -> ObjectError:
        return ObjectError(f"{self.name}: {why}")

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        data, done = memoryview(bytearray(count)) if into is None else into[:count], 0
        while done < count:
            try:
                got = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise UnreadableObjectError(f"{self.name}: cannot be read ({error.strerror})") from error
            if not got:
                raise self._fail(f"truncated at {offset + done} bytes; {_DAMAGED}")
            done += got
        return data

    def _read_header(self) -> tuple[dict[str, Any], bytes]:
        if self.num_bytes < 8:
            raise self._fail("not an object file (shorter than a header)")
        (length,) = struct.unpack("<Q", self._read(0, 8))
        if length > min(_MAX_HEADER, self.num_bytes - 8):
            raise self._fail("not an object file, or truncated within its header")
        self._data_start, raw = 8 + length, bytes(self._read(8, length))
        try:
            header = json.loads(raw)
            metadata = header["__metadata__"]
            is_object = metadata["format"] == FORMAT
            is_intact = is_sealed(raw, str(metadata.get("header")))
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
        fields = header["__metadata__"]
        for field, known in (("codec", tuple(codecs())), ("dtype", tuple(DTYPES))):
            if fields.get(field, known[0]) not in known:
                raise ForeignObjectError(
                    f"{self.name}: {field} {fields[field]!r}, but this pic knows {', '.join(known)}"
                )
        try:
            meta, checksums = meta_of(fields), json.loads(fields["checksums"])
            is_as_written = fields == metadata_of(meta, checksums) | {"header": fields["header"]}
            is_object = is_as_written and is_sound(meta, checksums, len(header) - 1)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}") from error
        if not is_object:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}")
        return meta, checksums

    def _require_tensors(self, header: Mapping[str, Any], raw: bytes) -> dict[str, dict[str, Any]]:
        """The tensors are exactly those that the metadata implies, in canonical form; the file is exactly as long."""
        wanted = tensor_entries(self.meta, 0, self._coded_sizes(header))
        start, end = wanted["text"]["data_offsets"][0], self.num_bytes - self._data_start
        wanted["text"] |= {"data_offsets": [start, end], "shape": [end - start]}
        if end < start or raw != canonical({**wanted, "__metadata__": header["__metadata__"]}):
            raise self._fail(f"{self.num_bytes} bytes long, which is not what its header describes; {_DAMAGED}")
        return wanted

    def _coded_sizes(self, header: Mapping[str, Any]) -> list[int]:
        """The bytes of every layer, if they are coded, as the header has them; whether that is true is seen later."""
        if self.meta.codec == "none":
            return []
        names = (name for layer in range(self.meta.target.geometry.layers) for name in layer_names(layer, "coded"))
        try:
            sizes = [int(header[name]["shape"][0]) for name in names]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise self._fail(f"the header is not that of an object; {_DAMAGED}") from error
        if not all(0 < size <= self.num_bytes for size in sizes):
            raise self._fail(f"the header is not that of an object; {_DAMAGED}")
        return sizes

    def _part(self, name: str, wanted: str, *tensors: str, into: memoryview | None = None) -> memoryview:
        start, end = self._entries[tensors[0]]["data_offsets"][0], self._entries[tensors[-1]]["data_offsets"][1]
        data = self._read(self._data_start + start, end - start, into)
        if checksum(data) != wanted:
            raise self._fail(f"{name} does not match its checksum; {_DAMAGED}")
        return data
