from __future__ import annotations

from typing import ClassVar

import numpy as np

from pictool.store.codecs.numbers import BFloats, Floats, round_up
from pictool.store.codecs.packing import Bytes
from pictool.store.codecs.quantized import Codes, Quantizing

LARGEST = np.float32(448)
_LEAST_NORMAL = np.float32(2.0**-6)
_BIAS = 120  # float32's exponents less float8's


class Fp8(Quantizing):
    """float8 e4m3fn times the group's scale."""

    name: ClassVar[str] = "fp8"
    is_float8 = True

    def quantize(self, numbers: Floats, axis: int | tuple[int, ...]) -> tuple[Codes, BFloats, None]:
        scale = round_up(np.abs(numbers).max(axis=axis, keepdims=True) / LARGEST)
        steps = scale.astype(np.float32)
        scaled: Floats = np.divide(numbers, np.where(steps > 0, steps, 1), dtype=np.float32)
        return to_fp8(scaled), scale, None

    def to_float(self, codes: Codes) -> Floats:
        return from_fp8(codes)


# By bits: ml_dtypes' float8_e4m3fn gives the same codes and numbers, but a layer then takes twice as long to encode.


def to_fp8(numbers: Floats) -> Bytes:
    """Codes of float8 e4m3fn nearest to numbers up to LARGEST, ties to even."""
    size, sign = np.abs(numbers), np.signbit(numbers).astype(np.uint8) << np.uint8(7)
    bits = size.view(np.uint32)
    rounded = bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))
    normal = (rounded >> np.uint32(20)) - np.uint32(_BIAS << 3)
    small = np.rint(size * np.float32(512))
    codes: Bytes = np.where(size >= _LEAST_NORMAL, normal, small.astype(np.uint32)).astype(np.uint8) | sign
    return codes


def from_fp8(codes: Codes) -> Floats:
    """float32 of float8 e4m3fn codes."""
    bits = codes.astype(np.uint32)
    placed = ((bits & np.uint32(0x80)) << np.uint32(24)) | ((bits & np.uint32(0x7F)) << np.uint32(20))
    numbers: Floats = placed.view(np.float32) * np.float32(2.0**_BIAS)
    return numbers
