"""A pool of KV blocks on the device, whose keys are rotated to the positions where they are in use (Span queries §5.5).

CIDRA's moves run here, in place: a batch is gathered, its keys are rotated from their old positions to the new ones,
and it is scattered, for all layers at once. Several requests' moves are one plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pictool.errors import ModelError
from pictool.runtime.device import synchronize
from pictool.runtime.rope import RotaryTables
from pictool.runtime.support import depends_on_length
from pictool.spans.cidra import SCRATCH, Move, Plan, plan

if TYPE_CHECKING:
    from pictool.runtime.caches import LayerKV
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Repositioning:
    """What one round of moves took. `seconds` are those of the device."""

    moves: int
    tokens: int
    batches: int
    duplicates: int
    scratch: int
    seconds: float

    @property
    def tokens_per_ms(self) -> float:
        return self.tokens / self.seconds / 1e3


class PagedPool:
    """Blocks of KV of one model. A block's keys are rotated to `position`, `position` + 1, … of its tokens.

    Args:
        num_blocks: that it holds, beside one for scratch.
        block: tokens of a block.

    Raises:
        ModelError: a RoPE whose frequencies depend on the prompt's length: keys cannot be moved from one to another.
    """

    def __init__(self, model: Model, num_blocks: int, block: int) -> None:
        if depends_on_length(model.config):
            raise ModelError(
                f"{model.name}: its RoPE depends on the prompt's length, so keys cannot be moved in a pool"
            )
        self._stack, self.num_blocks, self.block = model.stack, num_blocks, block
        geometry, stack = model.geometry, model.stack
        shape = (geometry.layers, num_blocks + 1, geometry.kv_heads, block, geometry.head_dim)  # the last is scratch
        self._keys = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self._values = torch.zeros(shape, dtype=stack.dtype, device=stack.device)

    def write(self, at: int, position: int, layers: Sequence[LayerKV]) -> None:
        """Copy `block` tokens' un-rotated K and V, [kv_heads, block, head_dim] a layer, to the block `at`."""
        tables = self._stack.rotary_tables(torch.arange(position, position + self.block, device=self._stack.device))
        for layer, (key, value) in enumerate(layers):
            self._keys[layer, at] = self._stack.rotate(key[None], tables, layer)[0]
            self._values[layer, at] = value

    def read(self, layer: int, at: int) -> tuple[Tensor, Tensor]:
        """Rotated keys and the values of a block, [kv_heads, block, head_dim]."""
        return self._keys[layer, at], self._values[layer, at]

    def reposition(self, moves: Iterable[Move], batch: int) -> Repositioning:
        """Move blocks at once: afterwards each target holds what its source held, rotated by the move's shift.

        Args:
            batch: blocks that are moved together; the buffer holds so many.
        """
        made = plan(moves, batch)
        synchronize(self._keys.device)
        started = time.perf_counter()
        self._run(made)
        synchronize(self._keys.device)
        seconds = time.perf_counter() - started
        tokens = made.num_moves * self.block
        return Repositioning(
            made.num_moves, tokens, len(made.batches), made.duplicates, made.scratch, max(seconds, 1e-9)
        )  # fmt: skip

    @torch.inference_mode()
    def _run(self, made: Plan) -> None:
        for batch in made.batches:
            # The scratch block is the last one, so that SCRATCH, -1, is its index.
            assert SCRATCH == -1
            sources = torch.tensor([move.source % (self.num_blocks + 1) for move in batch], device=self._keys.device)
            targets = torch.tensor([move.target % (self.num_blocks + 1) for move in batch], device=self._keys.device)
            keys, values = self._keys[:, sources], self._values[:, sources]
            if any(move.shift for move in batch):
                keys = self._rotated(keys, [move.shift for move in batch])
            self._keys[:, targets], self._values[:, targets] = keys, values

    def _rotated(self, keys: Tensor, shifts: Sequence[int]) -> Tensor:
        """Keys [layers, moves, kv_heads, block, head_dim], each move's rotated by its shift."""
        layers, moves, heads, block, dim = keys.shape
        tables = self._shift_tables(shifts)
        flat = keys.transpose(1, 2).reshape(layers, heads, moves * block, dim)
        if len(tables) == 1:  # all layers have the same frequencies
            rotated = self._stack.rotate(flat, tables, 0)
        else:
            rotated = torch.cat([self._stack.rotate(flat[at : at + 1], tables, at) for at in range(layers)])
        return rotated.view(layers, heads, moves, block, dim).transpose(1, 2)

    def _shift_tables(self, shifts: Sequence[int]) -> RotaryTables:
        """Tables that rotate by differences of positions: without the factor that scaled RoPE puts into its tables."""
        device = self._keys.device
        distances = torch.tensor([0, *map(abs, shifts)], device=device)
        signs = torch.tensor([-1 if shift < 0 else 1 for shift in shifts], device=device).view(1, -1, 1)
        tables: RotaryTables = {}
        for kind, (cos, sin) in self._stack.rotary_tables(distances).items():
            scale = cos[:, :1]  # of position 0, where the cosine is 1
            cos, sin = cos[:, 1:] / scale, sin[:, 1:] / scale * signs
            tables[kind] = cos.repeat_interleave(self.block, 1), sin.repeat_interleave(self.block, 1)
        return tables
