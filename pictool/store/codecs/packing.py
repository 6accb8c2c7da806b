"""Several arrays of bytes as one, each a zstd frame after its length (u32, little endian).

The match finder is all but off: KV has no repeats worth finding, so all that is gained comes from the entropy coder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from pictool.store.codecs.base import CodingError

Bytes = NDArray[np.uint8]
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0,
    strategy=zstandard.STRATEGY_FAST, write_content_size=True, write_checksum=False,
)  # fmt: skip


def pack(parts: Iterable[Bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY)
    frames = [compressor.compress(part.data) for part in parts]
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def unpack(data: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """The parts, which must have these sizes; nothing is allocated for a frame that states another size.

    Raises:
        CodingError: what `pack` never returned.
    """
    decompressor, offset, parts = zstandard.ZstdDecompressor(max_window_size=1 << 23), 0, list[Bytes]()
    for size in sizes:
        frame = _frame(data, offset)
        offset += 4 + len(frame)
        parts.append(_content(decompressor, frame, size))
    if offset != len(data):
        raise CodingError(f"{len(data) - offset} bytes after the last part")
    return parts


def _frame(data: memoryview, offset: int) -> memoryview:
    if len(data) < offset + 4:
        raise CodingError("it ends before its last part")
    (length,) = struct.unpack_from("<I", data, offset)
    if len(data) < offset + 4 + length:
        raise CodingError("it ends in the middle of a part")
    return data[offset + 4 : offset + 4 + length]


def _content(decompressor: zstandard.ZstdDecompressor, frame: memoryview, size: int) -> Bytes:
    try:
        if zstandard.frame_content_size(frame) != size:
            raise CodingError("a part's size differs from that in the header")
        content = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise CodingError("a part cannot be decompressed") from error
    if len(content) != size:
        raise CodingError("a part's size differs from that in its frame")
    return np.frombuffer(content, dtype=np.uint8)
