"""Fetching the KV of reused chunks, layer by layer, from open objects."""

from __future__ import annotations

from collections.abc import Sequence
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


class Loader:
    """Reads one layer of every reused chunk at a time. Nothing of an object is used before its checksum holds."""

    def __init__(self, model: Model, placed: Sequence[Placed]) -> None:
        self._model, self._placed = model, placed
        self._files = ExitStack()
        for one in placed:
            self._files.enter_context(one.file)

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def fetch_kv(self, layer: int) -> list[tuple[int, Tensor, Tensor]]:
        """(start, un-rotated key, value) of every chunk; tensors are [kv_heads, tokens, head_dim] on the device."""
        fetched, dtype = [], self._model.torch_dtype
        for one in self._placed:
            geometry = one.file.meta.target.geometry
            shape = (geometry.kv_heads, one.file.meta.num_tokens, geometry.head_dim)
            key, value = (from_bytes(part, dtype, shape).to(self._model.device) for part in one.file.layer(layer))
            fetched.append((one.start, key, value))
        return fetched
