"""The dense reference of linking (`pictool.doctor.reference`) as tests use it, and CacheBlend on the whole matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pictool.doctor.reference import KV, Dense, Splice, forward_over, full, isolated, link, naive_cache
from pictool.runtime.architectures import cache_name, language_model_of

__all__ = ["KV", "Dense", "Splice", "attention", "cacheblend", "eager", "forward_over", "full", "isolated", "link"]

Join = Callable[[list[int], list[int]], list[int]]


def eager(module: Any) -> Any:
    """A copy of a model with transformers' own eager attention."""
    module = copy.deepcopy(module)
    module.set_attn_implementation("eager")
    return language_model_of(module) if _asks_for_images(module) else module


def _asks_for_images(module: Any) -> bool:
    """Whether a wrapper's own forward fails on text, as that of Llama 4 in transformers 5.24.

    It reads `image_outputs` of its language model's output, where there are none. That model is then run alone: with
    text the wrapper does no more.
    """
    if language_model_of(module) is module:
        return False
    try:
        with torch.no_grad():
            module(torch.tensor([[0]]))
    except AttributeError as error:
        assert error.name == "image_outputs", error
        return True
    return False


def attention(module: Any, parts: list[list[int]], recomputed: Tensor) -> Tensor:
    """The attention weights of a link's rows, [layers, heads, n, n]."""
    tokens, cache = sum(parts, []), Splice(naive_cache(module, parts), ~recomputed)
    with torch.no_grad():
        weights = module(
            input_ids=torch.tensor([tokens]), use_cache=True, output_attentions=True, **{cache_name(module): cache}
        ).attentions
    return torch.cat(weights)


class _Blend(Splice):
    """CacheBlend §4.3 on the whole matrix: at a checked layer the fresh K and V that are still on are compared."""

    def __init__(self, cached: KV, num_tail: int, counts: dict[int, int], on: str, join: Join, names: str) -> None:
        super().__init__(cached, torch.zeros(0))
        self._num_tail, self._counts, self._on, self._join, self._names = num_tail, counts, on, join, names
        self._rows = torch.ones(cached[0][0].shape[2], dtype=torch.bool)
        self.rows: list[Tensor] = []
        self.smallest_gap = float("inf")  # between the last token that goes on and the first that does not

    def reused(self, layer: int, key: Tensor, value: Tensor) -> Tensor:
        before = self._rows
        self.rows.append(before)
        if layer in self._counts:
            pairs = zip(self._names, (key, value), self.cached[layer], strict=True)
            apart = sum((fresh - cached).square().sum((0, 1, 3)) for name, fresh, cached in pairs if name in self._on)
            assert isinstance(apart, Tensor)
            context = torch.arange(len(apart)) < len(apart) - self._num_tail
            order = sorted(torch.nonzero(before & context).flatten().tolist(), key=lambda i: -float(apart[i]))
            count = self._counts[layer]
            if 0 < count < len(order):
                last, next_one = float(apart[order[count - 1]]), float(apart[order[count]])
                self.smallest_gap = min(self.smallest_gap, 1 - next_one / last if last > 1e-6 else 0.0)
            self._rows = ~context
            self._rows[self._join(order[:count], order)] = True
        return ~before


def cacheblend(
    module: Any, parts: list[list[int]], counts: dict[int, int], on: str, join: Join = lambda chosen, on: chosen
) -> tuple[Dense, Tensor, float]:
    """Link as CacheBlend does: at the layers of `counts` so many context rows go on, the farthest from the cache.

    Args:
        join: from the context rows that it chooses, farthest first, and those that were on: those that go on.

    Returns:
        the link; bool [layers, n], whose K and V are fresh; and how close the closest decision was (a relative gap).
    """
    names = "vk" if hasattr(module.config, "kv_lora_rank") else "kv"  # a latent is compared as values are
    blend = _Blend(naive_cache(module, parts), len(parts[-1]), counts, on, join, names)
    dense = forward_over(module, sum(parts, []), 0, blend)
    return dense, torch.stack(blend.rows), blend.smallest_gap
