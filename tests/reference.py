"""A dense reference for linking, written from EPIC §4.2 on `transformers`' own forward. Knows nothing of pictool.

Every token of the prompt goes through the model's forward with its ordinary causal mask. At each layer the K and V of
the rows that are not recomputed are replaced by those of the isolated chunk: the model's own forward on the chunk
alone, at the positions where it stands in the prompt (so that `transformers` rotates the keys).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

KV = list[tuple[Tensor, Tensor]]  # per layer [1, kv_heads, tokens, head_dim], keys rotated


@dataclass(frozen=True)
class Dense:
    logits: Tensor  # [vocab], at the last token
    kv: KV


class _Splice(DynamicCache):  # type: ignore[misc]
    """A cache that puts cached K and V over the fresh ones where `reused` holds."""

    def __init__(self, cached: KV, reused: Tensor) -> None:
        super().__init__()
        self._cached, self._reused = cached, reused  # bool [n], or [layers, n]
        self.seen: KV = []

    def reused(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """bool [n]; K and V are the fresh ones of this layer."""
        return self._reused if self._reused.dim() == 1 else self._reused[layer]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        where = self.reused(layer_idx, key_states, value_states)[None, None, :, None]
        key = torch.where(where, self._cached[layer_idx][0], key_states)
        value = torch.where(where, self._cached[layer_idx][1], value_states)
        self.seen.append((key, value))
        return key, value


def eager(module: Any) -> Any:
    """A copy of a model with transformers' own eager attention."""
    module = copy.deepcopy(module)
    module.set_attn_implementation("eager")
    return module


def _forward(module: Any, tokens: list[int], start: int, cached: KV, reused: Tensor) -> Dense:
    return _forward_over(module, tokens, start, _Splice(cached, reused))


def _forward_over(module: Any, tokens: list[int], start: int, cache: _Splice) -> Dense:
    positions = torch.arange(start, start + len(tokens))[None]
    with torch.no_grad():
        logits = module(
            input_ids=torch.tensor([tokens]), position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
    return Dense(logits[0, -1], cache.seen)


def _empty(module: Any, count: int) -> KV:
    config = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    zero = torch.zeros(1, config.num_key_value_heads, count, head_dim)
    return [(zero, zero)] * config.num_hidden_layers


def isolated(module: Any, tokens: list[int], start: int, sinks: tuple[int, ...] = ()) -> KV:
    """K and V of a chunk that sees only itself (and `sinks` in front, whose KV is dropped), keys at `start` on."""
    whole = [*sinks, *tokens]
    none = torch.zeros(len(whole), dtype=torch.bool)
    kv = _forward(module, whole, start - len(sinks), _empty(module, len(whole)), none).kv
    return [(k[:, :, len(sinks) :], v[:, :, len(sinks) :]) for k, v in kv]


def full(module: Any, tokens: list[int]) -> Dense:
    """The model's own forward."""
    return _forward(module, tokens, 0, _empty(module, len(tokens)), torch.zeros(len(tokens), dtype=torch.bool))


def link(module: Any, parts: list[list[int]], recomputed: Tensor, sinks: tuple[int, ...] = ()) -> Dense:
    """Link head, chunks, tail with `recomputed` rows, bool [n] or [layers, n]; documents compiled behind `sinks`."""
    return _forward(module, sum(parts, []), 0, _cached(module, parts, sinks), ~recomputed)


def _cached(module: Any, parts: list[list[int]], sinks: tuple[int, ...] = ()) -> KV:
    """What naive reuse would put together, of every part."""
    start, pieces = 0, []
    for index, part in enumerate(parts):
        if part:
            pieces.append(isolated(module, part, start, sinks if 0 < index < len(parts) - 1 else ()))
        start += len(part)
    layers = range(module.config.num_hidden_layers)
    return [tuple(torch.cat([piece[layer][i] for piece in pieces], 2) for i in (0, 1)) for layer in layers]  # type: ignore[misc]


def attention(module: Any, parts: list[list[int]], recomputed: Tensor) -> Tensor:
    """The attention weights of a link's rows, [layers, heads, n, n]."""
    tokens, cache = sum(parts, []), _Splice(_cached(module, parts), ~recomputed)
    with torch.no_grad():
        weights = module(
            input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, output_attentions=True
        ).attentions
    return torch.cat(weights)


class _Blend(_Splice):
    """CacheBlend §4.3 on the whole matrix: at a checked layer the fresh K and V that are still on are compared."""

    def __init__(self, cached: KV, num_tail: int, counts: dict[int, int], on: str) -> None:
        super().__init__(cached, torch.zeros(0))
        self._num_tail, self._counts, self._on = num_tail, counts, on
        self._rows = torch.ones(cached[0][0].shape[2], dtype=torch.bool)
        self.rows: list[Tensor] = []
        self.smallest_gap = float("inf")  # between the last token that goes on and the first that does not

    def reused(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        before = self._rows
        self.rows.append(before)
        if layer in self._counts:
            pairs = zip("kv", (key, value), self._cached[layer], strict=True)
            apart = sum((fresh - cached).square().sum((0, 1, 3)) for name, fresh, cached in pairs if name in self._on)
            assert isinstance(apart, Tensor)
            context = torch.arange(len(apart)) < len(apart) - self._num_tail
            order = sorted(torch.nonzero(before & context).flatten().tolist(), key=lambda i: -float(apart[i]))
            count = self._counts[layer]
            if 0 < count < len(order):
                last, next_one = float(apart[order[count - 1]]), float(apart[order[count]])
                self.smallest_gap = min(self.smallest_gap, 1 - next_one / last if last > 1e-6 else 0.0)
            self._rows = ~context
            self._rows[order[:count]] = True
        return ~before


def cacheblend(module: Any, parts: list[list[int]], counts: dict[int, int], on: str) -> tuple[Dense, Tensor, float]:
    """Link as CacheBlend does: at the layers of `counts` so many context rows go on, the farthest from the cache.

    Returns:
        the link; bool [layers, n], whose K and V are fresh; and how close the closest decision was (a relative gap).
    """
    blend = _Blend(_cached(module, parts), len(parts[-1]), counts, on)
    dense = _forward_over(module, sum(parts, []), 0, blend)
    return dense, torch.stack(blend.rows), blend.smallest_gap
