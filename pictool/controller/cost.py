"""The delays of the loading controller (CacheBlend §5.1): T_recompute, T_load, and the ratio at which they are equal.

Pure functions over what was measured: nothing here reads a clock or a file. Times are of a whole prompt, all layers
together; the paper's are per layer, which is the same comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_RATIO = 0.15  # r*: the least ratio that empirically costs no quality (§5.1, fig. 16)


@dataclass(frozen=True)
class PromptSize:
    """What has to be loaded and computed: tokens of context (head and chunks) and tail, objects, KV bytes per token."""

    context: int
    tail: int
    objects: int
    token_bytes: int


@dataclass(frozen=True)
class Speed:
    """How fast objects come from a place: seconds per byte of KV, and per object (all its layers)."""

    byte_s: float
    object_s: float


@dataclass(frozen=True)
class RatioChoice:
    """The ratio that is free, and the seconds of loading and of Prefill(L) from which it follows."""

    ratio: float
    load_s: float
    prefill_s: float


@dataclass(frozen=True)
class Estimator:
    """Delays of one model and policy on one machine. Prefill(L) = constant_s + token_s · L + pair_s · L².

    Fields:
        scattered: how many times as long a few scattered rows take as the same number of a prefill's.
        whole: the share of the layers that the policy computes whole, and does not load.
    """

    token_s: float
    constant_s: float
    pair_s: float
    scattered: float = 1.0
    whole: float = 0.0

    @classmethod
    def fit(cls, measured: Sequence[Sequence[float]], whole: float = 0.0) -> Estimator:
        """From rows of context, tail, share of the context that is computed, seconds; the last one is scattered."""
        *prefills, (context, tail, share, seconds) = measured
        lengths = [before + after for before, after, _, _ in prefills]
        terms = [lengths, [1.0] * len(lengths), [length**2 for length in lengths]]
        token, constant, pair = fit_nonnegative(terms, [row[3] for row in prefills])
        fixed, scaled = cls(token, constant, pair)._parts(PromptSize(int(context), int(tail), 1, 1))
        scattered = max(1.0, (seconds - fixed) / (share * scaled)) if scaled else 1.0
        return cls(token, constant, pair, scattered, whole)

    def prefill_s(self, tokens: int) -> float:
        """Prefill(L): seconds to compute a prompt of so many tokens."""
        return self.constant_s + self.token_s * tokens + self.pair_s * tokens**2

    def recompute_s(self, ratio: float, size: PromptSize) -> float:
        """T_recompute(r, L): the share r of the context's rows, and the tail.

        Footnote 5 has r · Prefill(L). Of that only what grows with L is scaled: the constant is paid once for any r,
        and so is the tail, whose rows attend to the whole context, and the layers that are computed whole.
        """
        fixed, scaled = self._parts(size)
        return fixed + scaled * min(1.0, ratio * self.scattered)

    def load_s(self, size: PromptSize, speed: Speed) -> float:
        """T_load(L): bytes / throughput (footnote 6), and time per object; of the layers that are loaded."""
        return (1 - self.whole) * (speed.byte_s * size.context * size.token_bytes + speed.object_s * size.objects)

    def choose_ratio(self, size: PromptSize, speed: Speed) -> RatioChoice:
        """The larger of `MIN_RATIO` and the ratio whose recompute takes as long as loading, in hundredths."""
        load, (fixed, scaled) = self.load_s(size, speed), self._parts(size)
        share = (load - fixed) / scaled if scaled else 0.0
        ratio = 1.0 if share >= 1 else max(MIN_RATIO, round(share / self.scattered, 2))
        return RatioChoice(ratio, load, self.prefill_s(size.context))

    def _parts(self, size: PromptSize) -> tuple[float, float]:
        """The seconds of any ratio, and those that grow with it."""
        context = self.prefill_s(size.context) - self.constant_s
        tail = self.prefill_s(size.context + size.tail) - self.prefill_s(size.context)
        return self.constant_s + tail + self.whole * context, (1 - self.whole) * context


def fit_nonnegative(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """The coefficients >= 0 of `terms` [terms, points] with the least squared relative error of `seconds` [points].

    There are at most as many as points: those of the first terms.
    """
    columns = np.array(terms, dtype=np.float64) / np.array(seconds, dtype=np.float64)
    columns, scale = columns / columns.max(axis=1, keepdims=True), columns.max(axis=1)
    kept, solved = list(range(min(columns.shape))), np.zeros(0)
    while kept:
        solved = np.linalg.lstsq(columns[kept].T, np.ones(len(seconds)), rcond=None)[0]
        if solved.min() >= 0:
            break
        del kept[int(solved.argmin())]
    found = dict(zip(kept, solved.tolist(), strict=False))
    return [found.get(index, 0.0) / float(scale[index]) for index in range(len(terms))]
