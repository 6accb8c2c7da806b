"""Statistics of an object's keys and values, layer by layer: norms and ranges. Needs no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.store.objects.format import ObjectFile


@dataclass(frozen=True)
class TensorStats:
    """One layer's keys or values [kv_heads, n, head_dim].

    Attributes:
        min, max: the smallest and largest number.
        norms: float64 [n], the L2 norm of each token over KV heads and dims. Attention sinks often have small values.
    """

    min: float
    max: float
    norms: NDArray[np.float64]

    @property
    def mean_norm(self) -> float:
        return float(self.norms.mean())

    @property
    def first_norm(self) -> float:
        """The norm of the first token."""
        return float(self.norms[0])


@dataclass(frozen=True)
class LayerStats:
    """The keys and values of one layer of an object, or the other two parts that it keeps (`Geometry.parts`)."""

    key: TensorStats
    value: TensorStats


def object_stats(file: ObjectFile) -> tuple[LayerStats, ...]:
    """Read and check every layer of an object, and measure it. One layer is in memory at a time.

    Raises:
        ObjectError: a damaged layer, or numbers that are not finite.
    """
    return tuple(_layer_stats(file, index) for index in range(file.meta.target.geometry.layers))


def to_float32(data: memoryview, dtype: str) -> NDArray[np.float32]:
    """Convert raw little-endian numbers to float32, exactly. numpy has no bfloat16, which is float32's upper half."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, dtype={"float32": "<f4", "float16": "<f2"}[dtype]).astype(np.float32)


def _layer_stats(file: ObjectFile, index: int) -> LayerStats:
    dtype, parts = file.meta.target.dtype, file.layer(index)
    for part in parts:
        file.require_finite(index, part)
    shapes = zip(parts, file.meta.shape.part_dims, strict=True)
    key, value = (_tensor_stats(to_float32(part, dtype).reshape(shape)) for part, shape in shapes)
    return LayerStats(key, value)


def _tensor_stats(values: NDArray[np.float32]) -> TensorStats:
    squares = np.square(values, dtype=np.float64).sum((0, 2))
    return TensorStats(float(values.min()), float(values.max()), np.sqrt(squares))
