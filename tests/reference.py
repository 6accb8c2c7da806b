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
        self._cached, self._reused = cached, reused
        self.seen: KV = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        where = self._reused[None, None, :, None]
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
    cache = _Splice(cached, reused)
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
    """Link parts (head, chunks, tail) with `recomputed` rows, bool [n]; documents were compiled behind `sinks`."""
    tokens = [token for part in parts for token in part]
    start, pieces = 0, []
    for index, part in enumerate(parts):
        if part:
            pieces.append(isolated(module, part, start, sinks if 0 < index < len(parts) - 1 else ()))
        start += len(part)
    layers = range(module.config.num_hidden_layers)
    cached = [tuple(torch.cat([piece[layer][i] for piece in pieces], 2) for i in (0, 1)) for layer in layers]
    return _forward(module, tokens, 0, cached, ~recomputed)  # type: ignore[arg-type]
