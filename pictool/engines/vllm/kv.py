"""KV of objects on its way into vLLM's blocks: read, checked, cut to a rank's heads, rotated by the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from pictool.core import Target
from pictool.engines.vllm.messages import LinkJob
from pictool.engines.vllm.objects import open_object
from pictool.engines.vllm.plan import Span
from pictool.engines.vllm.rows import Ints
from pictool.runtime.tensors import from_bytes
from pictool.store.format import ObjectFile
from pictool.store.store import Store

KV = tuple[Tensor, Tensor]  # un-rotated keys and values, [tokens, kv_heads, head_dim]


@dataclass(frozen=True)
class Heads:
    """The KV heads of a rank: [first, last) of the model's; `copies` ranks hold the same ones."""

    first: int
    last: int
    copies: int

    @classmethod
    def of(cls, total: int, rank: int, size: int) -> Heads:
        """As vLLM deals them out: each rank its part, or one head to several ranks."""
        if total >= size:
            return cls(rank * total // size, (rank + 1) * total // size, 1)
        copies = size // total
        return cls(rank // copies, rank // copies + 1, copies)


@dataclass(frozen=True)
class Loaded:
    """A job whose objects stand in its blocks; `held` is un-rotated KV by layer, if a policy is to compare with it."""

    job: LinkJob
    positions: Ints
    held: dict[int, KV]


class Reader:
    """The KV of a job's objects, layer by layer; one layer is read ahead. A context manager.

    Raises:
        PicError: an object that is missing, foreign or damaged.
    """

    def __init__(self, store: Store, target: Target, job: LinkJob, heads: Heads) -> None:
        self._target, self._heads, self._salt = target, heads, job.plan.salt
        self._resources = ExitStack()
        self._thread = self._resources.enter_context(ThreadPoolExecutor(1, "pic-read"))
        self._parts = [span for span in job.plan.parts if span.end > job.computed]
        self._from = job.computed
        try:
            self._files = [self._open(store, span) for span in self._parts]
        except BaseException:
            self._resources.close()
            raise
        spans = [range(max(span.start, self._from), span.end) for span in self._parts]
        self.positions = torch.tensor([at for span in spans for at in span], dtype=torch.int64)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def layers(self) -> Iterator[KV]:
        """Keys and values of every layer, at `positions`."""
        ahead = self._thread.submit(self._read, 0)
        for layer in range(1, self._target.geometry.layers):
            done, ahead = ahead.result(), self._thread.submit(self._read, layer)
            yield done
        yield ahead.result()

    def _open(self, store: Store, span: Span) -> ObjectFile:
        assert span.key is not None
        file = self._resources.enter_context(open_object(store, self._target, span.key, self._salt))
        file.touch()  # in the store of this machine; the scheduler has counted the hit
        return file

    def _read(self, layer: int) -> KV:
        pairs = [self._cut(file, span, layer) for file, span in zip(self._files, self._parts, strict=True)]
        if not pairs:
            empty = torch.empty(0, self._heads.last - self._heads.first, self._target.geometry.head_dim)
            return empty, empty
        keys, values = zip(*pairs, strict=True)
        return torch.cat(keys), torch.cat(values)

    def _cut(self, file: ObjectFile, span: Span, layer: int) -> KV:
        """What a layer of an object gives to this rank, from the first position that is wanted."""
        geometry = self._target.geometry
        shape = (geometry.kv_heads, file.meta.num_tokens, geometry.head_dim)
        first, last = max(span.start, self._from) - span.start, span.end - span.start
        dtype: torch.dtype = getattr(torch, self._target.dtype)
        key, value = (from_bytes(data, dtype, shape) for data in file.layer(layer))
        heads = slice(self._heads.first, self._heads.last)
        return key[heads, first:last].transpose(0, 1), value[heads, first:last].transpose(0, 1)
