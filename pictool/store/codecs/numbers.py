"""Arrays of a layer's dtype, and rounding to bfloat16, which numpy knows through ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pictool.store.codecs.base import Buffer, CodingError, LayerShape

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
Floats = NDArray[np.float32]
BFloats = NDArray[Any]  # of BFLOAT16


def array_dtype(dtype: str) -> np.dtype[Any]:
    """numpy's dtype for a dtype of computation."""
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def to_floats(data: Buffer, shape: LayerShape, part: int) -> Floats:
    """float32 [heads, tokens, width] of a part. Raises CodingError for numbers that are not finite."""
    numbers = np.frombuffer(data, dtype=array_dtype(shape.dtype)).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise CodingError("the KV contains numbers that are not finite, which only a lossless codec can store")
    return numbers.reshape(shape.part_dims[part])


def round_up(numbers: Floats) -> BFloats:
    """The least bfloat16 that is not below; for scales, which must reach the largest number."""
    rounded = numbers.astype(BFLOAT16)
    return np.where(rounded.astype(np.float32) < numbers, np.nextafter(rounded, BFLOAT16.type(np.inf)), rounded)


def round_down(numbers: Floats) -> BFloats:
    """The largest bfloat16 that is not above; for the smallest number of a group."""
    return -round_up(-numbers)
