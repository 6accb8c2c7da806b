"""A pool of KV on the device: runs of consecutive slots, which CIDRA's moves take to new places (Span queries §5.5).

A slot holds one token's values and its keys twice: before rotation, and rotated to the position where it is in use. A
move rotates what it brings from the keys before rotation. So however often a run is moved, its keys are those of a
fresh copy bit for bit, in every dtype: nothing accumulates, where rotating the rotated keys by the difference would
lose a rounding a move. That takes half as much memory again as the KV itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pictool.errors import ModelError
from pictool.runtime.device import device_memory, synchronize
from pictool.runtime.machine import memory_bytes
from pictool.runtime.memory import streams
from pictool.runtime.memory.cidra import SCRATCH, Move, MovePlan, plan
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.rope import tables_at
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from pictool.core import Layout
    from pictool.runtime.memory.caches import LayerKV
    from pictool.runtime.model import Model
    from pictool.runtime.rope import RotaryTables
    from pictool.runtime.rows import Rows

_MOST_CONTEXTS = 16
_LONG_RUN = 64  # slots, on average, from which on a copy per run is faster than one by index


@dataclass(frozen=True)
class Repositioning:
    """What one round of moves took. `seconds` are those of the device, without planning.

    `duplicates` counts runs that went to one more place; `scratch` and `buffer` are slots: saved beside the pool, and
    of the longest batch, which is copied a layer at a time. `scratch_bytes` is the most memory that these took.
    """

    moves: int = 0
    tokens: int = 0
    batches: int = 0
    duplicates: int = 0
    scratch: int = 0
    buffer: int = 0
    scratch_bytes: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.seconds / 1e3 if self.seconds else 0.0


class Pool:
    """The slots. Of each layer `raw` keys before rotation, rotated `keys`, and `values`: [kv_heads, slots, head_dim].

    Of a model with other parts (`Geometry.parts`) "keys" are the part that is rotated, and "values" the other.

    Args:
        num_slots: that it holds, beside the scratch of a long cycle.
        keeps_raw: raw keys are kept of what is computed, too: before the first document of an image.

    Raises:
        ModelError: a RoPE whose frequencies depend on the prompt's length, so that rotated keys are of one prompt; or
            the device has no room.
    """

    def __init__(self, model: Model, num_slots: int, scratch: int = 0, keeps_raw: bool = False) -> None:
        require_movable(model)
        self.stack, self.num_slots, self.keeps_raw = model.stack, num_slots, keeps_raw
        self._longest: RotaryTables | None = None
        geometry, stack = model.geometry, model.stack
        rotated, other = (part for has in (True, False) for part in geometry.parts if part.rotated is has)
        shapes = [(part.heads, num_slots + scratch, part.width) for part in (rotated, rotated, other)]
        try:
            with torch.inference_mode(False):  # so that all may write to it
                self.raw, self.keys, self.values = (
                    [torch.empty(shape, dtype=stack.dtype, device=stack.device) for _ in range(geometry.layers)]
                    for shape in shapes
                )
        except (RuntimeError, MemoryError) as error:  # torch's OutOfMemoryError is a RuntimeError
            raise ModelError(
                f"a pool of {num_slots} tokens does not fit on {stack.device}; use a smaller one"
            ) from error

    def write(self, at: int, position: int, layers: Sequence[LayerKV]) -> None:
        """Copy un-rotated K and V, [kv_heads, n, head_dim] a layer, to the slots from `at` on."""
        end = at + layers[0][0].shape[1]
        for layer, parts in enumerate(layers):
            key, value = self.stack.by_rotation(*parts)
            self.raw[layer][:, at:end], self.values[layer][:, at:end] = key, value
        move = Move(at, at, position, end - at)
        self._rotate([move], self._tables([move]))

    @torch.inference_mode()
    def save(self, at: int, blocks: int, length: int) -> list[Tensor]:
        """Copy consecutive blocks of `length` slots to host memory, each to bytes of its own, which `load` takes.

        The host does not wait: copies from there on the current stream come later.
        """
        whole = torch.cat(
            [
                torch.stack([tensor[:, at : at + blocks * length] for tensor in kind])
                .view(len(kind), -1, blocks, length, kind[0].shape[2]).movedim(2, 0).flatten(1)
                for kind in self._kinds
            ], 1,
        ).view(torch.uint8)  # fmt: skip
        saved = [streams.host_buffer(whole.shape[1], self.stack.device) for _ in range(blocks)]
        for buffer, block in zip(saved, whole, strict=True):
            buffer.copy_(block, non_blocking=True)
        return saved

    @torch.inference_mode()
    def load(self, blocks: Sequence[Tensor], length: int, image: Image, position: int) -> None:
        """Copy saved blocks to an image, from a position on; to one in this pool also keys as they were before RoPE."""
        whole = torch.empty(len(blocks), len(blocks[0]), dtype=torch.uint8, device=self.stack.device)
        for row, block in zip(whole, blocks, strict=True):
            row.copy_(block, non_blocking=True)
        shapes = [(len(kind), kind[0].shape[0], length, kind[0].shape[2]) for kind in self._kinds]
        parts = torch.split(whole.view(self.stack.dtype), [*map(math.prod, shapes)], 1)
        kinds = [part.view(len(blocks), *shape) for part, shape in zip(parts, shapes, strict=True)]
        for layer in range(len(self.keys)):
            key, value, *raw = (kind[:, layer].movedim(0, 1).flatten(1, 2) for kind in kinds)
            image.fill(layer, position, *self.stack.by_rotation(key, value))
            if raw and isinstance(image, PooledImage):
                places = image.places(layer, position, position + key.shape[1])
                self.stack.by_rotation(*places)[0].copy_(raw[0])

    @property
    def _kinds(self) -> list[list[Tensor]]:
        return [self.keys, self.values, *([self.raw] if self.keeps_raw else [])]

    def clear(self) -> None:
        """Zero all slots."""
        for tensor in (*self.raw, *self.keys, *self.values):
            tensor.zero_()

    def read(self, layer: int, at: int, length: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of slots, [kv_heads, length, head_dim]."""
        return self.stack.by_rotation(self.keys[layer][:, at : at + length], self.values[layer][:, at : at + length])

    def reposition(
        self, moves: Sequence[Move], batch: int | None = None, tables: RotaryTables | None = None
    ) -> Repositioning:
        """Move runs at once: afterwards each target holds what its source held, rotated to the move's position.

        Args:
            batch: slots that are moved together; the buffer holds so many of one layer. None: all at once.
            tables: RoPE tables from position 0 on; None: they are made.
        """
        made = plan(moves, batch or self.num_slots)
        if not made.batches:
            return Repositioning()
        tables = self._tables(moves) if tables is None else tables
        synchronize(self.stack.device)
        started = time.perf_counter()
        self._run(made, tables)
        synchronize(self.stack.device)
        seconds = max(time.perf_counter() - started, 1e-9)
        raw, keys, values = (tensors[0][:, :1].nbytes for tensors in (self.raw, self.keys, self.values))  # of a slot
        buffered, saved = made.buffer * max(raw, values), made.scratch * len(self.raw) * (raw + keys + values)
        return Repositioning(
            made.num_moves, made.num_slots, len(made.batches), made.duplicates, made.scratch, made.buffer,
            buffered + saved, seconds,
        )  # fmt: skip

    def _tables(self, moves: Iterable[Move]) -> RotaryTables:
        """RoPE tables of all positions that moves need."""
        return self.tables(max((move.position + move.length for move in moves if move.position is not None), default=1))

    def tables(self, length: int) -> RotaryTables:
        """RoPE tables of the first positions; those of the longest prompt are kept."""
        if self._longest is None or len(self._longest.positions) < length:
            self._longest = self.stack.rotary_tables(torch.arange(length + GROWTH, device=self.stack.device))
        return tables_at(self._longest, slice(0, length))

    @torch.inference_mode()
    def _run(self, made: MovePlan, tables: RotaryTables) -> None:
        for batch in made.batches:
            carried = [move for move in batch if move.source != move.target]
            sources, targets = self._slots(carried, "source"), self._slots(carried, "target")
            for tensor in (*self.raw, *self.values) if carried else ():
                held = [tensor[:, source].clone() for source in sources]
                for target, part in zip(targets, held, strict=True):
                    tensor[:, target] = part
            self._carry_rotated([move for move in carried if move.position is None])
            self._rotate([move for move in batch if move.position is not None], tables)

    def _carry_rotated(self, moves: Sequence[Move]) -> None:
        """Move the rotated keys of moves that do not rotate: their position stays the same, or is of no use."""
        sources, targets = (self._slots(moves, end) if moves else [] for end in ("source", "target"))
        for tensor in self.keys if moves else ():
            held = [tensor[:, source].clone() for source in sources]
            for target, part in zip(targets, held, strict=True):
                tensor[:, target] = part

    def _rotate(self, moves: Sequence[Move], tables: RotaryTables) -> None:
        """Rotate the raw keys at the moves' targets to their positions."""
        if not moves:
            return
        targets = self._slots(moves, "target")
        if isinstance(targets[0], slice):
            move_tables = [tables_at(tables, slice(m.position or 0, (m.position or 0) + m.length)) for m in moves]
        else:
            positions = [torch.arange(move.length) + (move.position or 0) for move in moves]
            move_tables = [tables_at(tables, torch.cat(positions).to(self.stack.device))]
        for layer, (raw, keys) in enumerate(zip(self.raw, self.keys, strict=True)):
            for at, table in zip(targets, move_tables, strict=True):
                keys[:, at] = self.stack.rotate(raw[None, :, at], table, layer)[0]

    def _slots(self, moves: Sequence[Move], end: str) -> list[slice | Tensor]:
        """The slots of the moves' sources or targets: a slice for each, or one index of all."""
        places = [(getattr(move, end), move.length) for move in moves]
        spans = [(self.num_slots if at == SCRATCH else at, length) for at, length in places]
        if sum(length for _, length in spans) >= _LONG_RUN * len(spans):
            return [slice(at, at + length) for at, length in spans]
        return [torch.cat([torch.arange(at, at + length) for at, length in spans]).to(self.stack.device)]


class PooledImage(Image):
    """An image in the slots of a pool from `base` on, of which it has `GROWTH` more than its prompt has tokens.

    Its buffers are the pool's own until decoding has filled them, and `grow` does not give it `GROWTH` slots more; from
    then on its own.

    Args:
        documents: spans [start, end) of the prompt whose rows are to be restored.
        saved: gets what is overwritten of them.
        appended: gets the tokens after the prompt whose KV is in the pool.
    """

    def __init__(
        self, pool: Pool, layout: Layout, base: int, documents: Sequence[tuple[int, int]], saved: list[SavedRows],
        appended: list[int], grow: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._pool, self._base, self._saved, self._appended, self._grow = pool, base, saved, appended, grow
        self._room = layout.num_tokens + GROWTH
        self._documents = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for start, end in documents:
            self._documents[start:end] = True
        self._documents = self._documents.to(pool.stack.device)
        self._has_documents, self._is_pooled = bool(documents), True
        self._first = min((start for start, _ in documents), default=None)
        self._last_slots: tuple[Rows, Tensor] | None = None
        super().__init__(pool.stack, layout)

    @property
    def tables(self) -> RotaryTables:
        """RoPE tables of the prompt's positions."""
        return self._tables

    def _all_tables(self) -> RotaryTables:
        return self._pool.tables(self.num_tokens)

    def _buffers(self, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        at, pool = slice(self._base, self._base + tokens), self._pool
        pairs = [
            pool.stack.by_rotation(keys[None, :, at], values[None, :, at])
            for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        return [first for first, _ in pairs], [second for _, second in pairs]

    def places(self, layer: int, start: int, end: int) -> LayerKV:
        at = slice(self._base + start, self._base + end)
        return self.stack.by_rotation(self._pool.raw[layer][:, at], self._pool.values[layer][:, at])

    def relocate(self, layer: int, start: int, end: int) -> None:
        raw = self._pool.raw[layer][None, :, self._base + start : self._base + end]
        keys = self.stack.by_rotation(self._keys[layer], self._values[layer])[0]
        keys[:, :, start:end] = self.stack.rotate(raw, tables_at(self._tables, slice(start, end)), layer)

    @property
    def keeps_keys(self) -> bool:
        return super().keeps_keys or (self._pool.keeps_raw and self._is_pooled)

    def take_fresh(self, layer: int, key: Tensor, rows: Rows) -> None:
        super().take_fresh(layer, key, rows)
        for run in rows.runs if self._pool.keeps_raw and self._is_pooled else ():
            end = run.end if self._first is None else min(run.end, self._first)
            if run.start < end:
                at = slice(self._base + run.start, self._base + end)
                self._pool.raw[layer][:, at] = key[0, :, run.row : run.row + end - run.start]

    @property
    def raw_tokens(self) -> list[int]:
        """The tokens whose KV `raw` gives, of a pool that keeps raw keys."""
        return [*self.layout.tokens.tolist(), *self._appended][: self._first]

    def raw(self, layer: int, start: int, end: int) -> LayerKV:
        """Un-rotated K and V of positions [start, end), [kv_heads, n, head_dim]."""
        at = slice(self._base + start, self._base + end)
        return self.stack.by_rotation(self._pool.raw[layer][:, at], self._pool.values[layer][:, at])

    def save(self, layer: int, rows: Rows) -> None:
        """Save what documents have at rows, which is about to be overwritten."""
        if self._has_documents and (count := rows.before(self.layout.num_tokens)):
            at = self._in_documents(rows, count)
            self._saved.append(SavedRows(layer, at, self._pool.keys[layer][:, at], self._pool.values[layer][:, at]))

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Rows) -> None:
        self.save(layer, rows)
        super().write(layer, key, value, rows)

    def _in_documents(self, rows: Rows, count: int) -> Tensor:
        """The slots of those of the first `count` rows that are in documents; mostly the same as at the layer before.

        The device is waited for.
        """
        if self._last_slots is None or self._last_slots[0] is not rows:
            positions = rows.positions[:count]
            self._last_slots = rows, positions[self._documents[positions]] + self._base
        return self._last_slots[1]

    def append(self, token: int, on_scores: Callable[[Tensor], None] | None = None) -> Tensor:
        if self._is_pooled:
            del self._appended[self.num_tokens - self.layout.num_tokens :]
        logits = super().append(token, on_scores)
        if self._is_pooled:
            self._appended.append(token)
        return logits

    def _require_room(self) -> None:
        if self._is_pooled and self.num_tokens > self._room:
            self._is_pooled = self._grow()
            if self._is_pooled:
                self._room += GROWTH
                self._keys, self._values = self._buffers(self._room)
        super()._require_room()


@dataclass(frozen=True)
class SavedRows:
    """Rotated keys and values of slots `at`, [kv_heads, rows, head_dim], as they were before a link wrote there."""

    layer: int
    at: Tensor  # int64 [rows]
    keys: Tensor
    values: Tensor


def copy_rows(pool: Pool, image: Image, slot: int, position: int, length: int) -> None:
    """Copy rotated keys, and values, of slots to positions of an image that is not in the pool."""
    for layer in range(pool.stack.num_layers):
        image.fill(layer, position, *pool.read(layer, slot, length))


def restore(pool: Pool, saved: Sequence[SavedRows]) -> None:
    """Undo what links wrote, the last first."""
    for part in reversed(saved):
        pool.keys[part.layer][:, part.at] = part.keys
        pool.values[part.layer][:, part.at] = part.values


def require_movable(model: Model) -> None:
    """Raise ModelError for a model whose keys are rotated by the prompt's length, and for a hybrid."""
    model.require_no_states("a pool")
    if depends_on_length(model.config):
        raise ModelError(f"{model.name}: its RoPE depends on the prompt's length, so keys cannot be moved in a pool")


def slot_bytes(model: Model) -> int:
    """Bytes of a slot."""
    geometry = model.geometry
    rotated = sum(part.heads * part.width for part in geometry.parts if part.rotated)
    return (geometry.width + rotated) * geometry.layers * model.torch_dtype.itemsize


def default_pool_bytes(model: Model) -> int:
    """A quarter of the device's memory, half of what is free of it, or 16 prompts of all positions, what is least.

    0 for a model whose keys cannot be moved, and where there is no room for a prompt.
    """
    if depends_on_length(model.config) or model.geometry.states is not None:
        return 0
    on_device, whole = device_memory(model.device), memory_bytes()
    free, whole = on_device if on_device is not None else (whole, whole)
    bound = _MOST_CONTEXTS * (model.max_positions + GROWTH) * slot_bytes(model)
    size = bound if free is None or whole is None else min(bound, whole // 4, free // 2)
    return size if size > GROWTH * slot_bytes(model) else 0
