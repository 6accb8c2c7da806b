from __future__ import annotations

from typing import ClassVar

from pictool.store.codecs.base import Buffer, Codec, CodingError, LayerShape


class Uncoded(Codec):
    """The bytes as they are: any safetensors reader sees keys and values as tensors."""

    name: ClassVar[str] = "none"
    is_lossless: ClassVar[bool] = True

    def encode(self, key: Buffer, value: Buffer, shape: LayerShape) -> bytes:
        return b"".join((key, value))

    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        if len(data) != len(out):
            raise CodingError(f"{len(data):,d} bytes, not {len(out):,d}")
        out[:] = data
