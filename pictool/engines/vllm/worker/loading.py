"""Objects are read by threads, layer by layer, while the engine steps; steps copy what was read, piece by piece."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

import torch

from pictool.engines.vllm.messages import LinkJob
from pictool.engines.vllm.request import Problem
from pictool.engines.vllm.worker.kv import KV, LoadedJob, ObjectReader, WorkerModel

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
        self._num_submitted = self._num_copied = 0  # layers
        self._num_tokens = 0  # of the next layer, that were copied
        self._cached: dict[int, KV] = {}
        self._place: tuple[torch.Tensor, torch.Tensor] | None = None  # positions and slots, on the device
        self._started, self.seconds = time.perf_counter(), 0.0
        self.loaded: LoadedJob | None = None
        self.problem: Problem | None = None
        self._is_closed = False

    @property
    def is_readable(self) -> bool:
        """Whether there is something to copy, or an error to raise."""
        first: Future[Any] = self._reads[0] if self._reads else self._opening
        return self.loaded is None and first.done()

    def copy(self, model: WorkerModel, max_bytes: float) -> int:
        """Write at most so much (but at least one token) of the next layer into the job's blocks, if it was read.

        Returns the bytes written. Once all layers are in place, `loaded` is set.

        Raises:
            Exception: what opening or reading raised; the job is over.
        """
        if not self.is_readable:
            return 0
        reader, num_layers = self._opening.result(), len(model.layers)
        self._read_ahead(reader, num_layers)
        num_bytes = 0
        if self._reads and self._reads[0].done():
            num_bytes = self._write(model, reader, self._reads[0].result(), max_bytes)
            self._read_ahead(reader, num_layers)
        if self._num_copied == num_layers:
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

    def _write(self, model: WorkerModel, reader: ObjectReader, kv: KV, max_bytes: float) -> int:
        """Write the next tokens of a layer."""
        if self._place is None:
            positions = torch.from_numpy(reader.positions)
            self._place = positions.to(model.device), model.slots(self.job.blocks, positions)
        num_tokens, num_bytes = len(kv[0]), sum(part.nbytes for part in kv)
        size = max(1, num_tokens if num_bytes <= max_bytes else int(num_tokens * max_bytes / num_bytes))
        tokens = slice(self._num_tokens, min(num_tokens, self._num_tokens + size))
        layer, (positions, slots) = model.layers[self._num_copied], self._place
        key, value = (part[tokens].to(model.device, non_blocking=True) for part in kv)
        model.write(layer, model.rotate(layer, key, positions[tokens]), value, slots[tokens])
        self._num_tokens = tokens.stop
        if self._num_tokens == num_tokens:
            if self._num_copied in self._checked:
                self._cached[self._num_copied] = kv
            self._reads.popleft()
            self._num_copied, self._num_tokens = self._num_copied + 1, 0
        return key.nbytes + value.nbytes
