"""A model's layers on an accelerator as steps over static tensors: its slab, and buckets of rows and of tokens."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from pictool.runtime.device import synchronize
from pictool.runtime.graphs.buffers import Slab, Staging
from pictool.runtime.graphs.kernels import Kernels, kernels_of
from pictool.runtime.graphs.placing import Placing
from pictool.runtime.graphs.recorder import Recorder, StaticStep, is_on, recorder_of
from pictool.runtime.graphs.rows import RowBucket, bucket_rows, bucket_tokens, is_bucket
from pictool.runtime.memory import streams
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.staged import StagedPart
from pictool.runtime.stack import LayerStack

MOST_BUCKETS = 16  # of rows, and as many of tokens; the least recently used is dropped
_log = logging.getLogger("pictool")
Bucket = TypeVar("Bucket", RowBucket, Placing)
Key = TypeVar("Key", bound=Hashable)


class Owner(Protocol):
    """The image that is in a slab."""

    is_linking: bool

    def leave(self) -> None: ...


class GraphedStack:
    """The layers of one model on one device.

    Args:
        recorder: records steps of a bucket when that is used again; None: each operation is launched anew.

    Attributes:
        problem: why nothing is recorded any more; None: all is well.
        owner: the image that is in the slab. lock: of who gives it to another one, or computes in one that is linked.
    """

    def __init__(self, stack: LayerStack, recorder: Recorder | None, kernels: Kernels = Kernels()) -> None:
        self.stack, self.recorder, self._kernels = stack, recorder, kernels
        self.problem: str | None = None
        self.lock = threading.RLock()
        self._slab: Slab | None = None
        self._too_many: float = math.inf  # tokens
        self._stagings = dict[bool, Staging]()  # of coded layers, and of others
        self._rows, self._placings = OrderedDict[tuple[int, int], RowBucket](), OrderedDict[tuple[int, bool], Placing]()
        self.owner: weakref.ref[Owner] | None = None
        self._streams: tuple[torch.Stream, torch.Stream] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no image is in the slab."""
        return self.owner is None or self.owner() is None

    @property
    def num_recorded(self) -> int:
        """Steps that are recorded."""
        return sum(step.is_recorded for step in self._steps())

    def free_slab(self, num_tokens: int) -> Slab | None:
        """The slab for a prompt of so many tokens, once what is there has left.

        None: that is still being computed, or there was no room for so many, for it may be twice as large.
        """
        owner = None if self.owner is None else self.owner()
        if num_tokens >= self._too_many or (owner is not None and owner.is_linking):
            return None
        if owner is not None:
            owner.leave()
        if self._slab is None or self._slab.capacity < num_tokens + GROWTH:
            synchronize(self.stack.device)
            self._rows.clear()
            self._placings.clear()
            self._slab = None  # its memory is used again
            try:
                self._slab = Slab(self.stack, 1 << (num_tokens + GROWTH - 1).bit_length())
            except torch.OutOfMemoryError:
                self._too_many = num_tokens
        return self._slab

    def rows(self, count: int, num_tokens: int) -> RowBucket | None:
        """The bucket for `count` rows of prompts of so many tokens; None: they are too many."""
        slab, kernel = self._slab, self._kernels.attend
        assert slab is not None
        rows = bucket_rows(count)
        num_keys = slab.capacity if kernel is not None else bucket_tokens(num_tokens, slab.capacity)
        if not is_bucket(rows, num_keys, kernel):
            return None
        return self._bucket(self._rows, (rows, num_keys), lambda: RowBucket(self.stack, slab, rows, num_keys, kernel))

    @property
    def places_codes(self) -> bool:
        """Whether coded layers are widened as they are placed; their scales begin at a multiple of 4."""
        return self._kernels.place is not None and self.stack.geometry.width % 4 == 0

    def placing(self, parts: Sequence[StagedPart]) -> Placing:
        """What places parts that are all coded, or all not."""
        slab, is_coded = self._slab, parts[0].is_coded
        assert slab is not None
        num_staged = sum(part.num_tokens for part in parts)
        if is_coded not in self._stagings or self._stagings[is_coded].num_tokens < num_staged:
            synchronize(self.stack.device)
            self._placings.clear()
            self._stagings[is_coded] = Staging(self.stack, 1 << (num_staged - 1).bit_length())
        tokens = bucket_tokens(sum(part.end - part.first for part in parts), slab.capacity)
        staging, kernel = self._stagings[is_coded], self._kernels.place
        make = lambda: Placing(self.stack, slab, staging, tokens, is_coded, kernel)  # noqa: E731
        return self._bucket(self._placings, (tokens, is_coded), make)

    def streams(self) -> tuple[torch.Stream, torch.Stream]:
        """The streams that copy layers, and that put them to their places, after all that is queued so far."""
        now, device = streams.event_now(self.stack.device), self.stack.device
        assert now is not None
        self._streams = self._streams or (streams.side_stream(device, now), streams.side_stream(device, now))
        for stream in self._streams:
            stream.wait_event(now)
        return self._streams

    def run(self, step: StaticStep, bucket: RowBucket | Placing) -> None:
        """Run a step of a bucket; it is recorded once its bucket is used again."""
        if self.recorder is None or step.is_recorded or bucket.num_uses < 2:
            step()
        elif error := step.record(self.recorder):
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Record nothing any more, and replay nothing that was recorded."""
        self.recorder, self.problem = None, f"{type(error).__name__}: {error}"
        for step in self._steps():
            step.forget()
        _log.warning("links continue without graphs, since a step cannot be recorded (%s)", self.problem)

    def _steps(self) -> Iterator[StaticStep]:
        buckets: list[RowBucket | Placing] = [*self._rows.values(), *self._placings.values()]
        for bucket in buckets:
            yield from bucket.steps

    def _bucket(self, buckets: OrderedDict[Key, Bucket], key: Key, make: Callable[[], Bucket]) -> Bucket:
        if key not in buckets:
            if len(buckets) >= MOST_BUCKETS:
                synchronize(self.stack.device)  # streams may still use it
                buckets.popitem(last=False)
            buckets[key] = make()
        buckets.move_to_end(key)
        return buckets[key]


def graphs_of(stack: LayerStack) -> GraphedStack | None:
    """The layers of a model as steps; None on a CPU, of a hybrid, and where they are turned off."""
    if stack.graphs is None and stack.geometry.states is None and is_on(stack.device):
        stack.graphs = GraphedStack(stack, recorder_of(stack.device), kernels_of(stack))
    graphs: GraphedStack | None = stack.graphs
    return graphs
