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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pictool.runtime.products import onednn_linear, onednn_wins
from pictool.runtime.rope import Rope, RotaryTable
from pictool.runtime.tensors import to_device

NAME = "pictool"
_MAX_SCORES = 1 << 20  # rows × keys of one block: its mask, or a KV head's scores, should stay in the caches
_MAX_FUSED = 1 << 18  # of one block of the fused kernel on a CPU, which is fastest with few
_MAX_ON_DEVICE = 1 << 24  # of one block of the fused kernel on an accelerator: each takes a dozen launches
_MOST_ROWS, _MOST_ROWS_ON_DEVICE = 256, 1024  # of a block
_MIN_PRODUCT = 1 << 18  # scores of a KV head: with fewer the fused kernel is as fast


class Run(NamedTuple):
    """Consecutive rows: [row, row + end - start) of the hidden states are at the positions [start, end)."""

    row: int
    start: int
    end: int


Bounds = NDArray[np.int64]  # [runs, 3], of each run what `Run` has: there may be thousands


@dataclass(frozen=True)
class Rows:
    """Which positions of the prompt the hidden states are."""

    positions: Tensor  # int64 [rows], ascending
    bounds: Bounds

    @classmethod
    def of(cls, positions: Tensor) -> Rows:
        """Group ascending positions (on the CPU) into runs; they move to the device with `to`."""
        at = positions.numpy()
        first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
        lengths = np.diff(first, append=len(at))
        return cls(positions, np.stack([first, at[first], at[first] + lengths], 1))

    @classmethod
    def one(cls, positions: Tensor, start: int, end: int) -> Rows:
        """The positions [start, end), which are given on the device."""
        return cls(positions, bounds_of(Run(0, start, end)))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(itertools.starmap(Run, self.bounds.tolist()))

    def before(self, position: int) -> int:
        """How many of the rows are before a position; the device is not asked."""
        _, start, end = self.bounds.T
        return int((np.minimum(end, position) - start).clip(0).sum())

    def split(self, size: int) -> list[Rows]:
        """The same rows, `size` at a time."""
        return [Rows.of(positions) for positions in torch.split(self.positions, size)]

    def to(self, device: torch.device | str) -> Rows:
        return Rows(self.positions.to(device), self.bounds)


def bounds_of(*runs: Run) -> Bounds:
    """The bounds of runs."""
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


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
    table: RotaryTable | None  # of the rows; None if queries are rotated already
    runs: tuple[Run, ...] | Bounds | Pack
    on_scores: Callable[[Tensor], None] | None = None  # called with the scores, float32 [batch, heads, rows, n]
    chunk: int | None = None  # chunked attention (Llama 4): a row sees none before the last multiple of it


@dataclass(frozen=True)
class Scoring:
    """How a layer's scores become weights, as the layer says it.

    A row at p sees the keys (p - window, p], and none before the last multiple of `chunk`. `sinks` [heads] are learned
    scores beside those of the keys: they take their part of the softmax, and have no value (gpt-oss).
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    @property
    def is_explicit(self) -> bool:
        """Whether no fused kernel computes it."""
        return self.softcap is not None or self.sinks is not None

    def sees_all(self, num_keys: int) -> bool:
        """Whether the window hides none of so many keys."""
        return not self.window or num_keys <= self.window

    def first_key(self, position: int) -> int:
        """The first key that a row at a position sees."""
        return max(0, position - self.window + 1) if self.window else 0


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
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` over rotated `key` and `value`, whose column j is position j (but in a pack).

    `query` is [batch, heads, rows, head_dim], `key` is [batch, kv_heads, n, head_dim] and `value`
    [batch, kv_heads, n, value_dim]. Returns [batch, rows, heads, value_dim], as transformers' attention functions do.
    """
    query = query if pic.table is None else pic.rope.rotate_query(query, pic.table)
    scoring = Scoring(scaling, sliding_window, softcap, s_aux, pic.chunk)
    if isinstance(pic.runs, Pack):
        assert pic.on_scores is None
        out = _each_sequence(query, key, value, pic.runs, scoring)
    else:
        runs = pic.runs if isinstance(pic.runs, np.ndarray) else bounds_of(*pic.runs)
        if pic.on_scores is not None:
            pic.on_scores(_all_scores(query, key, runs, scoring))
        out = _all_runs(query, key, value, runs, scoring)
    return out.transpose(1, 2).contiguous(), None


def _each_sequence(query: Tensor, key: Tensor, value: Tensor, pack: Pack, scoring: Scoring) -> Tensor:
    """Attention [batch, heads, rows, value_dim] within each sequence of a pack. Neighbours as long are a batch."""
    batch, num_before, row, out = len(query), key.shape[2] - query.shape[2], 0, _empty_output(query, value)
    for length, same in itertools.groupby(pack.lengths):
        count = len(list(same))
        rows = slice(row, row + count * length)
        own, runs = _sequences(query, 0, rows, count), bounds_of(Run(0, num_before, num_before + length))
        own_key, own_value = (_sequences(tensor, num_before, rows, count) for tensor in (key, value))
        attended = _all_runs(own, own_key, own_value, runs, scoring)
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


def _all_runs(query: Tensor, key: Tensor, value: Tensor, runs: Bounds, scoring: Scoring) -> Tensor:
    """Attention [batch, heads, rows, value_dim] of rotated queries in runs."""
    if scoring.chunk is not None:
        return _each_chunk(query, key, value, runs, scoring)
    out = _empty_output(query, value)
    is_cut = scoring.is_explicit or _is_by_products(query, key)
    for block in _blocks(runs, scoring, is_cut, _block_size(query, key, scoring)):
        row, start, _ = block[0].tolist()
        last_row, last_start, end = block[-1].tolist()
        rows, first = slice(row, last_row + end - last_start), scoring.first_key(start)
        attended = _rectangle(
            query[:, :, rows], key[:, :, first:end], value[:, :, first:end], block[:, 1:] - first, scoring
        )
        if rows == slice(0, query.shape[2]):
            return attended
        out[:, :, rows] = attended
    return out


def _each_chunk(query: Tensor, key: Tensor, value: Tensor, runs: Bounds, scoring: Scoring) -> Tensor:
    """As `_all_runs`, of chunked attention: the rows in a chunk see its own keys alone."""
    assert scoring.chunk is not None
    out, within, chunk = _empty_output(query, value), replace(scoring, chunk=None), scoring.chunk
    cut = _cut_at_chunks(runs, chunk)
    for start, own in itertools.groupby(cut, lambda run: run.start - run.start % chunk):
        parts = tuple(own)
        rows = slice(parts[0].row, parts[-1].row + parts[-1].end - parts[-1].start)
        shifted = bounds_of(*(Run(run.row - rows.start, run.start - start, run.end - start) for run in parts))
        keys = slice(start, parts[-1].end)
        out[:, :, rows] = _all_runs(query[:, :, rows], key[:, :, keys], value[:, :, keys], shifted, within)
    return out


def _cut_at_chunks(runs: Bounds, chunk: int) -> Iterator[Run]:
    """The runs, cut at the borders of attention chunks."""
    for run in itertools.starmap(Run, runs.tolist()):
        start = run.start
        while start < run.end:
            end = min(start - start % chunk + chunk, run.end)
            yield Run(run.row + start - run.start, start, end)
            start = end


def _empty_output(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def _is_by_products(query: Tensor, key: Tensor) -> bool:
    num_scores = query.shape[2] * (query.shape[1] // key.shape[1]) * key.shape[2]
    is_float = (query.device.type, query.dtype) == ("cpu", torch.float32)
    return is_float and num_scores >= _MIN_PRODUCT and onednn_wins()


@dataclass(frozen=True)
class BlockSize:
    """How many rows × keys a block should have, and how many rows at most."""

    scores: int
    rows: int = _MOST_ROWS

    def most_rows(self, num_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of a block over so many keys."""
        return np.clip(self.scores // num_keys, 16, self.rows)


def _block_size(query: Tensor, key: Tensor, scoring: Scoring) -> BlockSize:
    if _is_by_products(query, key):
        return BlockSize(_MAX_SCORES // (query.shape[1] // key.shape[1]))  # those of all heads of a KV head
    if scoring.is_explicit:
        return BlockSize(_MAX_SCORES)
    return BlockSize(_MAX_FUSED) if query.device.type == "cpu" else BlockSize(_MAX_ON_DEVICE, _MOST_ROWS_ON_DEVICE)


def _blocks(runs: Bounds, scoring: Scoring, is_cut: bool, size: BlockSize) -> Iterator[Bounds]:
    """Cut and join runs to blocks.

    Args:
        is_cut: whether a plain causal square is, too; the fused kernel takes it whole.
    """
    if len(runs) and runs[0, 1] == 0 and not is_cut and scoring.sees_all(runs[0, 2]):
        yield runs[:1]  # nothing is before it
        runs = runs[1:]
    parts, index = _cut(runs, scoring.window, size), 0
    while index < len(parts):
        block = _fitting(parts[index : index + size.rows], scoring, size)
        yield block
        index += len(block)


def _cut(runs: Bounds, window: int | None, size: BlockSize) -> Bounds:
    """The runs, cut to parts that are short enough for a block."""
    row, start, end = runs.T
    step = size.most_rows(np.minimum(end, window + 128) if window else end)
    counts = -(-(end - start) // step)
    if (counts == 1).all():
        return runs
    skipped = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * np.repeat(step, counts)
    row, start, end, step = (np.repeat(each, counts) for each in (row, start, end, step))
    return np.stack([row + skipped, start + skipped, np.minimum(start + skipped + step, end)], 1)


def _fitting(parts: Bounds, scoring: Scoring, size: BlockSize) -> Bounds:
    """The first parts that are a block together: few rows, and in a window few keys that no row of it sees."""
    row, start, end = parts.T
    num_rows, num_keys = row + end - start - row[0], end - scoring.first_key(int(start[0]))
    fits = num_rows <= size.most_rows(num_keys)
    if scoring.window:
        fits &= num_keys <= 2 * scoring.window + 128
    fits[0] = True
    return parts if fits.all() else parts[: int(fits.argmin())]


def _rectangle(query: Tensor, key: Tensor, value: Tensor, spans: Bounds, scoring: Scoring) -> Tensor:
    """Attention [batch, heads, rows, value_dim] of rows at `spans` [spans, 2] of the keys, the last at the last key."""
    rows, num_keys, scaling = query.shape[2], key.shape[2], scoring.scaling
    if rows == num_keys and not scoring.is_explicit and scoring.sees_all(num_keys):
        return scaled_dot_product_attention(query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=True)
    mask = _mask(spans, num_keys, scoring.window, query)
    if _is_by_products(query, key):
        return _by_products(query, key, value, mask, scoring)
    if not scoring.is_explicit:
        return _attend_by_group(query, key, value, mask, scaling)
    return _explicit(query, key, value, mask, scoring)


def _attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax attention, [batch · group, kv_heads, rows, value_dim] inside: no copy of keys or mask per query head."""
    batch, num_heads, rows, dim = query.shape
    group = num_heads // key.shape[1]
    if mask is None:  # one row per head, or so: those of a KV head read its keys together
        folded = query.reshape(batch, key.shape[1], group * rows, dim)
        out = scaled_dot_product_attention(folded, key, value, scale=scaling)
        return out.reshape(batch, num_heads, rows, value.shape[3])
    apart = query.reshape(batch, key.shape[1], group, rows, dim).transpose(1, 2).flatten(0, 1)
    key, value = (tensor[:, None].expand(-1, group, -1, -1, -1).flatten(0, 1) for tensor in (key, value))
    out = scaled_dot_product_attention(apart, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, group, -1, rows, out.shape[-1]).transpose(1, 2).reshape(batch, num_heads, rows, -1)


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Softmax attention by two of oneDNN's products for each KV head, whose query heads read its keys together."""
    batch, num_heads, rows, dim = query.shape
    by_group = (batch, key.shape[1], num_heads // key.shape[1], rows, dim)
    out, weights = query.new_empty(*by_group[:4], value.shape[3]), query.new_empty(by_group[2] * rows, key.shape[2])
    for sequence, head in itertools.product(range(batch), range(key.shape[1])):
        folded = query.view(by_group)[sequence, head].reshape(-1, dim) * (scoring.scaling or dim**-0.5)
        scores = onednn_linear(folded, key[sequence, head])
        if scoring.softcap is not None:
            scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        if mask is not None:
            scores.view(-1, *mask.shape).add_(mask)
        if scoring.sinks is None:
            torch.softmax(scores, -1, out=weights)
        else:
            sinks = scoring.sinks.view(key.shape[1], -1)[head].repeat_interleave(rows)
            weights.copy_(_softmax_with_sinks(scores, sinks[:, None]))
        attended = onednn_linear(weights, value[sequence, head].mT)
        out[sequence, head] = attended.view(out.shape[2:])
    return out.view(batch, num_heads, rows, -1)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Weights [..., n] in float32 beside one more score per row, [..., 1], which has none of the values."""
    both = torch.cat([scores.float(), sinks.float().expand(*scores.shape[:-1], 1)], -1)
    return both.softmax(-1)[..., :-1]


def _mask(spans: Bounds, num_keys: int, window: int | None, like: Tensor) -> Tensor | None:
    """Additive mask [rows, num_keys]: a row at p sees the keys (p - window, p]; None if all rows see all keys."""
    late = int(spans[0, 0])  # the keys up to here are hidden from no row, but by the window
    if late == num_keys - 1 and (not window or num_keys <= window):
        return None
    position = _positions(spans, like.device)[:, None]
    mask = torch.zeros(len(position), num_keys, dtype=like.dtype, device=like.device)
    index = torch.arange(num_keys, device=like.device)
    mask[:, late:].masked_fill_(index[late:] > position, float("-inf"))
    return mask.masked_fill_(index <= position - window, float("-inf")) if window else mask


def _positions(spans: Bounds, device: torch.device) -> Tensor:
    """The positions in the spans, int64 [rows]; of one span without a copy, for which a device would be waited for."""
    starts, ends = spans.T
    if len(spans) == 1:
        return torch.arange(int(starts[0]), int(ends[0]), device=device)
    lengths = ends - starts
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return to_device(first + np.arange(len(first)), device)


def _explicit(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention that no fused kernel computes.

    Gemma 2 squashes scores to (-softcap, softcap) before the mask; gpt-oss has sinks beside them.
    """
    batch, num_heads, rows, dim = query.shape
    folded = query.reshape(batch, key.shape[1], -1, dim)
    scores = _scores(folded, key, scoring)
    if mask is not None:
        scores.view(*scores.shape[:2], -1, rows, scores.shape[-1]).add_(mask)
    if scoring.sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        sinks = scoring.sinks.view(key.shape[1], -1).repeat_interleave(rows, 1)
        weights = _softmax_with_sinks(scores, sinks[None, :, :, None])
    return (weights.to(query.dtype) @ value).view(batch, num_heads, rows, -1)


def _scores(query: Tensor, key: Tensor, scoring: Scoring) -> Tensor:
    scores = query @ key.mT * (scoring.scaling or query.shape[-1] ** -0.5)
    return scores if scoring.softcap is None else torch.tanh(scores / scoring.softcap) * scoring.softcap


def _all_scores(query: Tensor, key: Tensor, runs: Bounds, scoring: Scoring) -> Tensor:
    """The scores whose softmax `attend` weighs values with, in float32; -inf at keys that a row does not see.

    Learned sinks are not among them: the softmax of the scores is how a row shares out what it gives to keys.
    """
    batch, heads, rows, dim = query.shape
    query, key = query.float(), key.float()
    out = query.new_full((batch, heads, rows, key.shape[2]), float("-inf"))
    cut = itertools.starmap(Run, runs.tolist()) if scoring.chunk is None else _cut_at_chunks(runs, scoring.chunk)
    for run in cut:
        at = slice(run.row, run.row + run.end - run.start)
        folded = query[:, :, at].reshape(batch, key.shape[1], -1, dim)
        scores = _scores(folded, key[:, :, : run.end], scoring).view(batch, heads, -1, run.end)
        mask = _mask(bounds_of(run)[:, 1:], run.end, scoring.window, scores)
        out[:, :, at, : run.end] = scores if mask is None else scores + mask
        if scoring.chunk is not None:
            out[:, :, at, : run.start - run.start % scoring.chunk] = float("-inf")
    return out


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
