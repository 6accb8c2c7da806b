"""Prefill of isolated chunks: what compiling runs. Many chunks share one forward, without padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pictool.runtime.attention import Pack, Run
from pictool.runtime.device import is_accelerator
from pictool.runtime.memory.caches import CapturingCache, LayerKV
from pictool.runtime.rope import RotaryTables
from pictool.runtime.stack import LayerStack

if TYPE_CHECKING:
    from pictool.runtime.model import Model

ChunkKV = list[LayerKV]  # per layer: un-rotated key and value, [kv_heads, tokens, head_dim]

# Tokens of one forward: enough to fill the arithmetic units; more costs a CPU its caches (docs/studies/benchmarks.md).
_PACK_TOKENS, _ON_ACCELERATOR = 512, 8192


def pack_tokens(model: Model) -> int:
    """Tokens of one forward on the model's device."""
    return _ON_ACCELERATOR if is_accelerator(model.stack.device) else _PACK_TOKENS


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of chunks that are computed together, within a budget of tokens; a longer chunk is alone.

    Each pack is the longest chunk that is left, and then always the longest that still fits.
    """
    packs: list[list[int]] = []
    left = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while left:
        packs.append([left.pop()])
        room = max_tokens - lengths[packs[-1][0]]
        while fitting := bisect_right(left, room, key=lambda index: lengths[index]):
            packs[-1].append(left.pop(fitting - 1))
            room -= lengths[packs[-1][-1]]
    return packs


def prefill_chunks(
    model: Model, chunks: Sequence[Sequence[int]], prefix: Sequence[int] = (), alone: bool = False
) -> Iterator[tuple[int, ChunkKV]]:
    """Compute each chunk on its own, from position 0 on; yields (index of the chunk, its KV) as they are ready.

    Linear layers see the tokens of a whole pack, as one large product; attention and rotation see each chunk alone.
    `prefix` (sinks) comes before every chunk, and its KV is dropped. `alone`: every chunk has a forward of its own.
    """
    lengths = [len(prefix) + len(chunk) for chunk in chunks]
    for pack in plan_packs(lengths, 1 if alone else pack_tokens(model)):
        own = [lengths[index] for index in pack]
        tokens = torch.tensor([[token for index in pack for token in (*prefix, *chunks[index])]])
        layers = _prefill(model.stack, tokens, model.stack.pack_tables(own), Pack(tuple(own)))
        for index, end in zip(pack, accumulate(own), strict=True):
            rows = slice(end - len(chunks[index]), end)
            yield index, [(key[0, :, rows], value[0, :, rows]) for key, value in layers]


def prefill_batch(stack: LayerStack, tokens: Tensor) -> list[LayerKV]:
    """Run token ids of equal length, int64 [batch, length]: per layer un-rotated K and V."""
    length = tokens.shape[1]
    return _prefill(stack, tokens, stack.rotary_tables(torch.arange(length, device=stack.device)), (Run(0, 0, length),))


def _prefill(stack: LayerStack, tokens: Tensor, tables: RotaryTables, runs: tuple[Run, ...] | Pack) -> list[LayerKV]:
    """Un-rotated K and V of every layer, [batch, kv_heads, rows, head_dim]. Of the last one no more is computed."""
    cache = CapturingCache(stack, tables)
    hidden, last = stack.embed(tokens.to(stack.device)), stack.num_layers - 1
    for layer in range(last):
        hidden = stack.layer(layer, hidden, cache, tables, runs)
    return [*cache.layers, stack.project(last, hidden, tables)]
