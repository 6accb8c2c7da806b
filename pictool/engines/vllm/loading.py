"""Objects are read by threads, layer by layer, while the engine steps; a step copies what was read, within a budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

import torch

from pictool.engines.vllm.kv import KV, LoadedJob, ObjectReader, WorkerModel
from pictool.engines.vllm.messages import LinkJob
from pictool.engines.vllm.request import Problem

LAYERS_AHEAD = 4  # of one job: that are being read, or wait to be copied


class Loading:
    """A job whose objects are being read. It is opened, read and checked in threads; `copy` writes what is there.

    Nothing of a layer is written before its checksum holds. Host memory holds `LAYERS_AHEAD` layers of the job.

    Attributes:
        loaded: the job, once all of its layers are in place.
        problem: why it cannot be loaded; set by the caller, from what `copy` raised.
        seconds: from the start to `close`.

    Args:
        checked: the layers whose un-rotated KV is kept, for policies that compare it with fresh KV.
    """

    def __init__(
        self, job: LinkJob, threads: Executor, open_reader: Callable[[], ObjectReader], checked: tuple[int, ...]
    ) -> None:
        self.job, self._threads, self._checked = job, threads, checked
        self._opening = threads.submit(open_reader)
        self._reads: deque[Future[KV]] = deque()
        self._num_submitted = self._num_copied = 0
        self._cached: dict[int, KV] = {}
        self._place: tuple[torch.Tensor, torch.Tensor] | None = None  # positions and slots, on the device
        self._started, self.seconds = time.perf_counter(), 0.0
        self.loaded: LoadedJob | None = None
        self.problem: Problem | None = None
        self._is_closed = False

    def copy(self, model: WorkerModel, max_bytes: float) -> int:
        """Write layers that were read into the job's blocks, until `max_bytes` were written or none is ready.

        Returns the bytes written. Once all layers are in place, `loaded` is set.

        Raises:
            Exception: what opening or reading raised; the job is over.
        """
        if self.loaded is not None or not self._opening.done():
            return 0
        reader, num_bytes = self._opening.result(), 0
        self._read_ahead(reader, len(model.layers))
        while self._reads and self._reads[0].done() and num_bytes < max_bytes:
            num_bytes += self._write(model, reader, self._reads.popleft().result())
            self._read_ahead(reader, len(model.layers))
        if self._num_copied == len(model.layers):
            self.loaded = LoadedJob(self.job, reader.positions, self._cached)
            self.close()
        return num_bytes

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to copy."""
        first: Future[Any] = self._reads[0] if self._reads else self._opening
        wait([first], timeout_s)

    def close(self) -> None:
        """Read no more; files are closed once no thread reads from them. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.seconds = time.perf_counter() - self._started
        for read in self._reads:
            read.cancel()
        self._opening.cancel()
        self._threads.submit(self._close_reader)

    def _close_reader(self) -> None:
        wait(self._reads)
        if not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().close()

    def _read_ahead(self, reader: ObjectReader, num_layers: int) -> None:
        while len(self._reads) < LAYERS_AHEAD and self._num_submitted < num_layers:
            self._reads.append(self._threads.submit(reader.read, self._num_submitted))
            self._num_submitted += 1

    def _write(self, model: WorkerModel, reader: ObjectReader, kv: KV) -> int:
        if self._place is None:
            positions = torch.from_numpy(reader.positions)
            self._place = positions.to(model.device), model.slots(self.job.blocks, positions)
        index, (positions, slots) = self._num_copied, self._place
        key, value = (part.to(model.device, non_blocking=True) for part in kv)
        model.write(model.layers[index], model.rotate(model.layers[index], key, positions), value, slots)
        if index in self._checked:
            self._cached[index] = kv
        self._num_copied += 1
        return sum(part.nbytes for part in kv)
