"""What a codec is: the bytes of one layer's keys and values, or of its other two parts, to coded bytes, and back."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from pictool.core import Geometry, KVPart, standard_parts

Buffer = bytes | bytearray | memoryview
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class CodingError(Exception):
    """Coded bytes that no encoder wrote, or KV that cannot be coded; becomes an `ObjectError` that names the file."""


@dataclass(frozen=True)
class LayerShape:
    """A layer's keys, and its values: each `[kv_heads, tokens, head_dim]` of `dtype`; or its `others` (`Geometry`)."""

    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    others: tuple[KVPart, ...] = ()

    @classmethod
    def of(cls, geometry: Geometry, tokens: int, dtype: str) -> LayerShape:
        return cls(geometry.kv_heads, tokens, geometry.head_dim, dtype, geometry.others)

    @property
    def dims(self) -> tuple[int, int, int]:
        """Of keys, and of values."""
        assert not self.others
        return self.kv_heads, self.tokens, self.head_dim

    @property
    def parts(self) -> tuple[KVPart, ...]:
        return self.others or standard_parts(self.kv_heads, self.head_dim)

    @property
    def part_dims(self) -> tuple[tuple[int, int, int], ...]:
        """The dimensions of each part."""
        return tuple((part.heads, self.tokens, part.width) for part in self.parts)

    @property
    def count(self) -> int:
        """Numbers in all parts."""
        return sum(map(math.prod, self.part_dims))

    @property
    def width(self) -> int:
        return WIDTHS[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Of all parts together, not coded."""
        return self.count * self.width

    @property
    def head_bytes(self) -> int:
        """Of the keys of one head, not coded."""
        return self.tokens * self.head_dim * self.width

    def of_heads(self, heads: slice) -> LayerShape:
        """The shape of heads [start, stop) alone."""
        return replace(self, kv_heads=heads.stop - heads.start)

    def split(self, data: memoryview) -> tuple[memoryview, ...]:
        """The parts in the bytes of a layer, as keys and values."""
        sizes = [math.prod(dims) * self.width for dims in self.part_dims]
        return tuple(data[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True))


class Codec(ABC):
    """One way to code a layer. Without state: the same layer gives the same bytes.

    `state_dtype` is that of the recurrent states of a hybrid's linear layers, which are never coded otherwise.
    """

    name: ClassVar[str]
    is_lossless: ClassVar[bool]
    state_dtype: ClassVar[str] = "float32"

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
