"""Writing an object file; its grammar is in `format.py`."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from pictool.errors import InputError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import CodingError
from pictool.store.header import (
    Buffer,
    CompiledChunk,
    canonical,
    checksum,
    metadata_of,
    seal,
    tensor_entries,
    token_bytes,
)


def write_object(file: BinaryIO, chunk: CompiledChunk) -> None:
    """Write one object; the same chunk gives the same bytes.

    Raises:
        InputError: KV that its codec cannot keep.
    """
    text, tokens = chunk.text.encode(), token_bytes(chunk.tokens)
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


def _coded_layers(chunk: CompiledChunk) -> list[tuple[Buffer, ...]]:
    """What stands in the file for every layer; layers are coded side by side."""
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
