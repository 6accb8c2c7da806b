from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

from pictool.errors import InputError
from pictool.linker.policies.base import (
    Knob,
    Policy,
    Prompt,
    Ranking,
    Selection,
    all_rows,
    count_of,
    require_share,
)


@dataclass(frozen=True)
class CacheBlend(Policy):
    """CacheBlend (§4.3): rows whose fresh K and V are farthest from the cached ones (HKVD tokens).

    Layer 0 is computed in full. At each checked layer the rows that are still on are compared with the cache, and the
    ⌈r_l · N⌉ farthest go on. All fresh K and V of a checked layer are kept. Dynamic.

    Fields:
        ratio: r, the mean share of context rows that go through attention and FFN from the first checked layer on.
        on: what is compared: ``v`` (as in the authors' code), ``k``, or ``kv`` (the sum); of latent attention ``v`` is
            the latent, ``k`` the rotated key.
        filter: ``gradual`` checks every layer from 1 on (§4.3, fig. 9); ``single`` checks layer 1 (the authors' code).
        layers: the checked layers instead of those of `filter`, as ``1,2,8``.
        schedule: how far the first r_l is above r, and the last one below, as a share of r; linear between.
    """

    name: ClassVar[str] = "cacheblend"
    reference: ClassVar[str] = "CacheBlend §4.3"
    knob: ClassVar[Knob | None] = Knob("ratio", is_share=True)
    ratio: float = 0.15
    on: str = "v"
    filter: str = "gradual"
    layers: str = ""
    schedule: float = 0.3

    def __post_init__(self) -> None:
        require_share(self.name, "ratio", self.ratio)
        require_share(self.name, "schedule", self.schedule)
        for field, known in (("on", ("v", "k", "kv")), ("filter", ("gradual", "single"))):
            if getattr(self, field) not in known:
                raise InputError(f"cacheblend: {field}={getattr(self, field)!r} must be one of {', '.join(known)}")
        if self.layers:
            self._named_layers()

    def select(self, prompt: Prompt) -> Selection:
        return Selection(all_rows(prompt.layout))

    def check_layers(self, num_layers: int) -> tuple[int, ...]:
        if self.ratio == 1:
            return ()
        if not self.layers:
            return tuple(range(1, num_layers if self.filter == "gradual" else min(2, num_layers)))
        named = self._named_layers()
        if named[-1] >= num_layers:
            raise InputError(f"cacheblend: layers={self.layers}, but the model has the layers 0 to {num_layers - 1}")
        return named

    def rank(self, prompt: Prompt, layer: int, key: Any, value: Any) -> Ranking:
        scores = key + value if self.on == "kv" else value if self.on == "v" else key
        return Ranking(scores, count_of(self.ratios(prompt.model.geometry.layers)[layer], prompt.layout.num_context))

    def ratios(self, num_layers: int) -> dict[int, float]:
        """r_l of every checked layer: falls linearly; its mean, over the layers it holds for, is `ratio`."""
        checks = self.check_layers(num_layers)
        if not checks:
            return {}
        held = [end - layer for layer, end in zip(checks, [*checks[1:], num_layers], strict=True)]
        way = [(layer - checks[0]) / max(1, checks[-1] - checks[0]) for layer in checks]  # from 0 to 1
        mean = sum(count * t for count, t in zip(held, way, strict=True)) / sum(held)
        fall = self.schedule * self.ratio / max(mean, 1 - mean)
        if mean:
            fall = min(fall, (1 - self.ratio) / mean)
        return {layer: self.ratio + fall * (mean - t) for layer, t in zip(checks, way, strict=True)}

    def _named_layers(self) -> tuple[int, ...]:
        try:
            named = tuple(int(layer) for layer in self.layers.split(","))
        except ValueError:
            named = ()
        if not named or named[0] < 1 or any(a >= b for a, b in itertools.pairwise(named)):
            raise InputError(f"cacheblend: layers={self.layers!r} must be ascending layers from 1 on, as in 1,2,8")
        if self.filter == "single" and len(named) > 1:
            raise InputError(f"cacheblend: filter=single checks one layer, not {self.layers}")
        return named
