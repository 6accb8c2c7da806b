from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pictool.store.codecs.base import LayerShape
from pictool.store.codecs.fp8 import Fp8
from pictool.store.codecs.quantized import PieceLayout


class Float8E4M3(Fp8):
    """float8 e4m3fn, one scale for the keys of a layer and one for its values, as vLLM's `fp8` KV cache."""

    name: ClassVar[str] = "float8_e4m3"
    axes: ClassVar[tuple[int, ...]] = (0, 1, 2, 3)  # along which a scale is one

    def layouts(self, shape: LayerShape) -> Iterator[PieceLayout]:
        for part, (heads, tokens, dim) in enumerate(shape.part_dims):
            yield PieceLayout(part, 0, tokens, self.axes, (heads, tokens, 1, dim))


class Float8E4M3Head(Float8E4M3):
    """float8 e4m3fn as `float8_e4m3`, with a scale for each head."""

    name: ClassVar[str] = "float8_e4m3_head"
    axes: ClassVar[tuple[int, ...]] = (1, 2, 3)

    def unpack(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        """Write the codes of all parts, then the scales of their heads as float32 (`unpacked_bytes`): what a device
        widens itself. Raises CodingError as `decode` does."""
        pieces = [piece for _, piece in self.pieces(data, shape)]
        arrays = [*(piece.codes for piece in pieces), *(piece.scale[:, 0] for piece in pieces)]
        np.concatenate(
            [np.ascontiguousarray(array).ravel().view(np.uint8) for array in arrays], out=np.frombuffer(out, np.uint8)
        )

    def unpacked_bytes(self, shape: LayerShape) -> int:
        return shape.count + 4 * sum(part.heads for part in shape.parts)
