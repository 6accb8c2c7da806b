"""Exact causal attention of scattered rows (docs/design.md §2 rule 5), as one of transformers' attention functions.

Rows come in runs: consecutive positions [start, end) of the prompt. A run attends to the keys [0, end), a causal
rectangle whose last columns are a triangle. A bottom-right mask over all rows at once would be wrong for scattered
rows; here the mask is by position. Long runs are cut and short ones joined to blocks of some hundred rows, each with
a mask of its own, so memory stays O(rows + keys). Where oneDNN's products are the fastest (`products`), blocks are
smaller, and a KV head's scores are one product.

The rows may also be a pack: whole sequences, one after the other, each of which attends to itself alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pictool.runtime.products import onednn_linear, onednn_wins
from pictool.runtime.rope import Rope, RotaryTable

NAME = "pictool"
_MAX_SCORES = 1 << 20  # rows × keys of one block: its mask, or a KV head's scores, should stay in the caches
_MIN_PRODUCT = 1 << 18  # scores of a KV head: with fewer the fused kernel is as fast


@dataclass(frozen=True)
class Run:
    """Consecutive rows: [row, row + end - start) of the hidden states are at the positions [start, end)."""

    row: int
    start: int
    end: int


@dataclass(frozen=True)
class Rows:
    """Which positions of the prompt the hidden states are."""

    positions: Tensor  # int64 [rows], ascending
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, positions: Tensor) -> Rows:
        """Group ascending positions (on the CPU) into runs; they move to the device with `to`."""
        breaks = (torch.diff(positions) != 1).nonzero().flatten() + 1
        bounds = [0, *breaks.tolist(), len(positions)]
        runs = []
        for first, last in itertools.pairwise(bounds):
            if first < last:
                start = int(positions[first])
                runs.append(Run(first, start, start + last - first))
        return cls(positions, tuple(runs))

    def split(self, size: int) -> list[Rows]:
        """The same rows, `size` at a time."""
        return [Rows.of(positions) for positions in torch.split(self.positions, size)]

    def to(self, device: torch.device | str) -> Rows:
        return Rows(self.positions.to(device), self.runs)


@dataclass(frozen=True)
class Pack:
    """Rows that are sequences of these lengths, one after the other. No sequence sees another one.

    Each attends to itself, and to the keys that are before those of all rows, if there are any.
    """

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """What the attention function must know of one pass over one layer."""

    rope: Rope
    table: RotaryTable  # of the rows
    runs: tuple[Run, ...] | Pack
    on_scores: Callable[[Tensor], None] | None = None  # called with the scores, float32 [batch, heads, rows, n]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pic: Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of un-rotated `query` over rotated `key` and `value`, whose column j is position j (but in a pack).

    `query` is [batch, heads, rows, head_dim], `key` and `value` are [batch, kv_heads, n, head_dim]. Returns
    [batch, rows, heads, head_dim], as transformers' attention functions do.
    """
    query = pic.rope.rotate(query, pic.table)
    if isinstance(pic.runs, Pack):
        assert pic.on_scores is None
        out = _each_sequence(query, key, value, pic.runs, scaling, sliding_window, softcap)
    else:
        if pic.on_scores is not None:
            pic.on_scores(_all_scores(query, key, pic.runs, scaling, sliding_window, softcap))
        out = _all_runs(query, key, value, pic.runs, scaling, sliding_window, softcap)
    return out.transpose(1, 2).contiguous(), None


def _each_sequence(
    query: Tensor, key: Tensor, value: Tensor, pack: Pack,
    scaling: float | None, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention [batch, heads, rows, head_dim] within each sequence of a pack. Neighbours of one length are a batch."""
    batch, num_before, row, out = len(query), key.shape[2] - query.shape[2], 0, torch.empty_like(query)
    for length, same in itertools.groupby(pack.lengths):
        count = len(list(same))
        rows = slice(row, row + count * length)
        own, runs = _sequences(query, 0, rows, count), (Run(0, num_before, num_before + length),)
        own_key, own_value = (_sequences(tensor, num_before, rows, count) for tensor in (key, value))
        attended = _all_runs(own, own_key, own_value, runs, scaling, window, softcap)
        out[:, :, rows] = attended.view(batch, count, *attended.shape[1:]).transpose(1, 2).flatten(2, 3)
        row = rows.stop
    return out


def _sequences(tensor: Tensor, num_before: int, rows: slice, count: int) -> Tensor:
    """The `rows` after the first `num_before`, cut into `count` sequences, each after those before all.

    [batch, heads, n, head_dim] → [batch · count, heads, num_before + length, head_dim]
    """
    batch, heads, _, dim = tensor.shape
    apart = tensor[:, :, num_before:][:, :, rows].view(batch, heads, count, -1, dim).transpose(1, 2)
    if num_before:
        before = tensor[:, None, :, :num_before].expand(-1, count, -1, -1, -1)
        apart = torch.cat([before, apart], 3)
    return apart.flatten(0, 1)


def _all_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: tuple[Run, ...],
    scaling: float | None, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention [batch, heads, rows, head_dim] of rotated queries in runs."""
    out = torch.empty_like(query)
    by_products = _is_by_products(query, key)
    scores = query.shape[1] // key.shape[1] if by_products else 1  # in memory: products have those of a KV head
    for block in _blocks(runs, window, softcap is not None or by_products, scores):
        rows = slice(block[0].row, block[-1].row + block[-1].end - block[-1].start)
        first = _first_key(block[0].start, window)
        out[:, :, rows] = _rectangle(
            query[:, :, rows], key[:, :, first : block[-1].end], value[:, :, first : block[-1].end],
            [(run.start - first, run.end - first) for run in block], scaling, window, softcap,
        )  # fmt: skip
    return out


def _first_key(position: int, window: int | None) -> int:
    return max(0, position - window + 1) if window else 0


def _is_by_products(query: Tensor, key: Tensor) -> bool:
    num_scores = query.shape[2] * (query.shape[1] // key.shape[1]) * key.shape[2]
    is_float = (query.device.type, query.dtype) == ("cpu", torch.float32)
    return is_float and num_scores >= _MIN_PRODUCT and onednn_wins()


def _blocks(runs: tuple[Run, ...], window: int | None, is_cut: bool, scores: int) -> Iterator[list[Run]]:
    """Cut and join runs to blocks whose scores, so many a row and key, are few.

    Args:
        is_cut: whether a plain causal square is, too; the fused kernel takes it whole.
    """
    block: list[Run] = []
    for run in runs:
        if run.start == 0 and not is_cut and (not window or run.end <= window):
            yield [run]  # the first of all runs: nothing is before it
            continue
        for part in _cut(run, window, scores):
            if block and not _fits(block, part, window, scores):
                yield block
                block = []
            block.append(part)
    if block:
        yield block


def _cut(run: Run, window: int | None, scores: int) -> Iterator[Run]:
    """Parts of a run that are short enough for a block."""
    step = _most_rows(min(run.end, window + 128) if window else run.end, scores)
    for start in range(run.start, run.end, step):
        yield Run(run.row + start - run.start, start, min(start + step, run.end))


def _fits(block: list[Run], part: Run, window: int | None, scores: int) -> bool:
    """Whether a part may join a block: few rows, and in a window few keys that no row of it sees."""
    num_rows = part.row + part.end - part.start - block[0].row
    num_keys = part.end - _first_key(block[0].start, window)
    return num_rows <= _most_rows(num_keys, scores) and (not window or num_keys <= 2 * window + 128)


def _most_rows(num_keys: int, scores: int) -> int:
    return max(16, min(256, _MAX_SCORES // (num_keys * scores)))


def _rectangle(
    query: Tensor, key: Tensor, value: Tensor, spans: list[tuple[int, int]],
    scaling: float | None, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention [batch, heads, rows, head_dim] of rows at the `spans` of the keys; the last row is at the last key."""
    rows, num_keys = query.shape[2], key.shape[2]
    if spans[0][0] == 0 and rows == num_keys and softcap is None and (not window or num_keys <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=True)
    mask = _mask(spans, num_keys, window, query)
    if _is_by_products(query, key):
        return _by_products(query, key, value, mask, scaling, softcap)
    if softcap is None:
        return _attend_by_group(query, key, value, mask, scaling)
    return _softcapped(query, key, value, mask, scaling, softcap)


def _attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax attention, [batch · group, kv_heads, rows, head_dim] inside: no copy of keys or mask per query head."""
    batch, num_heads, rows, dim = query.shape
    group = num_heads // key.shape[1]
    if mask is None:  # one row per head, or so: those of a KV head read its keys together
        folded = query.reshape(batch, key.shape[1], group * rows, dim)
        return scaled_dot_product_attention(folded, key, value, scale=scaling).view(query.shape)
    apart = query.reshape(batch, key.shape[1], group, rows, dim).transpose(1, 2).flatten(0, 1)
    key, value = (tensor[:, None].expand(-1, group, -1, -1, -1).flatten(0, 1) for tensor in (key, value))
    out = scaled_dot_product_attention(apart, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, group, -1, rows, dim).transpose(1, 2).reshape(query.shape)


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Softmax attention by two of oneDNN's products for each KV head, whose query heads read its keys together."""
    batch, num_heads, rows, dim = query.shape
    by_group = (batch, key.shape[1], num_heads // key.shape[1], rows, dim)
    out, weights = query.new_empty(by_group), query.new_empty(by_group[2] * rows, key.shape[2])
    for sequence, head in itertools.product(range(batch), range(key.shape[1])):
        folded = query.view(by_group)[sequence, head].reshape(-1, dim) * (scaling or dim**-0.5)
        scores = onednn_linear(folded, key[sequence, head])
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores.view(-1, *mask.shape).add_(mask)
        torch.softmax(scores, -1, out=weights)
        attended = onednn_linear(weights, value[sequence, head].mT)
        out[sequence, head] = attended.view(by_group[2:])
    return out.view(query.shape)


def _mask(spans: list[tuple[int, int]], num_keys: int, window: int | None, like: Tensor) -> Tensor | None:
    """Additive mask [rows, num_keys]: a row at p sees the keys (p - window, p]; None if all rows see all keys."""
    if spans == [(num_keys - 1, num_keys)] and (not window or num_keys <= window):
        return None
    position = _positions(spans, like.device)[:, None]
    mask = torch.zeros(len(position), num_keys, dtype=like.dtype, device=like.device)
    index = torch.arange(num_keys, device=like.device)
    late = spans[0][0]  # the keys up to here are hidden from no row, but by the window
    mask[:, late:].masked_fill_(index[late:] > position, float("-inf"))
    return mask.masked_fill_(index <= position - window, float("-inf")) if window else mask


def _positions(spans: list[tuple[int, int]], device: torch.device) -> Tensor:
    """The positions in the spans, int64 [rows]."""
    starts, ends = np.asarray(spans).T
    lengths = ends - starts
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return torch.from_numpy(first + np.arange(len(first))).to(device)


def _softcapped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Gemma 2's attention: scores are squashed to (-softcap, softcap) before the mask; no fused kernel does that."""
    rows = query.shape[2]
    folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    scores = _scores(folded, key, scaling, softcap)
    if mask is not None:
        scores.view(*scores.shape[:2], -1, rows, scores.shape[-1]).add_(mask)
    return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).view(query.shape)


def _scores(query: Tensor, key: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    scores = query @ key.mT * (scaling or query.shape[-1] ** -0.5)
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _all_scores(
    query: Tensor, key: Tensor, runs: tuple[Run, ...],
    scaling: float | None, window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """The scores whose softmax `attend` weighs values with, in float32; -inf at keys that a row does not see."""
    batch, heads, rows, dim = query.shape
    query, key = query.float(), key.float()
    out = query.new_full((batch, heads, rows, key.shape[2]), float("-inf"))
    for run in runs:
        at = slice(run.row, run.row + run.end - run.start)
        folded = query[:, :, at].reshape(batch, key.shape[1], -1, dim)
        scores = _scores(folded, key[:, :, : run.end], scaling, softcap).view(batch, heads, -1, run.end)
        mask = _mask([(run.start, run.end)], run.end, window, scores)
        out[:, :, at, : run.end] = scores if mask is None else scores + mask
    return out


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
