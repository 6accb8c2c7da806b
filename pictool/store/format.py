"""The object file, `.kvo`: one valid safetensors file per compiled chunk.

    file     := header-length(u64, little endian) header data
    header   := canonical JSON (sorted keys, no spaces), padded with spaces to a multiple of 8
                {"__metadata__": metadata, tensor-name: {"data_offsets": [a, b], "dtype": …, "shape": […]}, …}
    data     := tokens key0 value0 key1 value1 … [fixups] text          (no gaps)

    tokens           I32         [n]                        token ids of the chunk, without sinks
    layers.LLL.key   F32|BF16|F16 [kv_heads, n, head_dim]   keys before rotation (no position in them)
    layers.LLL.value F32|BF16|F16 [kv_heads, n, head_dim]
    fixups           F16         [n]                        optional: how much a token's KV depends on what precedes it
    text             U8          [bytes]                    the source text, UTF-8

    metadata (strings only):
    format      "pictool.kvo"
    version     "1"
    key         sha256 of what determines the content (`Target.key`)
    architecture, model, tokenizer, dtype, layers, kv_heads, head_dim      the target
    tokens, sinks, codec                                   number of tokens, dummy tokens in front, how KV is coded
    fixups      how the table was made ("self-8x60"); only if there is one
    checksums   JSON: {"fixups"?: h, "layers": [h of key||value, …], "text": h, "tokens": h}
    header      checksum of the header itself, written with this field empty

Every checksum h is BLAKE3 (256 bit, hex). The header is accepted only in its canonical form, so that no bit of the
file is outside a checksum. A reader checks the header when it opens a file and each part before it hands it out.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pictool.core import TokenIds
from pictool.errors import ForeignObjectError, ObjectError
from pictool.store.header import (
    CODECS,
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
    seal,
    tensor_entries,
)
from pictool.store.header import CompiledChunk as CompiledChunk
from pictool.store.header import ObjectMeta as ObjectMeta

_MAX_HEADER = 100_000_000  # what safetensors itself allows
_DAMAGED = "the object is damaged; delete it, or compile it again (pic compile --force)"


def write_object(file: BinaryIO, chunk: CompiledChunk) -> None:
    """Write one object; the same chunk gives the same bytes."""
    text, tokens = chunk.text.encode(), np.asarray(chunk.tokens, dtype="<i4").tobytes()
    tables = [] if chunk.fixups is None else [chunk.fixups]
    assert bool(tables) == (chunk.meta.fixups is not None)
    checksums: dict[str, Any] = {
        "layers": [checksum(*pair) for pair in chunk.layers],
        "text": checksum(text),
        "tokens": checksum(tokens),
    }
    if chunk.fixups is not None:
        checksums["fixups"] = checksum(chunk.fixups)
    header = {"__metadata__": metadata_of(chunk.meta, checksums)} | tensor_entries(chunk.meta, len(text))
    sizes = [len(part) for part in (tokens, *(part for pair in chunk.layers for part in pair), *tables, text)]
    assert sizes == [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in list(header.values())[1:]]
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    file.write(struct.pack("<Q", len(raw)) + raw + tokens)
    for pair in chunk.layers:
        file.writelines(pair)
    file.writelines([*tables, text])


class ObjectFile:
    """An open object. The header is checked; every part is checked before it is handed out. A context manager.

    Raises:
        ObjectError: not an object, damaged or truncated.
        ForeignObjectError: another format version or an unknown codec.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
        except OSError as error:
            raise ObjectError(f"{self.path}: cannot be opened ({error.strerror})") from error
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

    def tokens(self) -> TokenIds:
        """int32 [n]."""
        return np.frombuffer(self._part("tokens", self._checksums["tokens"], "tokens"), dtype="<i4")

    def text(self) -> str:
        try:
            return bytes(self._part("text", self._checksums["text"], "text")).decode()
        except UnicodeDecodeError as error:
            raise self._fail(f"its text is not UTF-8; {_DAMAGED}") from error

    def fixups(self) -> NDArray[np.float16] | None:
        """The table of fixups, float16 [n]; None if the object has none."""
        if self.meta.fixups is None:
            return None
        return np.frombuffer(self._part("fixups", self._checksums["fixups"], "fixups"), dtype="<f2")

    def layer(self, index: int, into: memoryview | None = None) -> tuple[memoryview, memoryview]:
        """Key and value bytes of one layer, each `[kv_heads, n, head_dim]` in the target's dtype; one read.

        `into` is memory of `layer_bytes` at least that they are read to.
        """
        key, value = layer_names(index)
        data = self._part(f"layer {index}", self._checksums["layers"][index], key, value, into=into)
        return data[: len(data) // 2], data[len(data) // 2 :]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's key and value together."""
        key, value = (self._entries[name]["data_offsets"] for name in layer_names(0))
        return int(value[1] - key[0])

    def verify(self) -> None:
        """Read and check everything."""
        self.tokens(), self.text(), self.fixups()
        for index in range(self.meta.target.geometry.layers):
            self.layer(index)

    def _fail(self, why: str) -> ObjectError:
        return ObjectError(f"{self.path}: {why}")

    def _read(self, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        data, done = memoryview(bytearray(count)) if into is None else into[:count], 0
        while done < count:
            try:
                got = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise self._fail(f"cannot be read ({error.strerror})") from error
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
            raise ForeignObjectError(f"{self.path}: {theirs}, but this pic reads version {VERSION}; compile it again")
        if not is_intact:
            raise self._fail(f"the header does not match its checksum; {_DAMAGED}")
        return dict(header), raw

    def _parse(self, header: Mapping[str, Any]) -> tuple[ObjectMeta, dict[str, Any]]:
        fields = header["__metadata__"]
        for field, known in (("codec", CODECS), ("dtype", tuple(DTYPES))):
            if fields.get(field, known[0]) not in known:
                raise ForeignObjectError(
                    f"{self.path}: {field} {fields[field]!r}, but this pic knows {', '.join(known)}"
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
        text_start = tensor_entries(self.meta, 0)["text"]["data_offsets"][0]
        text_bytes = self.num_bytes - self._data_start - text_start
        wanted = tensor_entries(self.meta, text_bytes)
        if text_bytes < 0 or raw != canonical({**wanted, "__metadata__": header["__metadata__"]}):
            raise self._fail(f"{self.num_bytes} bytes long, which is not what its header describes; {_DAMAGED}")
        return wanted

    def _part(self, name: str, wanted: str, *tensors: str, into: memoryview | None = None) -> memoryview:
        start, end = self._entries[tensors[0]]["data_offsets"][0], self._entries[tensors[-1]]["data_offsets"][1]
        data = self._read(self._data_start + start, end - start, into)
        if checksum(data) != wanted:
            raise self._fail(f"{name} does not match its checksum; {_DAMAGED}")
        return data
