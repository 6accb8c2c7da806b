from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pictool.store.codecs.numbers import Floats, round_down, round_up, widen
from pictool.store.codecs.packing import Bytes
from pictool.store.codecs.quantized import Codes, Quantizing


class Int4(Quantizing):
    """Four bits: 0 … 15 times the group's scale, on its smallest number (KIVI §3).

    A byte holds number i of the layer's first half (low) and number i of the second half (high).
    """

    name: ClassVar[str] = "int4"
    has_offset = True

    def quantize(self, numbers: Floats, axis: int) -> tuple[Codes, NDArray[np.uint16], NDArray[np.uint16]]:
        offset = round_down(numbers.min(axis=axis, keepdims=True))
        scale = round_up(numbers.max(axis=axis, keepdims=True) / np.float32(15) - widen(offset) / np.float32(15))
        steps = widen(scale)
        codes = np.rint((numbers - widen(offset)) / np.where(steps > 0, steps, 1))
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

    def to_float(self, codes: Codes) -> Floats:
        return codes.astype(np.float32)
