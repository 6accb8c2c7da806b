from __future__ import annotations

from typing import ClassVar

import numpy as np

from pictool.store.codecs.numbers import BFloats, Floats, round_up
from pictool.store.codecs.packing import Bytes
from pictool.store.codecs.quantized import Codes, Quantizing


class Int8(Quantizing):
    """Eight bits: -127 … 127 times the group's scale."""

    name: ClassVar[str] = "int8"

    def quantize(self, numbers: Floats, axis: int | tuple[int, ...]) -> tuple[Codes, BFloats, None]:
        scale = round_up(np.abs(numbers).max(axis=axis, keepdims=True) / np.float32(127))
        steps = scale.astype(np.float32)
        codes = np.rint(numbers / np.where(steps > 0, steps, 1)).astype(np.int8)
        return codes, scale, None

    def codes_of(self, data: Bytes, count: int) -> Codes:
        return data.view(np.int8)
