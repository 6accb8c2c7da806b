"""A canary: a share of requests is answered under full recompute too, and how far apart the answers are is counted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pictool.engines.base import Comparison
from pictool.errors import InputError

_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Canary:
    """Which requests are verified: a share of them, by what they ask, so that a repeated run picks the same ones."""

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InputError(f"--verify {self.share:g}: must be a share of requests, from 0 to 1")

    def picks(self, request: str) -> bool:
        """Whether the request of this text is verified."""
        digest = hashlib.sha256(f"verify {self.seed} {request}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64


@dataclass(frozen=True)
class Drift:
    """How far the verified answers are from those of full recompute. Fields are the keys of the JSON.

    Fields:
        requests: all that were answered. verified: of these.
        kl_mean, kl_max: KL(full ‖ linked) of the first token, nats; None where nothing was verified.
        answer_kl_mean, answer_kl_max: of all tokens of full's answer, which is what a limit judges; None also from
            engines that do not give it.
        differ: answers whose text is another one. differ_low, differ_high: Wilson's 95 % interval of their share.
    """

    requests: int
    verified: int
    kl_mean: float | None
    kl_max: float | None
    differ: int
    differ_low: float
    differ_high: float
    answer_kl_mean: float | None = None
    answer_kl_max: float | None = None

    @classmethod
    def of(cls, requests: int, compared: Sequence[Comparison]) -> Drift:
        kl = [each.kl for each in compared]
        differ = sum(not each.same_answer for each in compared)
        low, high = wilson(differ, len(compared))
        whole = [each.answer_kl for each in compared if each.answer_kl is not None]
        (mean, most), (whole_mean, whole_most) = (
            (fmean(each) if each else None, max(each, default=None)) for each in (kl, whole)
        )
        return cls(requests, len(kl), mean, most, differ, low, high, whole_mean, whole_most)

    def report(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def nats(self) -> float | None:
        """What a limit judges: the mean KL of whole answers, or of first tokens from engines that give no more."""
        return self.kl_mean if self.answer_kl_mean is None else self.answer_kl_mean

    def __str__(self) -> str:
        if self.kl_mean is None:
            return f"none of {self.requests} answers was verified"
        said = [f"of first tokens {self.kl_mean:.3g} on average, {self.kl_max:.3g} at most"]
        if self.answer_kl_mean is not None:
            said.insert(0, f"of whole answers {self.answer_kl_mean:.3g} on average, {self.answer_kl_max:.3g} at most")
        return (
            f"{self.verified} of {self.requests} answers verified: KL {', '.join(said)}; {self.differ} answers differ "
            f"from full's ({self.differ_low:.1%} to {self.differ_high:.1%})"
        )


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; from 0 to 1 where nothing was counted."""
    if total == 0:
        return 0.0, 1.0
    share, square = hits / total, _Z**2 / total
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)
