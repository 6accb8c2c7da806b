"""Between the bytes of a dtype and float32; numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.store.codecs.base import Buffer, CodingError, LayerShape

Floats = NDArray[np.float32]


def to_floats(data: Buffer, shape: LayerShape) -> Floats:
    """float32 [kv_heads, tokens, head_dim]. Raises CodingError for what is not finite."""
    if shape.dtype == "bfloat16":
        found = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        found = np.frombuffer(data, dtype="<f4" if shape.dtype == "float32" else "<f2").astype(np.float32)
    if not np.isfinite(found).all():
        raise CodingError("the KV has numbers that are not finite, which only a lossless codec keeps")
    return found.reshape(shape.dims)


def from_floats(found: Floats, out: NDArray[Any]) -> None:
    """Write float32 to an array of `number_type`, rounded to the nearest, ties to even."""
    if out.dtype == np.uint16:
        bits = found.view(np.uint32)
        np.right_shift(bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))), 16, out=bits)
        np.copyto(out, bits, casting="unsafe")
    else:
        np.copyto(out, found, casting="unsafe")


def number_type(dtype: str) -> str:
    """How numpy sees a dtype: bfloat16 as its bits."""
    return {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype]


def round_up(found: Floats) -> NDArray[np.uint16]:
    """Bits of the bfloat16 that is not below; for scales, which must reach the largest number."""
    return ((found.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)


def round_down(found: Floats) -> NDArray[np.uint16]:
    """Bits of the bfloat16 that is not above; for the smallest number of a group."""
    bits = found.view(np.uint32)
    is_up = (bits >> np.uint32(31)).astype(np.uint32) * np.uint32(0xFFFF)  # negative: away from 0 is down
    return ((bits + is_up) >> np.uint32(16)).astype(np.uint16)


def widen(bits: NDArray[Any]) -> Floats:
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
