"""An accelerator that is emulated on the CPU: streams and events whose order is recorded, and a detector of races.

PyTorch's own test backend (openreg) is in its source tree alone and on no package index, so this is the part of one
that matters here: which work is ordered after which. Every operation of torch runs at once, on the CPU, and is written
down as a read or a write of its storages by the stream that is current in its thread. Clocks of streams and of threads
of the host say what happened before (vector clocks, as ThreadSanitizer and torch's CUDA sanitizer have them): a launch
is after all that its thread did, and only events order streams with each other and the host after a stream. Two
accesses of one storage, of which one writes and which nothing orders, are a race, in whatever order they ran here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pictool.runtime.memory import streams
from pictool.store.memory import LayerMemory
from pictool.store.objects.format import ObjectFile

Clock = dict[str, int]
MAIN = "main stream"


class Race(AssertionError):
    """Two accesses that nothing orders."""


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in what an operation takes or gives: some times faster than `torch.utils._pytree` finds them."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


class Accelerator:
    """The clocks of all streams and threads, and the last accesses of every storage."""

    def __init__(self) -> None:
        self._clocks: dict[str, Clock] = {}
        self._writes: dict[int, tuple[str, int]] = {}
        self._reads: dict[int, dict[str, int]] = {}
        self._kept: list[Any] = []  # storages: none is freed, so that no address is used twice
        self._lock, self._local = threading.RLock(), threading.local()
        self.races: list[str] = []
        self.num_streams = self.num_copies = 0

    # Who

    @property
    def stream(self) -> str:
        """The stream that is current in this thread."""
        return str(getattr(self._local, "stream", MAIN))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Have a stream be the current one; all operations of this thread are recorded."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            if before is None:
                with _Recorder(self):
                    yield
            else:
                yield
        finally:
            if before is None:
                del self._local.stream
            else:
                self._local.stream = before

    def clock(self, who: str) -> Clock:
        return self._clocks.setdefault(who, {})

    def host(self) -> str:
        return f"thread {threading.get_ident()}"

    # What is ordered

    def after(self, who: str, clock: Clock) -> None:
        """All that `who` does from now on is after what a clock says."""
        with self._lock:
            own = self.clock(who)
            for other, time in clock.items():
                own[other] = max(own.get(other, 0), time)

    def launch(self) -> Clock:
        """The clock of the current stream, after all that this thread did before."""
        self.after(self.stream, self.clock(self.host()))
        return self.clock(self.stream)

    # What is accessed

    def access(self, who: str, storage: int, writes: bool, what: object) -> None:
        with self._lock:
            clock = self.clock(who)
            clock[who] = now = clock.get(who, 0) + 1
            if storage in self._writes:
                self._require(clock, *self._writes[storage], what, who)
            if writes:
                for reader, time in self._reads.pop(storage, {}).items():
                    self._require(clock, reader, time, what, who)
                self._writes[storage] = who, now
            else:
                self._reads.setdefault(storage, {})[who] = now

    def _require(self, clock: Clock, other: str, time: int, what: object, who: str) -> None:
        if clock.get(other, 0) < time:
            self.races.append(f"{what} by {who} is not ordered after an access by {other}")

    def keep(self, tensor: Tensor) -> int:
        """The address of a tensor's storage, which stays its own."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._kept.append(storage)
        return storage.data_ptr()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what every operation of one thread reads and writes."""

    def __init__(self, device: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or "empty" in func.__name__:
            for tensor in tensors_of(out):
                self._device.keep(tensor)
            return out
        self._device.launch()
        written = {
            id(tensor)
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_of(value)
        }
        given, addresses = tensors_of((args, kwargs)), set[int]()
        for tensor in given:
            addresses.add(self._access(tensor, id(tensor) in written, func))
        for tensor in tensors_of(out):
            if tensor.untyped_storage().data_ptr() not in addresses:
                self._access(tensor, True, func)
        return out

    def _access(self, tensor: Tensor, writes: bool, func: Any) -> int:
        address = self._device.keep(tensor)
        if tensor.untyped_storage().nbytes():
            self._device.access(self._device.stream, address, writes, func)
        return address


class Event:
    """A moment of a stream."""

    def __init__(self, device: Accelerator, clock: Clock) -> None:
        self._device, self.clock = device, clock

    def synchronize(self) -> None:
        self._device.after(self._device.host(), self.clock)


class Stream:
    """As `torch.Stream`, of an emulated accelerator."""

    def __init__(self, device: Accelerator, name: str) -> None:
        self._device, self.name = device, name

    def __enter__(self) -> Stream:
        self._entered = self._device.on(self.name)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def record_event(self) -> Event:
        self._device.after(self.name, self._device.clock(self._device.host()))
        return Event(self._device, dict(self._device.clock(self.name)))

    def wait_event(self, event: Event) -> None:
        self._device.after(self.name, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self._device.after(self.name, dict(self._device.clock(other.name)))

    def synchronize(self) -> None:
        self._device.after(self._device.host(), dict(self._device.clock(self.name)))


@contextmanager
def emulated(patch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """Have the CPU be an accelerator: with streams, and with host memory from which copies are queued.

    Raises:
        Race: at the end, if there was one.
    """
    device = Accelerator()

    def new_stream(_: Any) -> Stream:
        device.num_streams += 1
        return Stream(device, f"side stream {device.num_streams}")

    patch.setattr(torch, "Stream", new_stream)
    patch.setattr(torch.accelerator, "current_stream", lambda _: Stream(device, device.stream))
    patch.setattr(streams, "has_streams", lambda _: True)
    patch.setattr(streams, "host_buffer", lambda count, _: torch.empty(count, dtype=torch.uint8))
    _watch_the_host(device, patch)
    with device.on(MAIN):
        yield device
    if device.races:
        raise Race(device.races[0])


def _watch_the_host(device: Accelerator, patch: pytest.MonkeyPatch) -> None:
    """Writes of the host to memory that copies read; and what orders its threads: results, and its cache of layers."""
    layer, get, shared = ObjectFile.layer, LayerMemory.get, dict[str, int]()
    done, result, clocks = Future.set_result, Future.result, dict[Future[Any], Clock]()

    def reading(file: ObjectFile, index: int, into: memoryview | None = None) -> Any:
        if into is not None:
            device.num_copies += 1
            address = np.frombuffer(into, dtype=np.uint8).ctypes.data
            device.access(device.host(), address, True, "writing a host buffer")
        return layer(file, index, into)

    def getting(memory: LayerMemory, *more: Any) -> Any:
        device.after(device.host(), shared)
        found = get(memory, *more)
        for who, time in device.clock(device.host()).items():
            shared[who] = max(shared.get(who, 0), time)
        return found

    def finishing(future: Future[Any], value: Any) -> None:
        clocks[future] = dict(device.clock(device.host()))
        done(future, value)

    def waiting(future: Future[Any], timeout: float | None = None) -> Any:
        found = result(future, timeout)
        device.after(device.host(), clocks.get(future, {}))
        return found

    patch.setattr(Future, "set_result", finishing)
    patch.setattr(Future, "result", waiting)
    patch.setattr(ObjectFile, "layer", reading)
    patch.setattr(LayerMemory, "get", getting)
