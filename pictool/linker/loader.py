"""Fetching the KV of reused chunks, layer by layer, from open objects."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from pictool.runtime.tensors import from_bytes
from pictool.store.format import ObjectFile

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Placed:
    """An object file that is linked at position `start`."""

    file: ObjectFile
    start: int


LayerKV = list[tuple[int, Tensor, Tensor]]  # of every chunk: start, un-rotated key, value [kv_heads, tokens, head_dim]


class Loader:
    """Reads one layer of every reused chunk at a time; the next one is read and checked while this one is computed.

    Nothing of an object is used before its checksum holds. A context manager, which closes the objects.
    """

    def __init__(self, model: Model, placed: Sequence[Placed]) -> None:
        self._model, self._placed = model, placed
        self._resources = ExitStack()
        for one in placed:
            self._resources.enter_context(one.file)
        self._reader = self._resources.enter_context(ThreadPoolExecutor(1))
        self._next = self._reader.submit(self._read, 0)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.cancel()
        self._resources.close()

    def fetch_kv(self, layer: int) -> LayerKV:
        """The KV of one layer, on the device; layers are asked for in order, from 0 on."""
        fetched = self._next.result()
        if layer + 1 < self._model.geometry.layers:
            self._next = self._reader.submit(self._read, layer + 1)
        return fetched

    def _read(self, layer: int) -> LayerKV:
        fetched, dtype = [], self._model.torch_dtype
        for one in self._placed:
            geometry = one.file.meta.target.geometry
            shape = (geometry.kv_heads, one.file.meta.num_tokens, geometry.head_dim)
            key, value = (from_bytes(part, dtype, shape).to(self._model.device) for part in one.file.layer(layer))
            fetched.append((one.start, key, value))
        return fetched
