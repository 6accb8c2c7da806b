from __future__ import annotations

from typing import ClassVar

import numpy as np

from pictool.store.codecs.numbers import BFloats, Floats, round_down, round_up
from pictool.store.codecs.packing import Bytes
from pictool.store.codecs.quantized import Codes, Quantizing


class Int4(Quantizing):
    """Four bits: 0 … 15 times the group's scale, on its smallest number (KIVI §3).

    A byte holds number i of the layer's first half (low) and number i of the second half (high).
    """

    name: ClassVar[str] = "int4"
    has_offset = True

    def quantize(self, numbers: Floats, axis: int | tuple[int, ...]) -> tuple[Codes, BFloats, BFloats]:
        offset = round_down(numbers.min(axis=axis, keepdims=True))
        least, largest = offset.astype(np.float32), numbers.max(axis=axis, keepdims=True)
        scale = round_up(largest / np.float32(15) - least / np.float32(15))
        steps = scale.astype(np.float32)
        codes = np.rint((numbers - least) / np.where(steps > 0, steps, 1))
        return codes.clip(0, 15).astype(np.uint8), scale, offset

    def code_bytes(self, codes: Codes) -> Bytes:
        half = len(codes) // 2
        packed: Bytes = codes[:half] | (codes[half:] << np.uint8(4))
        return packed

    def num_code_bytes(self, count: int) -> int:
        return count // 2

    def codes_of(self, data: Bytes, count: int) -> Codes:
        codes = np.empty(count, dtype=np.uint8)
        np.bitwise_and(data, 15, out=codes[: count // 2])
        np.right_shift(data, 4, out=codes[count // 2 :])
        return codes
