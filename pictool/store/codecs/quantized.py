"""Codecs that keep a few bits of every number, and a scale for each group of them (KIVI, KVQuant).

Keys, which are stored before rotation, have channels that are large throughout: their groups are GROUP tokens of one
channel. Values have tokens that are large: their groups are channels of one token. Scales are bfloat16.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.store.codecs.base import Buffer, Codec, CodingError, LayerShape
from pictool.store.codecs.numbers import Floats, from_floats, number_type, to_floats, widen
from pictool.store.codecs.packing import Bytes, pack, unpack

GROUP = 64
_BLOCK = 1 << 14  # numbers that are decoded at once, so that they stay in the cache
Codes = NDArray[Any]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of keys or values, their groups along one axis: x = codes · scale + offset.

    `codes` is [kv_heads, a, b, c] with a · b · c = tokens · head_dim; the others have 1 where a group lies.
    """

    start: int
    end: int
    codes: Codes
    scale: Floats
    offset: Floats | None


def key_pieces(shape: LayerShape) -> list[tuple[int, int, int]]:
    """(start, end, tokens a group): whole groups, and what is left."""
    whole = shape.tokens - shape.tokens % GROUP
    pieces = [(0, whole, GROUP), (whole, shape.tokens, shape.tokens - whole)]
    return [piece for piece in pieces if piece[0] < piece[1]]


def value_group(shape: LayerShape) -> int:
    """Channels a group: the largest divisor of the head's dimension up to GROUP."""
    return next(size for size in range(min(GROUP, shape.head_dim), 0, -1) if shape.head_dim % size == 0)


@dataclass(frozen=True)
class Plan:
    """Where a piece stands: of keys ("k") or values ("v"), tokens [start, end), grouped along `axis` of `codes`."""

    part: str
    start: int
    end: int
    axis: int
    codes: tuple[int, ...]

    @property
    def scales(self) -> tuple[int, ...]:
        return tuple(1 if axis == self.axis else size for axis, size in enumerate(self.codes))


def plans(shape: LayerShape) -> Iterator[Plan]:
    """Every piece of a layer, in the order in which they are stored."""
    heads, tokens, dim = shape.dims
    for start, end, size in key_pieces(shape):
        yield Plan("k", start, end, 2, (heads, (end - start) // size, size, dim))
    size = value_group(shape)
    yield Plan("v", 0, tokens, 3, (heads, tokens, dim // size, size))


class Quantizing(Codec):
    """Parts: the codes of all pieces, the high and the low bytes of all scales (and, if there are, of all offsets)."""

    is_lossless = False
    has_offset = False

    @abstractmethod
    def quantize(self, numbers: Floats, axis: int) -> tuple[Codes, NDArray[np.uint16], NDArray[np.uint16] | None]:
        """Codes, and bfloat16 bits of scales and offsets, of groups along `axis`."""

    @abstractmethod
    def code_bytes(self, codes: Codes) -> Bytes:
        """How the codes of a layer, all in one row, are stored."""

    @abstractmethod
    def num_code_bytes(self, count: int) -> int: ...

    @abstractmethod
    def codes_of(self, data: Bytes, count: int) -> Codes:
        """The inverse of `code_bytes`."""

    @abstractmethod
    def to_float(self, codes: Codes) -> Floats:
        """float32 that the codes stand for, before the scale."""

    def encode(self, key: Buffer, value: Buffer, shape: LayerShape) -> bytes:
        numbers = {"k": to_floats(key, shape), "v": to_floats(value, shape)}
        codes, scales, offsets = list[Codes](), list[NDArray[Any]](), list[NDArray[Any]]()
        for plan in plans(shape):
            mine = numbers[plan.part][:, plan.start : plan.end].reshape(plan.codes)
            code, scale, offset = self.quantize(mine, plan.axis)
            codes.append(code.reshape(-1))
            scales.append(scale.reshape(-1))
            offsets += [] if offset is None else [offset.reshape(-1)]
        rows = [np.concatenate(row) for row in (scales, offsets) if row]
        if not all(np.isfinite(widen(row)).all() for row in rows):
            raise CodingError("the KV has numbers so large that their scale is not finite")
        planes = [plane for row in rows for plane in row.astype("<u2").view(np.uint8).reshape(-1, 2).T]
        return pack([self.code_bytes(np.concatenate(codes)), *map(np.ascontiguousarray, planes)])

    def pieces(self, data: memoryview, shape: LayerShape) -> Iterator[tuple[str, Piece]]:
        """("k" or "v", piece): what `decode` computes from, for those who compute elsewhere (on a GPU)."""
        num_groups = sum(math.prod(plan.scales) for plan in plans(shape))
        sizes = [self.num_code_bytes(2 * shape.count), *[num_groups] * (4 if self.has_offset else 2)]
        first, *rest = unpack(data, sizes)
        codes, scales = self.codes_of(first, 2 * shape.count), _joined(rest[0], rest[1])
        offsets = _joined(rest[2], rest[3]) if self.has_offset else None
        at, group = 0, 0
        for plan in plans(shape):
            mine = slice(group, group + math.prod(plan.scales))
            code = codes[at : at + math.prod(plan.codes)].reshape(plan.codes)
            offset = None if offsets is None else offsets[mine].reshape(plan.scales)
            yield plan.part, Piece(plan.start, plan.end, code, scales[mine].reshape(plan.scales), offset)
            at, group = at + code.size, mine.stop

    def decode(self, data: memoryview, shape: LayerShape, out: memoryview) -> None:
        both = np.frombuffer(out, dtype=number_type(shape.dtype)).reshape(2, *shape.dims)
        for part, piece in self.pieces(data, shape):
            target = both["kv".index(part)][:, piece.start : piece.end].reshape(piece.codes.shape)
            rows = max(1, _BLOCK // math.prod(piece.codes.shape[2:]))
            for head, at in itertools.product(range(shape.kv_heads), range(0, piece.codes.shape[1], rows)):
                self._fill(target, piece, (head, slice(at, at + rows)))

    def _fill(self, target: NDArray[Any], piece: Piece, index: tuple[int, slice]) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # scales that no encoder wrote
            found = self.to_float(piece.codes[index]) * piece.scale[index]
            if piece.offset is not None:
                found += piece.offset[index]
        from_floats(found, target[index])


def _joined(low: Bytes, high: Bytes) -> Floats:
    found = widen(low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8)))
    if not np.isfinite(found).all():
        raise CodingError("a scale is not finite")
    return found
