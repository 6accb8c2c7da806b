"""Layers of a model on so many rows, as steps that are replayed for any link that computes as many, or fewer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pictool.runtime.attention import RowsKernel, StaticRows
from pictool.runtime.graphs.buffers import Numbers, Slab, SlabCache, StaticTables
from pictool.runtime.graphs.recorder import StaticStep
from pictool.runtime.memory.caches import Projected
from pictool.runtime.rope import tables_at
from pictool.runtime.stack import LayerStack

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_ROWS = 4096  # more are bound by arithmetic
_MOST_MASKED = 1 << 27  # rows × keys of a mask


def bucket_rows(count: int) -> int:
    """The rows of the bucket for `count` of them: a step apart, which is longer where there are more."""
    if count == 1:
        return 1
    step = 16 if count <= 128 else 64 if count <= 512 else 128
    return -(-count // step) * step


def bucket_tokens(count: int, capacity: int) -> int:
    """The tokens of the bucket for `count` of them, so many that a fifth at most is not needed; but few for few."""
    step = max(1024, (1 << (count - 1).bit_length()) >> 3)
    return min(capacity, -(-count // step) * step)


def is_bucket(rows: int, num_keys: int, kernel: RowsKernel | None) -> bool:
    """Whether there is such a bucket; larger ones are computed without static tensors."""
    return rows <= MOST_ROWS and (kernel is not None or rows * num_keys <= _MOST_MASKED)


class RowBucket:
    """The layers on `rows` rows, over the first `num_keys` slots of a slab. The last row is the prompt's last.

    Where a link computes fewer rows, the others come before them: they are all alike, and write to the slot that nobody
    reads.

    Attributes:
        hidden: [1, rows, hidden], what the next layer runs on. logits: float32 [vocab], of the last row.
        num_uses: how often its rows were set.
    """

    @torch.inference_mode(False)
    def __init__(self, stack: LayerStack, slab: Slab, rows: int, num_keys: int, kernel: RowsKernel | None) -> None:
        self._stack, self._slab, self.rows, self._num_keys = stack, slab, rows, num_keys
        self._numbers = Numbers(3, rows, stack.device)
        self._tokens, self._positions, self._slots = self._numbers.tensor
        self._runs = StaticRows(self._positions, num_keys, {}, kernel)
        self._static = StaticTables(slab, self._positions)
        self.hidden = stack.embed(self._tokens[None]).clone()
        self.logits = stack.logits(self.hidden[0, -1:])[0].clone()
        self.last = self.hidden[:, -1:]
        self._of_count: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_uses, self._num_masks = 0, 0
        self._begin, self._aim = StaticStep(self._run_begin, self._aimed), StaticStep(self._run_aim, self._aimed)
        layers, end = range(stack.num_layers), stack.num_layers - 1
        # A layer runs on `hidden`, which it replaces; of the last one only the last row goes on, and to the logits.
        self.layers = [StaticStep(partial(self._run_layer, layer), partial(self._computed, layer)) for layer in layers]
        self.last_layer = StaticStep(self._run_last, lambda: [*self._computed(end), self.logits])

    @property
    def steps(self) -> list[StaticStep]:
        return [self._begin, self._aim, *self.layers, self.last_layer]

    def send(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> StaticStep:
        """Set the rows, which begin with their tokens; returns the step to run."""
        pad, host = self.rows - len(positions), self._numbers.host
        self._numbers.wait()
        for own, given in zip(host, (tokens, positions, positions), strict=True):
            own[:pad], own[pad:] = given[0], given
        host[2, :pad] = self._slab.capacity
        self._numbers.send()
        return self._with_masks(self._begin)

    def enter(self, positions: Tensor, hidden: Tensor) -> StaticStep:
        """Set the rows, which other layers computed before: `hidden` [1, n, hidden]; returns the step to run."""
        pad = self.rows - len(positions)
        for own in (self._positions, self._slots):
            own[pad:].copy_(positions)
            own[:pad].copy_(positions[:1])
        self._slots[:pad] = self._slab.capacity
        self.hidden[:, pad:].copy_(hidden)
        self.hidden[:, :pad].copy_(hidden[:, :1])
        return self._with_masks(self._aim)

    def last_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """The positions [count] and the hidden states [1, count, hidden] of so many rows; they change with the rows."""
        if count not in self._of_count:
            pad = self.rows - count
            self._of_count[count] = self._positions[pad:], self.hidden[:, pad:]
        return self._of_count[count]

    def _with_masks(self, step: StaticStep) -> StaticStep:
        """A step that writes all masks: layers may have added some since it was recorded."""
        self.num_uses += 1
        if len(self._runs.masks) != self._num_masks:
            self._num_masks = len(self._runs.masks)
            self._begin.forget()
            self._aim.forget()
        return step

    def _aimed(self) -> Sequence[Tensor]:
        return [self.hidden, *self._static.tables.parts(), *self._runs.masks.values()]

    def _computed(self, layer: int) -> Sequence[Tensor]:
        return [self.hidden, *(part[layer][:, :, : self._num_keys] for part in (self._slab.keys, self._slab.values))]

    def _run_begin(self) -> None:
        self.hidden.copy_(self._stack.embed(self._tokens[None]))
        self._run_aim()

    def _run_aim(self) -> None:
        self._static.take()
        if self._runs.kernel is None:
            self._runs.write_masks()

    def _run_layer(self, layer: int) -> None:
        cache = SlabCache(self._slab, self._slots, self._num_keys)
        self.hidden.copy_(self._stack.layer(layer, self.hidden, cache, self._static.tables, self._runs))

    def _run_last(self) -> None:
        stack, tables, layer = self._stack, self._static.tables, self._stack.num_layers - 1
        if self.rows == 1:
            self._run_layer(layer)
        else:
            with suppress(Projected):
                stack.layer(layer, self.hidden, SlabCache(self._slab, self._slots), tables, self._runs)
            cache, own = SlabCache(self._slab, None, self._num_keys), tables_at(tables, slice(-1, None))
            self.last.copy_(stack.layer(layer, self.last, cache, own, self._runs))
        self.logits.copy_(stack.logits(self.last[0])[0])
