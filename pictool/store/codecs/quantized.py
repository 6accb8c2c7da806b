"""Codecs that keep a few bits of every number, and a scale for each group of them (KIVI, KVQuant).

Keys, which are stored before rotation, have channels that are large throughout: their groups are GROUP tokens of one
channel. Values have tokens that are large: their groups are channels of one token. Scales are bfloat16. Of other parts
those that are rotated are coded as keys, and the others, as latents, as values.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.store.codecs.base import Buffer, Codec, CodingError, LayerShape
from pictool.store.codecs.numbers import BFLOAT16, BFloats, Floats, array_dtype, to_floats
from pictool.store.codecs.packing import Bytes, pack, unpack

GROUP = 64
_BLOCK = 1 << 14  # numbers that are decoded at once, so that they stay in the cache
Codes = NDArray[Any]


@dataclass(frozen=True)
class PieceLayout:
    """Which numbers a piece holds: of a part (0: keys, 1: values), tokens [start, end), grouped along one axis.

    `codes` is a shape [heads, a, b, c] with a · b · c = tokens · width; along `axis` (one or several) a scale is one.
    """

    part: int
    start: int
    end: int
    axis: int | tuple[int, ...]
    codes: tuple[int, ...]

    @property
    def scales(self) -> tuple[int, ...]:
        """The shape of the scales: that of the codes, with 1 along the axes of the groups."""
        axes = (self.axis,) if isinstance(self.axis, int) else self.axis
        return tuple(1 if axis in axes else size for axis, size in enumerate(self.codes))


@dataclass(frozen=True)
class Piece:
    """The decoded parts of tokens [start, end) of keys or values: x = codes · scale + offset (`PieceLayout`)."""

    start: int
    end: int
    codes: Codes
    scale: Floats
    offset: Floats | None

    def of_heads(self, heads: slice) -> Piece:
        offset = None if self.offset is None else self.offset[heads]
        return Piece(self.start, self.end, self.codes[heads], self.scale[heads], offset)


def piece_layouts(shape: LayerShape) -> Iterator[PieceLayout]:
    """The pieces of a layer, in the order in which they are stored: whole groups of keys, the last keys, all values."""
    for index, (part, (heads, tokens, dim)) in enumerate(zip(shape.parts, shape.part_dims, strict=True)):
        if not part.rotated:
            group = _value_group(dim)
            yield PieceLayout(index, 0, tokens, 3, (heads, tokens, dim // group, group))
            continue
        whole = tokens - tokens % GROUP
        for start, end, group in ((0, whole, GROUP), (whole, tokens, tokens - whole)):
            if start < end:
                yield PieceLayout(index, start, end, 2, (heads, (end - start) // group, group, dim))


def _value_group(dim: int) -> int:
    """Channels in a group of values: the largest divisor of the head's dimension up to GROUP."""
    return next(size for size in range(min(GROUP, dim), 0, -1) if dim % size == 0)


class Quantizing(Codec):
    """Parts: the codes of all pieces, the low and the high bytes of all scales (and, if there are, of all offsets).

    A code is a byte, and the number that it says, unless a codec has it otherwise.
    """

    is_lossless = False
    has_offset = False
    is_float8 = False  # whether codes are those of float8 e4m3fn

    def layouts(self, shape: LayerShape) -> Iterator[PieceLayout]:
        """The pieces of a layer, in the order in which they are stored."""
        return piece_layouts(shape)

    @abstractmethod
    def quantize(self, numbers: Floats, axis: int | tuple[int, ...]) -> tuple[Codes, BFloats, BFloats | None]:
        """Codes, scales and offsets of groups along `axis`."""

    def code_bytes(self, codes: Codes) -> Bytes:
        """How the codes of a layer, all in one row, are stored."""
        return codes.view(np.uint8)

    def num_code_bytes(self, count: int) -> int:
        """Bytes of so many codes."""
        return count

    def codes_of(self, data: Bytes, count: int) -> Codes:
        """The inverse of `code_bytes`."""
        return data

    def to_float(self, codes: Codes) -> Floats:
        """float32 that the codes stand for, before the scale."""
        return codes.astype(np.float32)

    def encode(self, key: Buffer, value: Buffer, shape: LayerShape) -> bytes:
        numbers = to_floats(key, shape, 0), to_floats(value, shape, 1)
        codes, scales, offsets = list[Codes](), list[BFloats](), list[BFloats]()
        for layout in self.layouts(shape):
            piece = numbers[layout.part][:, layout.start : layout.end].reshape(layout.codes)
            code, scale, offset = self.quantize(piece, layout.axis)
            codes.append(code.reshape(-1))
            scales.append(scale.reshape(-1))
            offsets += [] if offset is None else [offset.reshape(-1)]
        factors = [np.concatenate(arrays) for arrays in (scales, offsets) if arrays]
        if not all(np.isfinite(array).all() for array in factors):
            raise CodingError("the KV has numbers so large that their scale is not finite")
        planes = [plane for array in factors for plane in array.view(np.uint8).reshape(-1, 2).T]
        return pack([self.code_bytes(np.concatenate(codes)), *map(np.ascontiguousarray, planes)])

    def pieces(self, data: memoryview, shape: LayerShape) -> Iterator[tuple[int, Piece]]:
        """(index of the part, piece): what `decode` computes from, for those who compute elsewhere (on a GPU)."""
        num_groups = sum(math.prod(layout.scales) for layout in self.layouts(shape))
        sizes = [self.num_code_bytes(shape.count), *[num_groups] * (4 if self.has_offset else 2)]
        code_bytes, *planes = unpack(data, sizes)
        codes, scales = self.codes_of(code_bytes, shape.count), _join(*planes[:2])
        offsets = _join(*planes[2:]) if self.has_offset else None
        first_code, first_group = 0, 0
        for layout in self.layouts(shape):
            last_code, last_group = first_code + math.prod(layout.codes), first_group + math.prod(layout.scales)
            code = codes[first_code:last_code].reshape(layout.codes)
            scale = _spread(scales[first_group:last_group], layout)
            offset = None if offsets is None else _spread(offsets[first_group:last_group], layout)
            yield layout.part, Piece(layout.start, layout.end, code, scale, offset)
            first_code, first_group = last_code, last_group

    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        self._decode(self.pieces(data, shape), shape, out)

    def decode_heads(self, data: memoryview, shape: LayerShape, heads: slice, out: memoryview) -> None:
        pieces = ((part, whole.of_heads(heads)) for part, whole in self.pieces(data, shape))
        self._decode(pieces, shape.of_heads(heads), out)

    def _decode(self, pieces: Iterable[tuple[int, Piece]], shape: LayerShape, out: memoryview) -> None:
        """Write the numbers of pieces to `out`, which is of this shape."""
        dtype = array_dtype(shape.dtype)
        parts = zip(shape.split(out), shape.part_dims, strict=True)
        numbers = [np.frombuffer(part, dtype=dtype).reshape(dims) for part, dims in parts]
        for part, piece in pieces:
            target = numbers[part][:, piece.start : piece.end].reshape(piece.codes.shape)
            num_heads, rows, *group = piece.codes.shape
            head_step = max(1, _BLOCK // (rows * math.prod(group)))
            step = max(1, _BLOCK // math.prod(group))
            for head, start in itertools.product(range(0, num_heads, head_step), range(0, rows, step)):
                self._fill(target, piece, (slice(head, head + head_step), slice(start, start + step)))

    def _fill(self, target: NDArray[Any], piece: Piece, index: tuple[slice, slice]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # scales that no encoder wrote
            numbers = self.to_float(piece.codes[index]) * piece.scale[index]
            if piece.offset is not None:
                numbers += piece.offset[index]
            np.copyto(target[index], numbers, casting="unsafe")  # rounded to the nearest, ties to even


def _spread(scales: Floats, layout: PieceLayout) -> Floats:
    """Scales of a piece, one for each head and row at least, so that any of these can be taken alone."""
    shape = (*layout.codes[:2], *layout.scales[2:])
    shaped = scales.reshape(layout.scales)
    return shaped if shaped.shape == shape else np.broadcast_to(shaped, shape).copy()


def _join(low: Bytes, high: Bytes) -> Floats:
    """float32 of bfloat16 numbers whose low and high bytes are stored apart."""
    numbers = np.stack([low, high], axis=1).reshape(-1).view(BFLOAT16).astype(np.float32)
    if not np.isfinite(numbers).all():
        raise CodingError("a scale is not finite")
    return numbers
