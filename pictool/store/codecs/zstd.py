from __future__ import annotations

from typing import ClassVar

import numpy as np

from pictool.store.codecs.base import Buffer, Codec, LayerShape
from pictool.store.codecs.packing import pack, unpack

_BLOCK = 1 << 15  # numbers that are joined at once, so that they stay in the cache


class Zstd(Codec):
    """The bytes, those of equal significance together, compressed by zstd.

    Parts: of all keys and values, the lowest byte of each, …, the highest (sign and exponent).
    """

    name: ClassVar[str] = "zstd"
    is_lossless: ClassVar[bool] = True

    def encode(self, key: Buffer, value: Buffer, shape: LayerShape) -> bytes:
        both = np.concatenate([np.frombuffer(part, dtype=np.uint8) for part in (key, value)])
        return pack(np.ascontiguousarray(plane) for plane in both.reshape(-1, shape.width).T)

    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        planes = unpack(data, [shape.count] * shape.width)
        joined = np.frombuffer(out, dtype=f"<u{shape.width}")
        for start in range(0, len(joined), _BLOCK):
            block = joined[start : start + _BLOCK]
            np.copyto(block, planes[-1][start : start + _BLOCK])
            for plane in reversed(planes[:-1]):
                np.left_shift(block, 8, out=block)
                np.bitwise_or(block, plane[start : start + _BLOCK], out=block)
