"""A dense reference for linking, written from EPIC §4.2 on `transformers`' own forward. Knows nothing else of pictool.

Every token of the prompt goes through the model's forward with its ordinary causal mask. At each layer the K and V of
the rows that are not recomputed are replaced by those of the isolated chunk: the model's own forward on the chunk
alone, at the positions where it is in the prompt (so that `transformers` rotates the keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from pictool.runtime.architectures import cache_name
from pictool.runtime.prefill import round_anew

KV = list[tuple[Tensor, Tensor]]  # per layer [1, kv_heads, tokens, head_dim], keys rotated


@dataclass(frozen=True)
class Dense:
    """The logits [vocab] at the last token of a prompt, and its KV."""

    logits: Tensor
    kv: KV


class Splice(DynamicCache):  # type: ignore[misc]
    """A cache that puts cached K and V over the fresh ones where `reused`, bool [n] or [layers, n], holds."""

    def __init__(self, cached: KV, reused: Tensor) -> None:
        super().__init__()
        self.cached, self._reused = cached, reused
        self.seen: KV = []

    def reused(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        """bool [n]; K and V are the fresh ones of this layer."""
        return self._reused if self._reused.dim() == 1 else self._reused[layer]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        where = self.reused(layer_idx, key_states, value_states)[None, None, :, None].to(key_states.device)
        cached = self.cached[len(self.seen)]  # of a hybrid only layers with attention have K and V
        key, value = (torch.where(where, *pair) for pair in zip(cached, (key_states, value_states), strict=True))
        self.seen.append((key, value))
        return key, value

    # A linear layer reads all of the prompt: it has no state before. Layers ask by the first up to transformers 5.20.

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


@torch.no_grad()
def forward_over(module: Any, tokens: list[int], start: int, cache: Splice) -> Dense:
    """The model's own forward of tokens at the positions from `start` on, over a cache of these."""
    positions = torch.arange(start, start + len(tokens), device=module.device)[None]
    logits = module(
        input_ids=torch.tensor([tokens], device=module.device), position_ids=positions, use_cache=True,
        logits_to_keep=1, **{cache_name(module): cache},
    ).logits  # fmt: skip
    return Dense(logits[0, -1], cache.seen)


def full(module: Any, tokens: list[int]) -> Dense:
    """The model's own forward."""
    return _forward(module, tokens, 0)


@contextmanager
def rounded_anew(module: Any, seed: int) -> Iterator[Any]:
    """The model, whose embeddings are changed at random by what rounding in its dtype may change."""
    generator = torch.Generator(module.device).manual_seed(seed)

    def change(_: Any, __: Any, embedded: Tensor) -> Tensor:
        return round_anew(embedded, generator)

    handle = module.get_input_embeddings().register_forward_hook(change)
    try:
        yield module
    finally:
        handle.remove()


def isolated(module: Any, tokens: list[int], start: int, sinks: tuple[int, ...] = ()) -> KV:
    """K and V of a chunk that sees only itself (and `sinks` in front, whose KV is dropped), keys at `start` on."""
    kv = _forward(module, [*sinks, *tokens], start - len(sinks)).kv
    return [(k[:, :, len(sinks) :], v[:, :, len(sinks) :]) for k, v in kv]


def link(module: Any, parts: list[list[int]], recomputed: Tensor, sinks: tuple[int, ...] = ()) -> Dense:
    """Link head, chunks, tail with `recomputed` rows, bool [n] or [layers, n]; documents compiled after `sinks`."""
    return forward_over(module, sum(parts, []), 0, Splice(naive_cache(module, parts, sinks), ~recomputed))


def naive_cache(module: Any, parts: list[list[int]], sinks: tuple[int, ...] = ()) -> KV:
    """What naive reuse would put together, of every part."""
    start, pieces = 0, []
    for index, part in enumerate(parts):
        if part:
            pieces.append(isolated(module, part, start, sinks if 0 < index < len(parts) - 1 else ()))
        start += len(part)
    layers = range(len(pieces[0]))
    return [tuple(torch.cat([piece[layer][i] for piece in pieces], 2) for i in (0, 1)) for layer in layers]  # type: ignore[misc]


def _forward(module: Any, tokens: list[int], start: int) -> Dense:
    none = torch.zeros(len(tokens), dtype=torch.bool)
    return forward_over(module, tokens, start, Splice(_empty(module), none))


def _empty(module: Any) -> KV:
    zero = torch.zeros(1, 1, 1, 1, dtype=module.dtype, device=module.device)  # stands for K and V of any shape
    return [(zero, zero)] * module.config.get_text_config().num_hidden_layers
