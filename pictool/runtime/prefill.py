"""Prefill of isolated chunks: what compiling runs. Many short chunks share one forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pictool.runtime.attention import Run
from pictool.runtime.caches import CapturingCache, LayerKV
from pictool.runtime.device import is_accelerator
from pictool.runtime.stack import LayerStack
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from pictool.runtime.model import Model

ChunkKV = list[LayerKV]  # per layer: un-rotated key and value, [kv_heads, tokens, head_dim]

# Tokens of one forward: enough to fill the arithmetic units; more costs a CPU its caches (docs/studies/benchmarks.md).
_BATCH_TOKENS, _ON_ACCELERATOR = 512, 8192
_MIN_FILL = 0.8  # of a batch's cells that hold tokens, not padding


def batch_tokens(model: Model) -> int:
    """Tokens of one forward on the model's device."""
    return _ON_ACCELERATOR if is_accelerator(model.stack.device) else _BATCH_TOKENS


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of chunks that are computed together: of similar length, within a budget of tokens and of padding."""
    batches: list[list[int]] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[batches[-1][0]] if batches else 0
        cells = longest * (len(batches[-1]) + 1) if batches else 0
        filled += lengths[index]
        if not batches or cells > max_tokens or filled < _MIN_FILL * cells:
            batches.append([])
            filled = lengths[index]
        batches[-1].append(index)
    return batches


def prefill_chunks(
    model: Model, chunks: Sequence[Sequence[int]], prefix: Sequence[int] = (), alone: bool = False
) -> Iterator[tuple[int, ChunkKV]]:
    """Compute each chunk on its own, from position 0 on; yields (index of the chunk, its KV) as they are ready.

    `prefix` (sinks) comes before every chunk, and its KV is dropped. Padding comes after a chunk, so no token sees it.
    `alone`: every chunk has a forward of its own.
    """
    lengths = [len(prefix) + len(chunk) for chunk in chunks]
    # Padding would change the frequencies of a RoPE that depends on the length: such chunks go alone.
    budget = 1 if alone or depends_on_length(model.config) else batch_tokens(model)
    for batch in plan_batches(lengths, budget):
        layers = _prefill(model.stack, [[*prefix, *chunks[index]] for index in batch])
        for row, index in enumerate(batch):
            end = len(prefix) + len(chunks[index])
            yield index, [(k[row, :, len(prefix) : end], v[row, :, len(prefix) : end]) for k, v in layers]


def _prefill(stack: LayerStack, tokens: Sequence[Sequence[int]]) -> list[LayerKV]:
    """Pad sequences to the longest and run them: per layer un-rotated K and V, [batch, kv_heads, longest, head_dim]."""
    length = max(map(len, tokens))
    return prefill_padded(stack, torch.tensor([[*row, *[row[-1]] * (length - len(row))] for row in tokens]))


def prefill_padded(stack: LayerStack, tokens: Tensor) -> list[LayerKV]:
    """Run token ids of equal length, int64 [batch, length]: per layer un-rotated K and V."""
    length = tokens.shape[1]
    tables = stack.rotary_tables(torch.arange(length, device=stack.device))
    cache = CapturingCache(stack, tables)
    stack.layers(stack.embed(tokens.to(stack.device)), cache, tables, (Run(0, 0, length),))
    return cache.layers
