"""Objects from vLLM's own prefill: a chunk's rows run through its model, keys caught before they are rotated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group

from pictool.compiler.compile import CODEC
from pictool.core import Target
from pictool.engines.vllm.host import Host
from pictool.engines.vllm.messages import CompileJob, Outcome
from pictool.engines.vllm.passes import Passes, Sequences
from pictool.engines.vllm.ranks import all_heads
from pictool.engines.vllm.rows import Piece, RowSet
from pictool.errors import PicError
from pictool.runtime.tensors import to_bytes
from pictool.store.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store


class _Catch:
    """Keys before rotation and values, by layer; one entry per piece of the prefill."""

    def __init__(self, host: Host) -> None:
        self._host, self._rotary_key = host, torch.empty(0)
        self.keys: list[list[Tensor]] = [[] for _ in host.layers]
        self.values: list[list[Tensor]] = [[] for _ in host.layers]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Layers may share a rotary embedding: what it last saw is the key of the attention that runs next."""
        rotaries = {id(layer.rotary): layer.rotary for layer in self._host.layers}
        handles = [one.register_forward_pre_hook(self._see_key) for one in rotaries.values()]
        for index, layer in enumerate(self._host.layers):
            handles.append(layer.attention.register_forward_pre_hook(self._keeper(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see_key(self, _: nn.Module, seen: tuple[Tensor, ...]) -> None:
        self._rotary_key = seen[2].clone()

    def _keeper(self, index: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
        def keep(_: nn.Module, seen: tuple[Tensor, ...]) -> None:
            self.keys[index].append(self._rotary_key)
            self.values[index].append(seen[2].clone())

        return keep


def compile_chunk(host: Host, store: Store, target: Target, job: CompileJob) -> Outcome:
    """Compute a chunk behind its sinks, and write its object; the first rank writes."""
    catch, order = _Catch(host), []
    passes = Passes(host, Sequences([job.tokens], [job.blocks]))
    with catch.hooks():
        passes.run(RowSet.of([np.ones(len(job.tokens), dtype=bool)]), lambda piece: order.append(piece))
    pairs = []
    for keys, values in zip(catch.keys, catch.values, strict=True):
        whole = (all_heads(_in_order(parts, order, host), host.heads)[job.sinks :] for parts in (keys, values))
        pairs.append(tuple(one.transpose(0, 1).contiguous() for one in whole))
    if get_tp_group().rank_in_group:
        return Outcome()
    tokens = job.tokens[job.sinks :]
    meta = ObjectMeta(target.key(tokens, job.sinks, CODEC, job.salt), target, len(tokens), job.sinks, CODEC)
    try:
        store.put(CompiledChunk(meta, job.text, tokens, [(to_bytes(key), to_bytes(value)) for key, value in pairs]))
    except PicError as error:
        return Outcome(str(error))
    return Outcome()


def _in_order(parts: list[Tensor], order: list[Piece], host: Host) -> Tensor:
    """[tokens, kv_heads, head_dim], by position."""
    heads = host.heads.last - host.heads.first
    flat = torch.cat([part.reshape(len(part), heads, -1) for part in parts])
    index = torch.from_numpy(np.concatenate([piece.index for piece in order])).to(flat.device)
    out = torch.empty_like(flat)
    out[index] = flat
    return out
