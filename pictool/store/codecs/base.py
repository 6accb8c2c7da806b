"""What a codec is: the key and value bytes of one layer to coded bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from pictool.core import Geometry

Buffer = bytes | bytearray | memoryview
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class CodingError(Exception):
    """Coded bytes that no encoder wrote, or KV that cannot be coded; becomes an `ObjectError` that names the file."""


@dataclass(frozen=True)
class LayerShape:
    """A layer's keys, and its values: each `[kv_heads, tokens, head_dim]` of `dtype`."""

    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, dtype: str) -> LayerShape:
        return cls(geometry.kv_heads, tokens, geometry.head_dim, dtype)

    @property
    def dims(self) -> tuple[int, int, int]:
        return self.kv_heads, self.tokens, self.head_dim

    @property
    def count(self) -> int:
        """Numbers in the keys, and as many in the values."""
        return self.kv_heads * self.tokens * self.head_dim

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Of keys and values together, not coded."""
        return 2 * self.count * self.width

    @property
    def head_bytes(self) -> int:
        """Of the keys of one head, not coded."""
        return self.tokens * self.head_dim * self.width

    def of_heads(self, heads: slice) -> LayerShape:
        """The shape of heads [start, stop) alone."""
        return replace(self, kv_heads=heads.stop - heads.start)

    def split(self, data: memoryview) -> tuple[memoryview, memoryview]:
        """The keys and the values in the bytes of a layer."""
        middle = self.num_bytes // 2
        return data[:middle], data[middle : self.num_bytes]


class Codec(ABC):
    """One way to code a layer. Without state: the same layer gives the same bytes."""

    name: ClassVar[str]
    is_lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, key: Buffer, value: Buffer, shape: LayerShape) -> bytes:
        """Raises CodingError for KV that cannot be coded."""

    @abstractmethod
    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        """Write keys, then values, to `out` of `shape.num_bytes`. Raises CodingError for what was never encoded."""

    def decode_heads(self, data: memoryview, shape: LayerShape, heads: slice, out: memoryview) -> None:
        """Write keys, then values, of heads [start, stop) to `out`, which has room for them. Raises CodingError.

        A codec that can decode some heads alone does so; otherwise all are decoded.
        """
        whole = memoryview(bytearray(shape.num_bytes))
        self.decode(data, shape, whole)
        for part, target in zip(shape.split(whole), shape.of_heads(heads).split(out), strict=True):
            target[:] = part[shape.head_bytes * heads.start : shape.head_bytes * heads.stop]
