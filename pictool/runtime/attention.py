"""Exact causal attention of scattered rows (docs/design.md §2 rule 5), as one of transformers' attention functions.

Rows come in runs: consecutive positions [start, end) of the prompt. A run attends to the keys [0, end), a causal
rectangle whose last columns are a triangle. A bottom-right mask over all rows at once would be wrong for scattered
rows; here the mask is by position. Memory stays O(rows + keys):

- On a CPU torch's fused kernel takes a run in two parts: the keys before it, which all its rows see, without a mask,
  and the triangle. The parts are joined by their log-sum-exps (FlashAttention, Dao et al. 2022, §3.1). Runs that are
  short and near each other share a mask over what is between them.
- Elsewhere, and where a window hides keys, long runs are cut and short ones joined to blocks of some hundred rows, each
  with a mask of its own.
- Where oneDNN's products are the fastest (`products`), blocks are smaller, and a KV head's scores are one product.

The rows may also be a pack: whole sequences, one after the other, each of which attends to itself alone. Or they are
static (`StaticRows`): only the device knows their positions, so that the layer can be a graph (`graphs/`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pictool.runtime.products import MIN_GAIN, best_seconds, gain_of, onednn_linear, onednn_wins
from pictool.runtime.rope import Rope, RotaryTable
from pictool.runtime.rows import Bounds, Pack, Run, bounds_of
from pictool.runtime.tensors import to_device

NAME = "pictool"
_MAX_SCORES = 1 << 20  # rows × keys of one block: its mask, or a KV head's scores, should stay in the caches
_MAX_FUSED = 1 << 18  # of one block of the fused kernel on a CPU under a window's mask, which is fastest with few
_MAX_MASKED = 1 << 14  # rows × keys of runs that are a block together, from the first row on
_MAX_ON_DEVICE = 1 << 24  # of one block of the fused kernel on an accelerator: each takes a dozen launches
_MOST_ROWS, _MOST_ROWS_ON_DEVICE = 256, 1024  # of a block
_MIN_PRODUCT = 1 << 18  # scores of a KV head: with fewer the fused kernel is as fast
_PROBE_ROWS, _PROBE_KEYS = 128, 2048

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # what SDPA calls, with its log-sum-exps


@dataclass(frozen=True, eq=False)
class StaticRows:
    """Rows of one sequence in tensors that stay, over a buffer of keys that may be longer than the prompt.

    Fields:
        positions: int64 [rows], on the device; the host does not know them.
        num_keys: of the buffer.
        masks: by window and chunk, additive [rows, num_keys]; those that a layer needs are added when it first runs.
        kernel: attention [batch, rows, heads, value_dim] of rotated queries without a mask; None: there is none here.
    """

    positions: Tensor
    num_keys: int
    masks: dict[tuple[int | None, int | None], Tensor]
    kernel: RowsKernel | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention [batch, rows, heads, value_dim] of the last rows, as many as there are queries."""
        rows = query.shape[2]
        if self.kernel is not None:
            return self.kernel(query, key, value, self.positions[-rows:], scoring)
        mask = self._mask(query, scoring)[-rows:]
        if scoring.is_explicit:
            return _explicit(query, key, value, mask, scoring).transpose(1, 2).contiguous()
        batch, num_heads, _, dim = query.shape
        if rows == 1:  # the query heads of a KV head read its keys together
            query = query.reshape(batch, key.shape[1], -1, dim)
            out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scoring.scaling)
            return out.reshape(batch, 1, num_heads, -1)
        query, by_group, values = _by_group(query, key, value)
        out = scaled_dot_product_attention(query, by_group, values, attn_mask=mask, scale=scoring.scaling)
        # [batch · group, kv_heads, rows, …] → [batch, rows, heads, …], at once
        out = out.view(batch, -1, key.shape[1], rows, out.shape[-1]).permute(0, 3, 2, 1, 4)
        return out.reshape(batch, rows, num_heads, -1)

    def write_masks(self) -> None:
        """Have the masks be those of the positions."""
        for (window, chunk), mask in self.masks.items():
            position, index = self.positions[:, None], torch.arange(self.num_keys, device=mask.device)
            hidden = index > position
            if window:
                hidden |= index <= position - window
            if chunk:
                hidden |= index < position - position % chunk
            mask.zero_().masked_fill_(hidden, float("-inf"))

    def _mask(self, like: Tensor, scoring: Scoring) -> Tensor:
        kind = scoring.window, scoring.chunk
        if kind not in self.masks:
            with torch.inference_mode(False):  # it outlives this layer
                size = len(self.positions), self.num_keys
                self.masks[kind] = torch.zeros(size, dtype=like.dtype, device=like.device)
            self.write_masks()
        return self.masks[kind]


Runs = tuple[Run, ...] | Bounds | Pack | StaticRows


@dataclass(frozen=True)
class Pass:
    """What the attention function must know of one pass over one layer."""

    rope: Rope
    table: RotaryTable | None  # of the rows; None if queries are rotated already
    runs: Runs
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


# (query, key, value, positions, scoring) → [batch, rows, heads, value_dim]
RowsKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Scoring], Tensor]


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
    if isinstance(pic.runs, StaticRows):
        assert pic.on_scores is None
        return pic.runs.attend(query, key, value, scoring), None
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
    for block in _blocks_of(query, key, value, runs, scoring):
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
    return is_float and num_scores >= _MIN_PRODUCT and products_win()


@cache
def products_win() -> bool:
    """Whether attention by oneDNN's products is faster than the fused kernel on this CPU: measured once, then known."""
    return onednn_wins() and gain_of("attention", measure_attention) >= MIN_GAIN


@torch.inference_mode()
def measure_attention() -> tuple[float, float]:
    """The best seconds of attention of some rows at the end of a prompt by the fused kernel, and by products."""
    query, key = torch.randn(1, 8, _PROBE_ROWS, 64), torch.randn(1, 2, _PROBE_KEYS, 64)
    spans, scoring = np.array([(_PROBE_KEYS - _PROBE_ROWS, _PROBE_KEYS)]), Scoring()
    mask = _mask(spans, _PROBE_KEYS, None, query)
    return best_seconds(
        lambda: _fused_on_cpu(query, key, key, spans, scoring), lambda: _by_products(query, key, key, mask, scoring)
    )


def _is_fused_on_cpu(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> bool:
    is_plain = query.device.type == "cpu" and query.shape[3] == value.shape[3] and scoring.softcap is None
    return is_plain and not _is_by_products(query, key)


def _blocks_of(query: Tensor, key: Tensor, value: Tensor, runs: Bounds, scoring: Scoring) -> Iterator[Bounds]:
    """Runs that are computed in one go, and parts of long ones."""
    if _is_fused_on_cpu(query, key, value, scoring) and scoring.sees_all(key.shape[2]):
        return _near_runs(runs)
    is_cut = scoring.is_explicit or _is_by_products(query, key)
    return _blocks(runs, scoring, is_cut, _block_size(query, key, scoring))


def _near_runs(runs: Bounds) -> Iterator[Bounds]:
    """Whole runs; those whose rows and all keys from the first row on are few are a block together."""
    index = 0
    while index < len(runs):
        row, start, end = runs[index : index + _MOST_ROWS].T
        fits = (row + end - start - row[0]) * (end - start[0]) <= _MAX_MASKED
        fits[0] = True
        count = len(fits) if fits.all() else int(fits.argmin())
        yield runs[index : index + count]
        index += count


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
    if _is_fused_on_cpu(query, key, value, scoring):
        return _fused_on_cpu(query, key, value, spans, scoring)
    if rows == num_keys and not scoring.is_explicit and scoring.sees_all(num_keys):
        return scaled_dot_product_attention(query, key, value, is_causal=rows > 1, scale=scaling, enable_gqa=True)
    mask = _mask(spans, num_keys, scoring.window, query)
    if _is_by_products(query, key):
        return _by_products(query, key, value, mask, scoring)
    if not scoring.is_explicit:
        return _attend_by_group(query, key, value, mask, scaling)
    return _explicit(query, key, value, mask, scoring)


class Attended(NamedTuple):
    """What rows get of some keys: the values' mean [batch, heads, rows, dim], and log-sum-exps [batch, heads, rows]."""

    values: Tensor
    logsumexp: Tensor


def _fused_on_cpu(query: Tensor, key: Tensor, value: Tensor, spans: Bounds, scoring: Scoring) -> Tensor:
    """As `_rectangle`, by torch's fused kernel: the keys that all rows see without a mask, then the others.

    A learned sink takes its part of the softmax, as a part whose values are 0.
    """
    rows, num_keys = query.shape[2], key.shape[2]
    sees_all = scoring.sees_all(num_keys)
    before = 0 if not sees_all else num_keys if rows == 1 else int(spans[0, 0])
    parts = []
    if before:
        parts.append(_folded(query, key[:, :, :before], value[:, :, :before], scoring.scaling))
    if before < num_keys:
        own, is_run = (query, key[:, :, before:], value[:, :, before:]), sees_all and len(spans) == 1
        if before and rows * (num_keys - before) <= _MAX_MASKED:  # few: not to round in half precision costs nothing
            own = (own[0].to(torch.float32), own[1].to(torch.float32), own[2].to(torch.float32))
        mask = None if is_run else _mask(spans - before, num_keys - before, scoring.window, own[0])
        parts.append(_grouped(*own, mask, is_run, scoring.scaling))
    values, logsumexp = parts[0] if len(parts) == 1 else _joined(*parts)
    if scoring.sinks is not None:
        values = values * torch.sigmoid(logsumexp - scoring.sinks[:, None])[..., None]
    return values.to(query.dtype)


def _joined(first: Attended, second: Attended) -> Attended:
    """What rows get of the keys of both."""
    of_first = torch.sigmoid(first.logsumexp - second.logsumexp)[..., None]
    values = torch.lerp(second.values.to(of_first), first.values.to(of_first), of_first)
    return Attended(values, torch.logaddexp(first.logsumexp, second.logsumexp))


def _folded(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Attended:
    """Rows that see all keys: those of a KV head's query heads read its keys together."""
    batch, num_heads, rows, dim = query.shape
    values, sums = _flash(query.reshape(batch, key.shape[1], -1, dim), key, value, scale=scaling)
    return Attended(values.reshape(batch, num_heads, rows, -1), sums.reshape(batch, num_heads, rows))


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scaling: float | None
) -> Attended:
    """Rows that see keys by a mask, or causally: no copy of either per query head."""
    shape, kv_heads = query.shape, key.shape[1]
    query, key, value = _by_group(query, key, value)
    values, sums = _flash(query, key, value, is_causal=is_causal, attn_mask=mask, scale=scaling)
    # [batch · group, kv_heads, rows, …] → [batch, heads, rows, …]
    values, sums = (
        part.reshape(shape[0], -1, kv_heads, *part.shape[2:]).transpose(1, 2).reshape(*shape[:3], *part.shape[3:])
        for part in (values, sums)
    )
    return Attended(values, sums)


def _by_group(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch · group, kv_heads, n, dim] of each, without a copy of keys and values."""
    kv_heads = key.shape[1]
    group = query.shape[1] // kv_heads
    apart = query.reshape(len(query), kv_heads, group, *query.shape[2:]).transpose(1, 2).flatten(0, 1)
    key, value = (tensor[:, None].expand(-1, group, -1, -1, -1).flatten(0, 1) for tensor in (key, value))
    return apart, key, value


def _attend_by_group(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax attention, [batch · group, kv_heads, rows, value_dim] inside: no copy of keys or mask per query head."""
    batch, num_heads, rows, dim = query.shape
    group = num_heads // key.shape[1]
    if mask is None:  # one row per head, or so: those of a KV head read its keys together
        folded = query.reshape(batch, key.shape[1], group * rows, dim)
        out = scaled_dot_product_attention(folded, key, value, scale=scaling)
        return out.reshape(batch, num_heads, rows, value.shape[3])
    apart, key, value = _by_group(query, key, value)
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
