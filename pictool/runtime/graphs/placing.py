"""Objects' layers to their places in a slab: one copy of all to the staging, one step that gathers, rotates, writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pictool.runtime.graphs.buffers import NUM_STAGED, Numbers, Slab, Staging, StaticTables
from pictool.runtime.graphs.recorder import StaticStep
from pictool.runtime.memory.staged import StagedPart
from pictool.runtime.stack import LayerStack


class Placing:
    """The steps that put at most `num_tokens` tokens of staged layers to their places.

    Tokens that are too many are put into the slot that nobody reads.

    Attributes:
        start, token, length: of each token, the piece of `unit` numbers at which its object begins in the staging,
            its index in the object, and the object's tokens. target: its slot.
        index: of each part, the pieces of the staging that it is gathered from; tables: of the slots. A kernel needs
            neither.
        is_coded: whether layers are codes of float8, and the scales of their heads after them.
    """

    @torch.inference_mode(False)
    def __init__(
        self, stack: LayerStack, slab: Slab, staging: Staging, num_tokens: int, is_coded: bool = False,
        kernel: PlaceKernel | None = None,
    ) -> None:  # fmt: skip
        self.stack, self.slab, self.staging, self.num_tokens, self._kernel = stack, slab, staging, num_tokens, kernel
        self._parts = stack.geometry.parts
        self.is_coded, self.unit = is_coded, 1 if is_coded else math.gcd(*(part.width for part in self._parts))
        self._numbers = Numbers(4, num_tokens, stack.device)
        self.start, self.token, self.length, self.target = self._numbers.tensor
        self._static = StaticTables(slab, self.target)
        self.tables = self._static.tables
        self.index, self.num_uses = list[Tensor](), 0
        self.aim: StaticStep | None = None
        if kernel is None:
            self.index = [self.start.new_zeros(part.heads, num_tokens, part.width // self.unit) for part in self._parts]
            self.aim = StaticStep(self._run_aim, lambda: [*self.index, *self.tables.parts()], "place")
        layers = range(stack.num_layers)
        self.layers = [StaticStep(partial(self._run, layer), partial(self._placed, layer), "place") for layer in layers]

    @property
    def steps(self) -> list[StaticStep]:
        return self.layers if self.aim is None else [self.aim, *self.layers]

    def object_bytes(self, num_tokens: int) -> int:
        """What a layer of an object of so many tokens takes of the staging."""
        if self.is_coded:
            return num_tokens * self.stack.geometry.width + 4 * sum(part.heads for part in self._parts)
        return num_tokens * self.stack.geometry.width * self.stack.dtype.itemsize

    def send(self, parts: Sequence[StagedPart]) -> list[StaticStep]:
        """Set what is placed, in the order in which it is staged; returns the steps to run before those of layers."""
        lengths, first, end, start = np.array([(p.num_tokens, p.first, p.end, p.start) for p in parts]).T
        unit_bytes = 1 if self.is_coded else self.unit * self.stack.dtype.itemsize
        pieces = np.array([self.object_bytes(part.num_tokens) // unit_bytes for part in parts])
        counts, host = end - first, self._numbers.host
        count, before = int(counts.sum()), np.cumsum(counts) - counts
        self._numbers.wait()
        index = np.arange(count)
        host[0, :count] = np.repeat(np.cumsum(pieces) - pieces, counts)
        host[1, :count] = np.repeat(first - before, counts) + index
        host[2, :count] = np.repeat(lengths, counts)
        host[3, :count] = np.repeat(start - before, counts) + index
        host[:3, count:], host[3, count:] = 0, self.slab.capacity
        self._numbers.send()
        self.num_uses += 1
        return [] if self.aim is None else [self.aim]

    def _run_aim(self) -> None:
        self._static.take()
        before = 0
        for part, index in zip(self._parts, self.index, strict=True):
            units = part.width // self.unit
            head = torch.arange(part.heads, device=index.device)[:, None] * units + before
            pieces = self.start + self.length * head + self.token * units
            torch.add(pieces[..., None], torch.arange(units, device=index.device), out=index)
            before += part.heads * units

    def _run(self, layer: int) -> None:
        if self._kernel is not None:
            self._kernel(self, layer)
            return
        pieces = self.staging.numbers[layer % NUM_STAGED].view(-1, self.unit)
        first, second = (
            pieces.index_select(0, index.view(-1)).view(1, part.heads, self.num_tokens, part.width)
            for part, index in zip(self._parts, self.index, strict=True)
        )
        self.slab.write(layer, self.target, *self.stack.rotate_parts((first, second), self.tables, layer))

    def _placed(self, layer: int) -> Sequence[Tensor]:
        return [self.slab.keys[layer], self.slab.values[layer]]


PlaceKernel = Callable[[Placing, int], None]  # puts a staged layer to its places
