"""An image in static tensors, whose layers are steps that are replayed for any link (`stack.py`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.core import Layout, RowMask
from pictool.runtime.graphs.buffers import NUM_STAGED, Slab
from pictool.runtime.graphs.placing import Placing
from pictool.runtime.graphs.recorder import StaticStep
from pictool.runtime.graphs.rows import RowBucket
from pictool.runtime.graphs.stack import GraphedStack, graphs_of
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import PooledImage
from pictool.runtime.memory.staged import StagedPart
from pictool.runtime.rope import RotaryTables
from pictool.runtime.rows import Rows, runs_of
from pictool.runtime.stack import LayerStack


def new_image(stack: LayerStack, layout: Layout) -> Image:
    """An image for a link: on an accelerator one in static tensors, if no other link is computed there."""
    if (graphs := graphs_of(stack)) is None:
        return Image(stack, layout)
    with graphs.lock:
        if (slab := graphs.free_slab(layout.num_tokens)) is None:
            return Image(stack, layout)
        image = StaticImage(stack, slab, layout)
        graphs.owner = weakref.ref(image)
        return image


def pooled_image_type(stack: LayerStack) -> type[PooledImage]:
    """What an image in a pool is: on an accelerator one whose rows are computed in static tensors."""
    return PooledImage if graphs_of(stack) is None else StaticPooledImage


class SteppedImage(Image):
    """An image whose layers are steps while it has a slab.

    What has no step (scores, keys that are kept, very many rows) is computed as in any image.

    Attributes:
        is_linking: whether its prompt is being computed. Until then, no other link gets the slab.
    """

    _slab: Slab | None = None
    is_linking = False
    # Of the last pass by steps: its rows, their bucket, and the hidden states that it returned.
    _entered: tuple[Rows, RowBucket] | None = None
    _hidden: Tensor | None = None

    @cached_property
    def _graphs(self) -> GraphedStack:
        graphs = graphs_of(self.stack)
        assert graphs is not None
        return graphs

    def leave(self) -> None:
        """Go on without the slab."""
        self._slab = self._entered = self._hidden = None

    def begin(self, on: RowMask) -> tuple[Rows, Tensor]:
        at: NDArray[np.int64] = np.flatnonzero(on)
        if (bucket := self._bucket(len(at))) is None:
            return super().begin(on)
        self._graphs.run(bucket.send(self.layout.tokens[at].astype(np.int64), at), bucket)
        positions, self._hidden = bucket.last_rows(len(at))
        rows = Rows(positions, runs_of(at))
        self._entered = rows, bucket
        return rows, self._hidden

    def compute(
        self, layer: int, hidden: Tensor, rows: Rows, on_scores: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        bucket = None if on_scores is not None else self._enter(hidden, rows)
        if bucket is None:
            return super().compute(layer, hidden, rows, on_scores)
        self._run(layer, bucket.layers[layer], bucket, rows)
        assert self._hidden is not None
        return self._hidden

    def compute_last(self, hidden: Tensor, rows: Rows) -> Tensor:
        bucket = self._enter(hidden, rows)
        if bucket is None:
            return super().compute_last(hidden, rows)
        self._run(len(bucket.layers) - 1, bucket.last_layer, bucket, rows)
        self._hidden = bucket.last
        return self._hidden

    def finish(self, hidden: Tensor) -> None:
        self.is_linking = False
        if self._entered is None or hidden is not self._hidden:
            super().finish(hidden)
        else:
            self.logits = self._entered[1].logits.clone()

    def append(self, token: int, on_scores: Callable[[Tensor], None] | None = None) -> Tensor:
        at = self.num_tokens
        with self._graphs.lock:
            bucket = None if on_scores is not None else self._bucket(1, at + 1)
            if bucket is None:
                return super().append(token, on_scores)
            assert self._slab is not None
            self._slab.rotate_for(at, at + 1)
            self._entered = self._hidden = None
            self._graphs.run(bucket.send(np.array([token]), np.array([at])), bucket)
            for step in (*bucket.layers[:-1], bucket.last_layer):
                self._graphs.run(step, bucket)
            self.num_tokens += 1
            self._require_room()
            return bucket.logits.clone()

    def _run(self, layer: int, step: StaticStep, bucket: RowBucket, rows: Rows) -> None:
        """Run a layer's step."""
        self._graphs.run(step, bucket)

    def _bucket(self, count: int, num_tokens: int | None = None) -> RowBucket | None:
        """The bucket for `count` rows; None: these are computed as in any image. All rows are: they are the model's."""
        num_tokens = num_tokens or self.num_tokens
        is_in = self._slab is not None and num_tokens <= self._slab.capacity
        return self._graphs.rows(count, num_tokens) if is_in and not self.keeps_keys and count < num_tokens else None

    def _enter(self, hidden: Tensor, rows: Rows) -> RowBucket | None:
        """The bucket of rows, which holds their hidden states; None: they have none."""
        if self._entered is not None and rows is self._entered[0]:
            assert hidden is self._hidden, "other rows took the place of these hidden states"
            return self._entered[1]
        if (bucket := self._bucket(len(rows.positions))) is not None:
            self._graphs.run(bucket.enter(rows.positions, hidden), bucket)
            self._entered, (_, self._hidden) = (rows, bucket), bucket.last_rows(len(rows.positions))
        return bucket


class StaticImage(SteppedImage):
    """An image in a slab, until another link needs that: then it moves to buffers of its own, and is as any other.

    What `key` and `value` returned are views of the slab: read them again after another link.
    """

    def __init__(self, stack: LayerStack, slab: Slab, layout: Layout) -> None:
        self._slab, self.is_linking = slab, True
        super().__init__(stack, layout)

    def _all_tables(self) -> RotaryTables:
        assert self._slab is not None
        self._slab.rotate_for(0, self.num_tokens)
        return self._slab.tables

    def _buffers(self, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        assert self._slab is not None
        return self._slab.prompt

    def leave(self) -> None:
        """Move to buffers of its own."""
        super().leave()
        self._tables = super()._all_tables()
        self._keys, self._values = (
            [tensor[:, :, : self.num_tokens + GROWTH].clone() for tensor in part] for part in (self._keys, self._values)
        )

    def stage(self, parts: Sequence[StagedPart]) -> SlabLayers | None:
        is_coded = any(part.is_coded for part in parts)
        if self._slab is None or not parts or (is_coded and not self._graphs.places_codes):
            return None
        return SlabLayers(self._graphs, parts)

    def _require_room(self) -> None:
        if self._slab is not None and self.num_tokens > self._slab.capacity:
            self.leave()
        super()._require_room()


class StaticPooledImage(PooledImage, SteppedImage):
    """An image in a pool. Rows are computed in a slab: what the pool holds is copied there, and what is computed back.

    It has the slab from its link on, if no other link is computed there, until another one needs it; and again once
    no image is there.
    """

    _is_new = True
    _num_copied = 0  # tokens whose KV of all layers is in the slab

    def append(self, token: int, on_scores: Callable[[Tensor], None] | None = None) -> Tensor:
        with self._graphs.lock:
            at = self.num_tokens
            is_step = on_scores is None and self._bucket(1, at + 1) is not None
            if is_step and self._num_copied < at:
                self._copy(self._num_copied, at, to_slab=True)
            self._num_copied = min(self._num_copied, at)
            logits = super().append(token, on_scores)
            if is_step:
                self._copy(at, at + 1, to_slab=False)
                self._num_copied = at + 1
            return logits

    def _run(self, layer: int, step: StaticStep, bucket: RowBucket, rows: Rows) -> None:
        assert self._slab is not None
        at, pairs = rows.positions, list(zip(self._slab.of(layer), (self.key(layer), self.value(layer)), strict=True))
        for there, here in pairs:
            there[:, :, : self.num_tokens].copy_(here)
        super()._run(layer, step, bucket, rows)
        self.save(layer, rows)
        for there, here in pairs:
            here.index_copy_(2, at, there.index_select(2, at))

    def _bucket(self, count: int, num_tokens: int | None = None) -> RowBucket | None:
        with self._graphs.lock:
            if self._slab is None and (self._is_new or self._graphs.is_free):
                self._slab, self._num_copied = self._graphs.free_slab(self.num_tokens), 0
                if self._slab is not None:
                    self._graphs.owner, self.is_linking = weakref.ref(self), self.logits is None
            self._is_new = False
        return super()._bucket(count, num_tokens)

    def _copy(self, start: int, end: int, to_slab: bool) -> None:
        """Copy KV of positions [start, end) of all layers to the slab, or back."""
        assert self._slab is not None
        there, here = (
            [tensor[:, :, start:end] for tensor in (*keys, *values)]
            for keys, values in (self._slab.prompt, (self._keys, self._values))
        )
        torch._foreach_copy_(*((there, here) if to_slab else (here, there)))


class SlabLayers:
    """The layers of one prompt's objects on their way to an image, on streams of their own: numbers, and codes."""

    def __init__(self, graphs: GraphedStack, parts: Sequence[StagedPart]) -> None:
        self._graphs = graphs
        indices = [[index for index, part in enumerate(parts) if part.is_coded is kind] for kind in (False, True)]
        kinds = [(index, [parts[part] for part in index]) for index in indices if index]
        placings = [graphs.placing(own) for _, own in kinds]
        self._copies, self._places = graphs.streams()
        # Of each kind: what places it, its slots in each staging, and which of all parts it is.
        self._kinds = list[tuple[Placing, list[tuple[Tensor, ...]], list[int]]]()
        for placing, (index, own) in zip(placings, kinds, strict=True):
            sizes = [placing.object_bytes(part.num_tokens) for part in own]
            sizes.append(placing.staging.num_bytes - sum(sizes))  # not used
            slots = [torch.split(buffer, sizes)[:-1] for buffer in placing.staging.buffers]
            self._kinds.append((placing, slots, index))
            with self._places:
                for step in placing.send(own):
                    graphs.run(step, placing)

    def load(self, layer: int, sources: Sequence[Tensor]) -> torch.Event:
        at = layer % NUM_STAGED
        for placing, slots, index in self._kinds:
            staging = placing.staging
            with self._copies:
                if (placed := staging.placed[at]) is not None:
                    self._copies.wait_event(placed)
                torch._foreach_copy_(slots[at], [sources[part] for part in index], non_blocking=True)
                copied = self._copies.record_event()
            with self._places:
                self._places.wait_event(copied)
                self._graphs.run(placing.layers[layer], placing)
                staging.placed[at] = event = self._places.record_event()
        return event

    def synchronize(self) -> None:
        self._copies.synchronize()
        self._places.synchronize()
