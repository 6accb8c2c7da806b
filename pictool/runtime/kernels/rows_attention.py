"""Attention of scattered rows in one Triton kernel (design.md §2 rule 5): without a mask, lengths read on the device.

Query heads of a KV head are rows of one tile, which reads its keys once, with a running softmax (FlashAttention-2, Dao
2023). Where there are few tiles, each splits its keys among several programs, whose parts are joined by their maxima
and sums (Flash-Decoding). The grid depends on the number of rows alone, so one CUDA graph serves prompts of any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pictool.runtime.attention import Scoring

_PROGRAMS = 264  # two for each multiprocessor of an H100: with fewer tiles, keys are split
_MOST_SPLITS = 16
_TILE_BYTES = 32 << 10  # of a tile's queries, and of a block of its keys and values


@triton.jit
def _attend(
    Q: tl.tensor, K: tl.tensor, V: tl.tensor, POSITIONS: tl.tensor, BASE: tl.tensor, SINKS: tl.tensor,
    OUT: tl.tensor, SUMS: tl.tensor, rows: tl.tensor, q_head: tl.tensor, q_row: tl.tensor, k_head: tl.tensor,
    k_slot: tl.tensor, v_head: tl.tensor, v_slot: tl.tensor, scaling: tl.tensor, softcap: tl.tensor,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BASE: tl.constexpr, DIM: tl.constexpr, OUT_DIM: tl.constexpr, DIM_2: tl.constexpr, OUT_DIM_2: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of a KV head's rows over one share of its keys."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)  # of all rows of all query heads of the KV head
    row, head = line // GROUP, kv_head * GROUP + line % GROUP
    exists = row < rows
    position = tl.load(POSITIONS + row, mask=exists, other=-1).to(tl.int32)
    dim, out_dim, offset = tl.arange(0, DIM_2), tl.arange(0, OUT_DIM_2), tl.arange(0, BLOCK)
    query = tl.load(
        Q + head[:, None] * q_head + row[:, None] * q_row + dim[None, :],
        mask=exists[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    K += kv_head.to(tl.int64) * k_head  # a pool may have more numbers than an int32 counts
    V += kv_head.to(tl.int64) * v_head
    if HAS_BASE:
        base = tl.load(BASE)
        K += base * k_slot
        V += base * v_slot
    # Of a row the keys [lowest, position] are visible, of the tile those of [begin, end).
    lowest = tl.zeros_like(position)
    if WINDOW > 0:
        lowest = tl.maximum(position - WINDOW + 1, 0)
    if CHUNK > 0:
        lowest = tl.maximum(lowest, position - position % CHUNK)
    end = tl.max(position, 0) + 1
    begin = tl.min(tl.where(exists, lowest, end), 0) // BLOCK * BLOCK
    first_position = tl.min(tl.where(exists, position, end), 0)
    last_lowest = tl.max(tl.where(exists, lowest, 0), 0)
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK), SPLITS) * BLOCK
    begin += split * share
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, OUT_DIM_2], tl.float32)
    for start in range(begin, tl.minimum(end, begin + share), BLOCK):
        slot = start + offset
        # What is after the tile's last position may be anything, not a number too.
        key = tl.load(
            K + slot[None, :] * k_slot + dim[:, None], mask=(slot < end)[None, :] & (dim < DIM)[:, None], other=0.0
        )
        scores = tl.dot(query, key, input_precision="ieee") * scaling
        if HAS_CAP:
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # softcap · tanh(scores / softcap)
        if (start + BLOCK - 1 > first_position) | (start < last_lowest):
            is_seen = (slot[None, :] <= position[:, None]) & (slot[None, :] >= lowest[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - finite[:, None])
        kept = tl.exp(largest - finite)
        value = tl.load(
            V + slot[:, None] * v_slot + out_dim[None, :],
            mask=(slot < end)[:, None] & (out_dim < OUT_DIM)[None, :], other=0.0,
        )  # fmt: skip
        total = total * kept + tl.sum(weights, 1)
        out = out * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = larger
    heads = tl.num_programs(1) * GROUP
    at = (split * rows + row) * heads + head
    if SPLITS > 1:
        tl.store(SUMS + at * 2, largest, mask=exists)
        tl.store(SUMS + at * 2 + 1, total, mask=exists)
    else:
        if HAS_SINKS:
            sink = tl.load(SINKS + head, mask=exists, other=0.0).to(tl.float32)
            larger = tl.maximum(largest, sink)
            total = total * tl.exp(largest - larger) + tl.exp(sink - larger)
            out = out * tl.exp(largest - larger)[:, None]
        out = out / total[:, None]
    mask = exists[:, None] & (out_dim < OUT_DIM)[None, :]
    tl.store(OUT + at[:, None] * OUT_DIM + out_dim[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _join(
    PARTS: tl.tensor, SUMS: tl.tensor, SINKS: tl.tensor, OUT: tl.tensor, lines: tl.tensor, heads: tl.tensor,
    HAS_SINKS: tl.constexpr, OUT_DIM: tl.constexpr, OUT_DIM_2: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one head, from its parts over shares of the keys."""
    line = tl.program_id(0)
    part, out_dim = tl.arange(0, SPLITS) * lines + line, tl.arange(0, OUT_DIM_2)
    largest, total = tl.load(SUMS + part * 2), tl.load(SUMS + part * 2 + 1)
    larger = tl.max(largest, 0)
    if HAS_SINKS:
        sink = tl.load(SINKS + line % heads).to(tl.float32)
        larger = tl.maximum(larger, sink)
    weights = tl.exp(largest - larger)
    whole = tl.sum(total * weights, 0)
    if HAS_SINKS:
        whole += tl.exp(sink - larger)
    mask = out_dim < OUT_DIM
    parts = tl.load(PARTS + part[:, None] * OUT_DIM + out_dim[None, :], mask=mask[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / whole
    tl.store(OUT + line * OUT_DIM + out_dim, out.to(OUT.dtype.element_ty), mask=mask)


def rows_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scoring: Scoring, base: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention of rows at scattered positions over the keys before them, and their own.

    Args:
        query: [1, heads, rows, dim]. key, value: [1, kv_heads, slots, dim], [1, kv_heads, slots, value_dim], rotated;
            the last dimension of all three is contiguous. Slots after a tile's last position are not read.
        positions: int64 [rows], ascending, on the device.
        base: int64 [1] on the device, the slot of position 0; None: the first slot.
        splits: into how many parts keys are split, a power of two; None: by the number of rows.

    Returns:
        [1, rows, heads, value_dim], as transformers' attention functions.
    """
    (_, heads, rows, dim), (_, kv_heads, _, out_dim), group = query.shape, value.shape, query.shape[1] // key.shape[1]
    assert len(query) == 1 and query.stride(3) == key.stride(3) == value.stride(3) == 1
    dim_2, out_dim_2 = padded(dim), padded(out_dim)
    tile = min(padded(rows * group), largest_power(64, _TILE_BYTES // (dim_2 * query.itemsize)))
    block = largest_power(64, _TILE_BYTES // ((dim_2 + out_dim_2) * key.itemsize))
    tiles = -(-rows * group // tile)
    splits = num_splits(tiles * kv_heads) if splits is None else splits
    out = query.new_empty(1, rows, heads, out_dim)
    parts, sums, no_numbers = out, out, positions
    if splits > 1:
        parts = torch.empty(splits, rows, heads, out_dim, dtype=torch.float32, device=query.device)
        sums = parts.new_empty(splits, rows, heads, 2)
    sinks, softcap = scoring.sinks, scoring.softcap
    given_sinks = no_numbers if sinks is None else sinks
    _attend[(tiles, kv_heads, splits)](
        query, key, value, positions, no_numbers if base is None else base, given_sinks, parts, sums,
        rows, *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3],
        dim**-0.5 if scoring.scaling is None else scoring.scaling, softcap or 0.0,
        GROUP=group, WINDOW=scoring.window or 0, CHUNK=scoring.chunk or 0, HAS_CAP=softcap is not None,
        HAS_SINKS=sinks is not None, HAS_BASE=base is not None, DIM=dim, OUT_DIM=out_dim, DIM_2=dim_2,
        OUT_DIM_2=out_dim_2, TILE=tile, BLOCK=block, SPLITS=splits, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](
            parts, sums, given_sinks, out, rows * heads, heads, HAS_SINKS=sinks is not None, OUT_DIM=out_dim,
            OUT_DIM_2=out_dim_2, SPLITS=splits, num_warps=1,
        )  # fmt: skip
    return out


def padded(width: int) -> int:
    """The power of two that a tile has for a width: a matrix product takes at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def largest_power(most: int, room: int) -> int:
    """The largest power of two up to both; 16 at least."""
    return max(16, 1 << min(most, room).bit_length() - 1)


def num_splits(tiles: int) -> int:
    """Into how many parts the keys of so many tiles are split."""
    return min(_MOST_SPLITS, 1 << max(1, _PROGRAMS // tiles).bit_length() - 1)
