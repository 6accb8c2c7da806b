"""The pipelined loader: loads the KV of reused chunks into an image, layer by layer, while other layers are computed.

CacheBlend §6 names the interface: `fetch_kv` starts to load a layer, `synchronize` waits until it is in the image;
`prefill_layer` (in `fusor.py`) computes. To load is to read, check, decode, copy and relocate.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from pictool.linker.dequantize import is_quantized, is_widened, read_quantized, unpack, unpacked_bytes, widened
from pictool.runtime.memory import streams
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.staged import StagedLayers, StagedPart
from pictool.runtime.memory.states import StateMap
from pictool.runtime.tensors import from_bytes, to_device
from pictool.store.codecs.base import LayerShape
from pictool.store.memory import LayerMemory
from pictool.store.objects.format import ObjectFile

PREFETCHED_LAYERS = 2  # by one thread, so that most cores are left to compute; on an accelerator all threads' and one
_MOST_THREADS = 12  # on an accelerator, whose cores have little to do: one reads and checks 2.5 GB/s, a bus takes 30
_COPIED_BYTES = 16 << 20  # to an accelerator at a time, of layers that are read: a thread holds two such buffers
# A thread on a CPU takes the cores that compute: it loads once a layer was waited for, work not counted, for longer
# than `PATIENCE_S`. Those of an accelerator load layers of at least `SMALL_LAYER_BYTES`, since to hand a smaller one to
# a thread costs more than to load it, and all that follow one which took longer.
SMALL_LAYER_BYTES = 4 << 20
PATIENCE_S = 0.002


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


def _compute_alone() -> None:
    """Let this thread compute on one core: a second team of OpenMP's would make the caller's wait for its cores."""
    torch.get_num_threads()  # torch sets the number for a thread when it is first asked
    _libraries().limit(limits=1, user_api="openmp")


@dataclass(frozen=True)
class PlacedObject:
    """An object file that is linked at position `start`: `length` of its tokens from `offset` on, or all (-1)."""

    file: ObjectFile
    start: int
    offset: int = 0
    length: int = -1

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of the object are linked."""
        return self.tokens == slice(0, self.file.meta.num_tokens)

    @property
    def tokens(self) -> slice:
        """Which of the object's tokens these are."""
        end = self.file.meta.num_tokens if self.length < 0 else self.offset + self.length
        return slice(self.offset, end)

    @property
    def staged(self) -> StagedPart:
        """The same, for what puts it to its place."""
        tokens = self.tokens
        return StagedPart(self.file.meta.num_tokens, tokens.start, tokens.stop, self.start, is_widened(self.file))

    @property
    def end(self) -> int:
        return self.start + int(self.tokens.stop) - int(self.tokens.start)


@dataclass(frozen=True, eq=False)
class Copy:
    """Another place for a part that a loader loads: position `start` of an image, its own or one that waits for it."""

    part: PlacedObject
    image: Image
    start: int


@dataclass(frozen=True)
class Loads:
    """What is loaded into an image, from layer `first` on; `copies`: where else parts of `placed` go."""

    image: Image
    placed: Sequence[PlacedObject]
    copies: Sequence[Copy] = ()
    first: int = 0


@cache
def _kind_of(codec: str, shape: LayerShape) -> str:
    """How layers are coded, as a text that is quick to compare."""
    return f"{codec} {shape}"


class LoadedObject:
    """An object file as the loader reads it; what its header says is looked up once."""

    def __init__(self, file: ObjectFile) -> None:
        self.file, self.is_quantized, self.is_widened = file, is_quantized(file), is_widened(file)
        self.keeps_codes = False  # in memory, and on their way to the device
        self.checksums, self.layer_bytes, self.dims = (
            file.checksums["layers"], file.layer_bytes, file.meta.shape.part_dims
        )  # fmt: skip
        self.count = sum(map(math.prod, self.dims))  # of numbers
        self.held_bytes = self.layer_bytes
        self._kind = _kind_of(file.meta.codec, file.meta.shape)

    def keep_codes(self) -> None:
        """Keep the codes of what an accelerator widens."""
        if self.is_widened:
            self.keeps_codes, self.held_bytes = True, unpacked_bytes(self.file)

    def decoded_content(self, layer: int, is_pinned: bool) -> Hashable:
        """What says how the bytes of a decoded layer are, and in which memory."""
        return self.checksums[layer], self._kind, is_pinned, self.keeps_codes


class Loader:
    """Loads layers into an image, `PREFETCHED_LAYERS` of them at a time. A context manager.

    `overlaps`: the caller has other work to do before it needs the first layer.

    Nothing of an object is used before its checksum holds. Beside the image, memory holds two buffers for each thread,
    of one chunk's layer. On an accelerator these are pinned and hold neighbours' layers, too, up to `_COPIED_BYTES`; a
    layer of all objects is staged there; and copies and rotations run on a stream of their own: what is in memory is
    queued there a layer ahead, without a thread, which would contend with the caller for the interpreter. For an image
    that has a layer of all put to its places at once, each thread reads some of the objects, and memory holds three
    layers. Layers that `memory` holds are not read; they are kept decoded (on an accelerator quantized ones coded, as
    they are transferred), never written to.
    """

    def __init__(self, loads: Loads, overlaps: bool = False, memory: LayerMemory | None = None) -> None:
        image, placed = loads.image, loads.placed
        self._image, self._placed, self._memory = image, placed, memory
        self._first = self._next = loads.first  # the layer that is loaded first, and that is not in the image yet
        self._runs, self._copies = _runs(placed), loads.copies
        self._read: list[int] = []  # bytes, of each layer that was read
        self._resources = ExitStack()
        for part in placed:
            self._resources.callback(part.file.close)
        self._layers: dict[int, list[Future[Any]] | torch.Event | None] = {}  # in threads, or queued
        self._busy = BusyTime()
        # From when on the image's buffers, and what the staging needs, are there; None: the device has no streams.
        self._ready = streams.event_now(image.stack.device)
        self._sources = {part.file: LoadedObject(part.file) for part in placed}
        self._linked = [self._sources[part.file] for part in placed]
        self._at_once = self._place_at_once()
        for source in self._sources.values() if self._ready is not None else ():
            if self._at_once is not None or memory is not None:
                source.keep_codes()
        self._in_memory = self._is_in_memory()
        self._staged: StagedLayer | None = None
        if placed and self._ready is not None and self._at_once is None:
            objects = [
                StagedObject(source.dims, part.tokens) for source, part in zip(self._linked, placed, strict=True)
            ]
            self._staged = StagedLayer(objects, image.stack.device)
        self._batches = _batches(self._linked, _COPIED_BYTES if memory is None else 0)
        self._columns = [*accumulate((part.end - part.start for part in placed), initial=0)][:-1]
        self._streams: list[torch.Stream] = []
        self._resources.callback(self._synchronize_streams)
        num_threads = 1 if self._ready is None else min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._ahead = max(PREFETCHED_LAYERS, num_threads + 1) if self._at_once is None else PREFETCHED_LAYERS + 1
        sources = list(self._sources.values())
        self._groups = [sources[first::num_threads] for first in range(min(num_threads, len(sources)))]
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # by layer, of so many, and group
        self._placed_at: dict[int, torch.Event] = {}  # when the layers are in the image
        begin = _compute_alone if self._ready is None else None
        self._threads = self._resources.enter_context(ThreadPoolExecutor(num_threads, "pic-loader", begin))
        self._staging = threading.local()
        is_large = sum(source.layer_bytes for source in self._sources.values()) >= SMALL_LAYER_BYTES
        self._uses_threads = not self._in_memory and (overlaps or (self._ready is not None and is_large))
        if self._uses_threads:
            self._prefetch(loads.first)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for found in self._layers.values():
            for future in found if isinstance(found, list) else ():
                future.cancel()
        self._resources.close()

    @property
    def bytes_read(self) -> int:
        """Bytes of KV that were read so far; what memory held is not among them."""
        return sum(self._read)

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being loaded."""
        return self._busy.seconds

    def fetch_kv(self, layer: int) -> None:
        """Start to load a layer; without threads, queue it on the stream."""
        if not self._uses_threads:
            self._layers[layer] = self._load(layer)
        elif self._at_once is None:
            self._layers[layer] = [self._threads.submit(self._load, layer)]
        else:
            groups = range(len(self._groups))
            self._layers[layer] = [self._threads.submit(self._read_group, layer, group) for group in groups]

    def synchronize(self, layer: int) -> float:
        """Wait until a layer is in the image, and prefetch the next ones; layers ascend, and those that are there stay.

        Returns the seconds waited.
        """
        started, worked = time.perf_counter(), time.thread_time()
        if not self._placed or layer < self._next:
            return 0.0
        self._next = layer + 1
        found = self._layers.pop(layer, None)
        event = self._loaded(layer, found) if isinstance(found, list) else found or self._load(layer)
        if event is not None:
            streams.order_after(event, self._image.stack.device)
        waited = time.perf_counter() - started
        idle = waited if self._ready is not None else waited - (time.thread_time() - worked)
        self._uses_threads = self._uses_threads or (idle > PATIENCE_S and not self._in_memory)
        if self._uses_threads:
            self._prefetch(layer + 1)
        elif self._ready is not None and layer + 1 < self._image.stack.num_layers:
            self.fetch_kv(layer + 1)
        return waited

    def _prefetch(self, layer: int) -> None:
        for ahead in range(layer, min(layer + self._ahead, self._image.stack.num_layers)):
            if ahead not in self._layers:
                self.fetch_kv(ahead)

    def _is_in_memory(self) -> bool:
        """Whether an accelerator copies all from memory; by the first and the last layer, others are read if not."""
        memory, layers = self._memory, {self._image.stack.geometry.layers - 1}
        if (first := self._image.stack.kv_index[self._first]) is not None:
            layers.add(first)
        return self._ready is not None and memory is not None and all(
            memory.has(
                source.checksums[layer]
                if source.is_quantized and not source.keeps_codes
                else source.decoded_content(layer, True)
            )
            for source in self._sources.values()
            for layer in layers
        )  # fmt: skip

    def _place_at_once(self) -> StagedLayers | None:
        """What gets a layer of all at once; None: the image, or an object, is not of that kind."""
        is_decoded = any(source.is_quantized and not source.is_widened for source in self._sources.values())
        if self._ready is None or self._copies or is_decoded:
            return None
        staged = self._image.stage([part.staged for part in self._placed])
        if staged is not None:
            self._resources.callback(staged.synchronize)
        return staged

    def _load(self, layer: int) -> torch.Event | None:
        with self._busy:
            if self._ready is None:
                self._place(layer)
                return None
            if self._at_once is not None:
                if self._in_memory:
                    return self._at_once.load(layer, self._held(layer))
                return self._queue(layer, [self._read_group(layer, group) for group in range(len(self._groups))])
            stream = self._stream(self._ready)
            with stream:
                self._place(layer)
            return stream.record_event()

    def _loaded(self, layer: int, futures: Sequence[Future[Any]]) -> torch.Event | None:
        """Wait for what threads load of a layer. To queue what they read is this thread's part: steps are its own."""
        results = [future.result() for future in futures]
        event: torch.Event | None = results[0] if self._at_once is None else self._queue(layer, results)
        return event

    def _queue(self, layer: int, groups: Sequence[Sequence[torch.Tensor]]) -> torch.Event:
        """Queue a layer of all objects, which was read by groups."""
        assert self._at_once is not None
        read = dict(zip(itertools.chain(*self._groups), itertools.chain(*groups), strict=True))
        self._placed_at[layer] = event = self._at_once.load(layer, [read[source] for source in self._linked])
        return event

    def _read_group(self, layer: int, group: int) -> list[torch.Tensor]:
        """A layer of a group's objects, as `_decoded` returns it."""
        sources = self._groups[group]
        with self._busy:
            if self._memory is not None:
                return [self._decoded(source, layer) for source in sources]
            sizes, at = [source.held_bytes for source in sources], (layer % self._ahead, group)
            if (placed := self._placed_at.get(layer - self._ahead)) is not None:
                placed.synchronize()  # it was read to the same buffer
            if at not in self._buffers:
                self._buffers[at] = streams.host_buffer(sum(sizes), self._image.stack.device)
            buffers = torch.split(self._buffers[at], sizes)
            for source, buffer in zip(sources, buffers, strict=True):
                self._read_layer(source, layer, buffer.numpy().data)
            return list(buffers)

    def _stream(self, ready: torch.Event) -> torch.Stream:
        """The stream of this thread; it begins when the image's buffers are ready."""
        if not hasattr(self._staging, "stream"):
            self._staging.stream = streams.side_stream(self._image.stack.device, ready)
            self._streams.append(self._staging.stream)
        stream: torch.Stream = self._staging.stream
        return stream

    def _synchronize_streams(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def _place(self, layer: int) -> None:
        """Load what the objects have of a decoder layer: keys and values, a state, or both."""
        stack = self._image.stack
        if (state := stack.state_index[layer]) is not None:
            for part in self._placed:
                self._place_state(layer, state, part)
        if (index := stack.kv_index[layer]) is not None:
            self._place_kv(index)

    def _place_state(self, layer: int, index: int, part: PlacedObject) -> None:
        if part.file.meta.parent is not None:
            if part is self._placed[-1]:  # the state at a chain's end is that of all its blocks
                self._place_map(layer, index, part.file, 0, part.end)
            return
        assert part.file.meta.cut is not None
        self._place_map(layer, index, part.file, part.start + part.file.meta.cut, part.end)

    def _place_map(self, layer: int, index: int, file: ObjectFile, first: int, end: int) -> None:
        """Place what an object has of a linear layer: the map of the tokens [first, end)."""
        states, stack = self._image.states, self._image.stack
        assert states is not None
        read = file.states(index)
        self._read.append(sum(map(len, read.values())))
        tensors = {
            name: from_bytes(read[name], getattr(torch, file.meta.state_dtype(name)), dims).to(stack.device)
            for name, dims in file.meta.state_dims.items()
        }
        tensors |= {name: numbers.float() for name, numbers in tensors.items() if name != "tail"}
        states.place(layer, first, StateMap(end - first, **tensors))

    def _place_kv(self, layer: int) -> None:
        """Copy what the objects have of a layer to its places, and rotate the keys there."""
        if self._ready is None:
            for part in self._placed:
                numbers = [kept[:, part.tokens] for kept in self._numbers(self._sources[part.file], layer)]
                self._put(layer, [(self._image, part.start), *self._other_places(part)], numbers)
        elif self._staged is not None:
            self._place_staged(layer, self._staged)
        for start, end in self._runs:
            self._image.relocate(layer, start, end)
        for copy in self._copies:
            copy.image.relocate(layer, copy.start, copy.start + copy.part.end - copy.part.start)

    def _place_staged(self, layer: int, staged: StagedLayer) -> None:
        """The same on an accelerator: by one copy of neighbours' layers, and a gather of each part."""
        buffer, parts = staged.buffer(self._image.stack.dtype), self._image.stack.geometry.parts
        for batch, slot in zip(self._batches, torch.split(buffer, [each.count for each in self._batches]), strict=True):
            self._copy_batch(layer, batch.sources, slot)
        gathered, column = [staged.gather(buffer, part) for part in range(len(parts))], 0
        for start, end in self._runs:
            self._put(layer, [(self._image, start)], [part[:, column : column + end - start] for part in gathered])
            column += end - start
        for placed, first in zip(self._placed, self._columns, strict=True):
            own = slice(first, first + placed.end - placed.start)
            self._put(layer, self._other_places(placed), [part[:, own] for part in gathered])

    def _copy_batch(self, layer: int, sources: Sequence[LoadedObject], slot: torch.Tensor) -> None:
        """Queue the copy of a batch's layers to the device, to a slot for all their numbers."""
        if sources[0].is_quantized:
            torch.cat([part.flatten() for part in self._numbers(sources[0], layer)], out=slot)
        elif self._memory is not None:
            slot.copy_(self._decoded(sources[0], layer).view(slot.dtype), non_blocking=True)
        else:
            buffer, start = self._buffer(slot.nbytes), 0
            data = buffer.numpy().data
            for source in sources:
                self._read_layer(source, layer, data[start:])
                start += source.layer_bytes
            slot.copy_(buffer[:start].view(slot.dtype), non_blocking=True)
            self._staging.copied[0] = self._staging.stream.record_event()  # the buffer is read to again soon

    def _other_places(self, part: PlacedObject) -> list[tuple[Image, int]]:
        """Where else a part goes."""
        return [(copy.image, copy.start) for copy in self._copies if copy.part is part]

    def _put(self, layer: int, places: Iterable[tuple[Image, int]], numbers: Sequence[torch.Tensor]) -> None:
        """Copy keys and values [kv_heads, n, head_dim] to places in images."""
        for image, start in places:
            for target, part in zip(image.places(layer, start, start + numbers[0].shape[1]), numbers, strict=True):
                target.copy_(part)

    def _numbers(self, source: LoadedObject, layer: int) -> tuple[torch.Tensor, ...]:
        """The parts of one object, as keys and values [kv_heads, n, head_dim]: on the device, or on the host."""
        stack, file = self._image.stack, source.file
        if source.keeps_codes:
            return widened(file, self._decoded(source, layer), stack.dtype, stack.device)
        if source.is_quantized and (self._memory is None or self._ready is not None):
            return read_quantized(file, layer, stack.dtype, stack.device, self._coded(source, layer))
        numbers = self._decoded(source, layer)[: source.layer_bytes].view(stack.dtype)
        parts = torch.split(numbers, [*map(math.prod, source.dims)])
        return tuple(part.view(of) for part, of in zip(parts, source.dims, strict=True))

    def _coded(self, source: LoadedObject, layer: int) -> memoryview:
        """A layer as it is in its file, checked."""
        file = source.file

        def read() -> memoryview:
            self._read.append(file.stored_bytes(layer))
            return file.stored_layer(layer).toreadonly()

        if self._memory is None:
            return read()
        coded: memoryview = self._memory.get(source.checksums[layer], file.stored_bytes(layer), read)
        return coded

    def _decoded(self, source: LoadedObject, layer: int) -> torch.Tensor:
        """Keys and values of a layer, or their codes, as bytes, uint8 [held_bytes or more]; not to be written to."""

        def read(buffer: torch.Tensor) -> torch.Tensor:
            self._read_layer(source, layer, buffer.numpy().data)
            return buffer

        if self._memory is None:
            return read(self._buffer(source.held_bytes))
        decoded: torch.Tensor = self._memory.get(
            source.decoded_content(layer, self._ready is not None), source.held_bytes,
            lambda: read(streams.host_buffer(source.held_bytes, self._image.stack.device)),
        )  # fmt: skip
        return decoded

    def _held(self, layer: int) -> list[torch.Tensor]:
        """A layer of all that is linked, as `_decoded` returns it."""
        assert self._memory is not None
        held = self._memory.held([source.decoded_content(layer, True) for source in self._linked])
        return [
            self._decoded(source, layer) if buffer is None else buffer
            for buffer, source in zip(held, self._linked, strict=True)
        ]

    def _read_layer(self, source: LoadedObject, layer: int, into: memoryview) -> None:
        """Read a layer, checked and decoded, to memory of at least its bytes."""
        self._read.append(source.file.stored_bytes(layer))
        if source.keeps_codes:
            unpack(source.file, layer, into)
        else:
            source.file.layer(layer, into=into)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory to read to, of this thread. With streams there are two: one is read while the other is copied."""
        staging = self._staging
        if not hasattr(staging, "buffers"):
            staging.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
            staging.copied = [None, None]  # the event after which a buffer is free
        if self._ready is not None:
            staging.buffers.reverse()
            staging.copied.reverse()
            if staging.copied[0] is not None:
                staging.copied[0].synchronize()
        if len(staging.buffers[0]) < num_bytes:
            staging.buffers[0] = streams.host_buffer(num_bytes, self._image.stack.device)
        buffer: torch.Tensor = staging.buffers[0]
        return buffer


@dataclass(frozen=True)
class _Batch:
    """Neighbours whose layers an accelerator gets in one copy of so many numbers."""

    sources: tuple[LoadedObject, ...]
    count: int


def _batches(sources: Sequence[LoadedObject], most_bytes: int) -> list[_Batch]:
    """The sources in their order, of at most `most_bytes` together; alone those that are larger, or quantized."""
    batches, room = list[_Batch](), 0
    for source in sources:
        if batches and source.layer_bytes <= room and not source.is_quantized:
            batches[-1] = _Batch((*batches[-1].sources, source), batches[-1].count + source.count)
        else:
            batches.append(_Batch((source,), source.count))
            room = 0 if source.is_quantized else most_bytes
        room -= source.layer_bytes
    return batches


def _runs(placed: Sequence[PlacedObject]) -> list[tuple[int, int]]:
    """`[start, end)` of what is placed, neighbours as one."""
    runs: list[tuple[int, int]] = []
    for part in placed:
        if runs and runs[-1][1] == part.start:
            runs[-1] = runs[-1][0], part.end
        else:
            runs.append((part.start, part.end))
    return runs


class BusyTime:
    """Seconds during which at least one thread was within."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock, self._inside, self._since = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.seconds += time.perf_counter() - self._since


@dataclass(frozen=True)
class StagedObject:
    """An object's layer: parts [heads, length, width] of these dimensions, of which `tokens` are linked."""

    dims: tuple[tuple[int, int, int], ...]
    tokens: slice

    @property
    def count(self) -> int:
        """Numbers in all parts."""
        return sum(map(math.prod, self.dims))

    def pieces(self, part: int, first: int, unit: int) -> NDArray[np.int64]:
        """Which pieces of `unit` numbers are linked of a part, if those of the object begin at the number `first`.

        Returns:
            int64 [heads, tokens, width / unit].
        """
        heads, length, width = self.dims[part]
        before = first + sum(map(math.prod, self.dims[:part]))
        rows = np.arange(heads)[:, None] * length + np.arange(self.tokens.start, self.tokens.stop)
        return before // unit + rows[..., None] * (width // unit) + np.arange(width // unit)


class StagedLayer:
    """A layer of all objects, in their order, in one buffer of the device."""

    def __init__(self, objects: Sequence[StagedObject], device: torch.device) -> None:
        dims, firsts = objects[0].dims, [*accumulate((each.count for each in objects), initial=0)]
        self._count, self._device = firsts.pop(), device
        self._unit = math.gcd(*(width for _, _, width in dims))  # pieces of all parts begin at a multiple of it
        self._shapes = [(heads, -1, width) for heads, _, width in dims]
        self._pieces = [self._pieces_of(part, objects, firsts) for part in range(len(dims))]

    def _pieces_of(self, part: int, objects: Sequence[StagedObject], firsts: Sequence[int]) -> Tensor:
        pieces = [each.pieces(part, first, self._unit) for each, first in zip(objects, firsts, strict=True)]
        return to_device(np.concatenate(pieces, 1).ravel(), self._device)

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Room for a layer of all objects, 1-dimensional."""
        return torch.empty(self._count, dtype=dtype, device=self._device)

    def gather(self, buffer: Tensor, part: int) -> Tensor:
        """What is linked of a part, [heads, tokens, width]: the tokens of the first object, then those of the next."""
        return buffer.view(-1, self._unit)[self._pieces[part]].view(self._shapes[part])
