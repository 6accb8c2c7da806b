"""What records a function over static tensors, so that it is replayed; and the comparison that each recording passes.

A function here reads and writes tensors that stay where they are, and asks the host nothing: what differs between two
links is in the tensors. So what is recorded of one link serves every other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pictool.errors import InputError
from pictool.runtime import turns
from pictool.runtime.device import is_accelerator

VARIABLE = "PIC_GRAPHS"
# Roundings of the largest number by which two runs may differ, in float32 and in a half: some sums are of any order.
_NOISE, _NOISE_OF_HALVES = 64, 4


class Recorded(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Run it again, on what the static tensors hold now."""
        ...


class Recorder(Protocol):
    """Records functions. What is recorded in one pool is replayed in order; in two, at the same time."""

    def record(self, run: Callable[[], None], pool: str) -> Recorded: ...


class CudaGraphs:
    """Records CUDA graphs. Those of a pool use the same memory: what one makes, no other reads."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pools = device, dict[str, tuple[Any, torch.cuda.CUDAGraph]]()  # a handle each
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None], pool: str) -> Recorded:
        outer, stream = torch.cuda.current_stream(self._device), self._stream
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            if pool not in self._pools:
                handle: Any = torch.cuda.graph_pool_handle()
                # A pool ends with its last graph: this one stays.
                self._pools[pool] = handle, self._capture(lambda: torch.zeros(1, device=self._device), handle)
            run()  # libraries allocate their workspace of a stream when it first runs
            graph = self._capture(run, self._pools[pool][0])
        outer.wait_stream(stream)
        return graph

    def _capture(self, run: Callable[[], object], handle: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Threads that load, or run other requests, go on meanwhile.
        graph.capture_begin(handle, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        return graph


def is_on(device: torch.device) -> bool:
    """Whether links on a device have static tensors: not by default, until that ran on a GPU. Raises InputError: the
    variable says neither.
    """
    if (value := os.environ.get(VARIABLE) or "off") not in ("on", "off"):
        raise InputError(f"{VARIABLE}={value}: must be on or off")
    return is_accelerator(device) and value == "on"


def recorder_of(device: torch.device) -> Recorder | None:
    """What records for a device; None: each operation is launched anew."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return CudaGraphs(device) if is_cuda else None


class NotRepeatableError(Exception):
    """A replay computes something else than the function does."""


class StaticStep:
    """A function over static tensors, that is called until it is recorded.

    Args:
        changes: the tensors that it writes.
        pool: see `Recorder`.
    """

    def __init__(self, run: Callable[[], None], changes: Callable[[], Sequence[Tensor]], pool: str = "rows") -> None:
        self._run, self._changes, self._pool = run, changes, pool
        self._recorded: Recorded | None = None

    @property
    def is_recorded(self) -> bool:
        return self._recorded is not None

    def forget(self) -> None:
        """Call the function again, from now on."""
        self._recorded = None

    def __call__(self) -> None:
        """Replay it; or call it, if it is not recorded."""
        if self._recorded is not None:
            self._recorded.replay()
            return
        with torch.inference_mode(), turns.without_checkpoints():
            self._run()

    def record(self, recorder: Recorder) -> Exception | None:
        """Run it, and record it: the replay must write what the function did.

        Returns:
            why it is not recorded: it does not, or whatever a recorder or a library raised. It has run all the same.
        """
        try:
            kept = [(tensor, tensor.clone(), torch.empty_like(tensor)) for tensor in self._changes()]
        except torch.OutOfMemoryError as error:
            self()
            return error
        self()
        for tensor, _, wanted in kept:
            wanted.copy_(tensor)
        try:
            with torch.inference_mode(), turns.without_checkpoints():
                recorded = recorder.record(self._run, self._pool)
            for tensor, before, _ in kept:
                tensor.copy_(before)
            recorded.replay()
            for tensor, _, wanted in kept:
                if not _is_same(tensor, wanted):
                    raise NotRepeatableError(f"a replay differs by {float((tensor - wanted).abs().max()):.1e}")
        except Exception as error:
            return error
        finally:
            for tensor, _, wanted in kept:
                tensor.copy_(wanted)
        self._recorded = recorded
        return None


def _is_same(own: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal but for the noise of their dtype."""
    if own.is_complex():
        own, other = torch.view_as_real(own), torch.view_as_real(other)
    if not own.is_floating_point():
        return torch.equal(own, other)
    noise = torch.finfo(own.dtype).eps * (_NOISE if own.dtype.itemsize > 2 else _NOISE_OF_HALVES)
    own, other = own.float(), other.float()
    largest = float(torch.nan_to_num(other, posinf=0.0, neginf=0.0).abs().max()) if other.numel() else 0.0
    return torch.allclose(own, other, rtol=0.0, atol=noise * largest, equal_nan=True)
