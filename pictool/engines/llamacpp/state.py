"""The KV of one sequence as llama.cpp writes it, and the layout of objects.

    state := magic(u32) sequence(i32) cache…                         one cache; two where some layers have a window
    cache := 1(u32) cells(u32) cell[cells] is-transposed(u32) layers(u32) keys[layers] values[layers or 0]
    cell  := position(i32) 1(u32) sequence(i32)
    keys  := type(i32) row-bytes(u64) rows
    values := as keys; or, if transposed, type(i32) number-bytes(u32) row-length(u32) columns

Objects hold these numbers in the layout of every object, [kv_heads, n, head_dim] a layer, and not the state as bytes:
so they outlive a build of llama.cpp and the choice between transposed and plain values, codecs, `pic inspect` and
checks of finite numbers apply to them, part of a chunk can be linked, and the library gets no state that this module
did not make. Keys stay as llama.cpp has them, rotated to the positions that the chunk was compiled at: no call gives
them before rotation. Where keys and values differ in width (MLA has one latent, kept as keys alone), a layer's numbers
are one row of keys and values a token, filled with zeros to an even number that all layers share, and halved.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pictool.core import Geometry
from pictool.errors import ModelError
from pictool.store.objects.format import Buffer

if TYPE_CHECKING:
    from pictool.engines.llamacpp.library import LlamaContext

Rows = NDArray[Any]  # [n, width] numbers of a layer's keys or values
LayerRows = tuple[Rows, Rows]
_DTYPES: dict[int, np.dtype[Any]] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}


@dataclass(frozen=True)
class Cache:
    """Row lengths of one cache of a state, by layer; `values` are none where keys hold all (MLA)."""

    is_transposed: bool
    keys: tuple[int, ...]
    values: tuple[int, ...]

    @property
    def widths(self) -> list[tuple[int, int]]:
        return list(zip(self.keys, self.values or (0,) * len(self.keys), strict=True))


@dataclass(frozen=True)
class StateFormat:
    """What the states of one model look like. `heads` are the KV heads, where all layers have as many."""

    magic: int
    kind: int  # ggml's type of the numbers
    heads: int
    caches: tuple[Cache, ...]

    @classmethod
    def of_json(cls, value: Any) -> StateFormat:
        magic, kind, heads, caches = value
        return cls(magic, kind, heads, tuple(Cache(a, tuple(b), tuple(c)) for a, b, c in caches))

    def json(self) -> Any:
        caches = [[cache.is_transposed, list(cache.keys), list(cache.values)] for cache in self.caches]
        return [self.magic, self.kind, self.heads, caches]

    @property
    def dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.kind]

    @cached_property
    def widths(self) -> list[tuple[int, int]]:
        """Of keys and values of every layer, those without a window first."""
        return [pair for cache in self.caches for pair in cache.widths]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of the KV of a token."""
        return sum(map(sum, self.widths)) * self.dtype.itemsize

    @cached_property
    def is_plain(self) -> bool:
        """Whether each layer has keys and values of all heads, of one size."""
        return (
            len({*self.widths}) == 1 and self.widths[0][0] == self.widths[0][1] and not self.widths[0][0] % self.heads
        )

    @cached_property
    def geometry(self) -> Geometry:
        """That of the objects."""
        if self.is_plain:
            return Geometry(len(self.widths), self.heads, self.widths[0][0] // self.heads)
        return Geometry(len(self.widths), 1, max(-(-(key + value) // 2) for key, value in self.widths))

    # Between rows and the layout of objects

    def pack(self, layer: LayerRows) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of an object, [kv_heads, n, head_dim] each."""
        shape = self.geometry
        if self.is_plain:
            key, value = (np.ascontiguousarray(_by_head(part, shape.kv_heads)) for part in layer)
            return key, value
        whole = np.zeros((len(layer[0]), 2 * shape.head_dim), self.dtype)
        whole[:, : layer[0].shape[1]] = layer[0]
        whole[:, layer[0].shape[1] : layer[0].shape[1] + layer[1].shape[1]] = layer[1]
        key, value = (np.ascontiguousarray(half)[None] for half in np.hsplit(whole, 2))
        return key, value

    def unpack(self, layer: int, key: Buffer, value: Buffer) -> LayerRows:
        """The inverse of `pack`, of bytes."""
        shape, widths = self.geometry, self.widths[layer]
        parts = [np.frombuffer(part, self.dtype).reshape(shape.kv_heads, -1, shape.head_dim) for part in (key, value)]
        if self.is_plain:
            keys, values = (part.transpose(1, 0, 2).reshape(part.shape[1], -1) for part in parts)
            return keys, values
        whole = np.concatenate([part[0] for part in parts], axis=1)
        return whole[:, : widths[0]], whole[:, widths[0] : sum(widths)]

    # Between rows and states

    def write(self, layers: Sequence[LayerRows], positions: NDArray[np.int32]) -> bytearray:
        """The state of a sequence of tokens at these positions."""
        parts: list[Buffer] = [struct.pack("<Ii", self.magic, 0)]
        cells = np.ones((len(positions), 3), dtype="<i4")
        cells[:, 0], cells[:, 2] = positions, 0
        rest = iter(layers)
        for cache in self.caches:
            own = [next(rest) for _ in cache.keys]
            parts += [struct.pack("<II", 1, len(positions)), cells.tobytes()]
            parts.append(struct.pack("<II", cache.is_transposed, len(cache.keys)))
            for key, _ in own:
                parts += [struct.pack("<iQ", self.kind, key.shape[1] * self.dtype.itemsize), key.tobytes()]
            for _, value in own if cache.values else ():
                parts += self._value(cache, value)
        return bytearray().join(parts)

    def _value(self, cache: Cache, value: Rows) -> list[Buffer]:
        size, width = self.dtype.itemsize, value.shape[1]
        if cache.is_transposed:
            return [struct.pack("<iII", self.kind, size, width), value.T.tobytes()]
        return [struct.pack("<iQ", self.kind, width * size), value.tobytes()]

    def read(self, state: bytearray, positions: NDArray[np.int32]) -> list[LayerRows]:
        """The rows of a state, in the order of these positions, which it must have.

        Raises:
            ModelError: another state than this format's.
        """
        found, layers, places = _parse(state, self.heads, bool(self.caches[0].values))
        if found != self or any(not np.array_equal(np.sort(place), positions) for place in places):
            raise ModelError("llama.cpp's KV layout of this model differs from that of the trial run")
        rows, rest = list[LayerRows](), iter(layers)
        for cache, place in zip(self.caches, places, strict=True):
            order = np.argsort(place)
            rows += [(key[order], value[order]) for key, value in (next(rest) for _ in cache.keys)]
        return rows


def format_of(state: bytearray, heads: int) -> StateFormat:
    """The format of a state that has some cells.

    Raises:
        ModelError: it is not in a format that this module knows.
    """
    for has_values in (True, False):
        try:
            return _parse(state, heads, has_values)[0]
        except (struct.error, ValueError, KeyError):
            continue
    raise ModelError("llama.cpp keeps the KV of this model in a layout that pic does not know; use another model")


def read_rows(context: LlamaContext, form: StateFormat, window: int, start: int, end: int) -> list[LayerRows]:
    """The rows of positions [start, end) of sequence 0, by layer; the context's last sequence is used for it.

    A state leaves out what the last position of its sequence does not attend to, so rows of layers with a window are
    read in parts that are shorter than it.
    """
    step, spare = (max(1, window // 2) if window else end - start), context.num_sequences - 1
    parts = list[list[LayerRows]]()
    for first in range(start, end, step):
        last = min(end, first + step)
        context.copy(0, spare, first, last)
        parts.append(form.read(context.state(spare), np.arange(first, last, dtype=np.int32)))
        context.remove(spare)
    if len(parts) == 1:
        return parts[0]
    return [
        (np.concatenate([key for key, _ in layer]), np.concatenate([value for _, value in layer]))
        for layer in zip(*parts, strict=True)
    ]


def _by_head(part: Rows, heads: int) -> Rows:
    return part.reshape(len(part), heads, -1).transpose(1, 0, 2)


class _Reader:
    def __init__(self, data: bytearray) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def numbers(self, kind: int, *shape: int) -> NDArray[Any]:
        count = shape[0] * shape[1]
        found: NDArray[Any] = np.frombuffer(self.data, _DTYPES[kind], count, self.at).reshape(shape)
        self.at += found.nbytes
        return found


def _parse(
    state: bytearray, heads: int, has_values: bool
) -> tuple[StateFormat, list[LayerRows], list[NDArray[np.int32]]]:
    """The format, rows and positions of a state. Raises ValueError, KeyError or struct.error for any other bytes."""
    reader = _Reader(state)
    magic, _ = reader.take("<Ii")
    caches, layers, places, kinds = list[Cache](), list[LayerRows](), list[NDArray[np.int32]](), set[int]()
    while reader.at < len(state):
        one, count = reader.take("<II")
        if one != 1 or not count:
            raise ValueError
        cells = np.frombuffer(state, "<i4", 3 * count, reader.at).reshape(count, 3)
        reader.at += cells.nbytes
        is_transposed, num_layers = reader.take("<II")
        if (cells[:, 1] != 1).any() or is_transposed > 1:
            raise ValueError
        keys = list(_plain(reader, num_layers, count, kinds))
        if not has_values:
            values = [key[:, :0] for key in keys]
        else:
            values = list((_transposed if is_transposed else _plain)(reader, num_layers, count, kinds))
        lengths = tuple(value.shape[1] for value in values) if has_values else ()
        caches.append(Cache(bool(is_transposed), tuple(key.shape[1] for key in keys), lengths))
        layers += zip(keys, values, strict=True)
        places.append(cells[:, 0])
    (kind,) = kinds
    return StateFormat(magic, kind, heads, tuple(caches)), layers, places


def _plain(reader: _Reader, layers: int, count: int, kinds: set[int]) -> Iterator[Rows]:
    for _ in range(layers):
        kind, size = reader.take("<iQ")
        kinds.add(kind)
        width, rest = divmod(size, _DTYPES[kind].itemsize)
        if rest:
            raise ValueError
        yield reader.numbers(kind, count, width)


def _transposed(reader: _Reader, layers: int, count: int, kinds: set[int]) -> Iterator[Rows]:
    for _ in range(layers):
        kind, size, width = reader.take("<iII")
        kinds.add(kind)
        if size != _DTYPES[kind].itemsize:
            raise ValueError
        yield reader.numbers(kind, width, count).T
