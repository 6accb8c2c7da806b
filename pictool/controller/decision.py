"""The loading controller (CacheBlend §5.1): how much to recompute for a storage tier, and on which tier to store.

Pure functions over the estimates of `cost.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictool.controller.cost import Estimator, PromptSize, Speed
    from pictool.linker.policies.base import Policy

STORE_TIER = "store"  # the tier on which the store lives
MIN_RATIO = 0.15  # r*: the least ratio that empirically costs no quality (§5.1, fig. 16)


@dataclass(frozen=True)
class Tier:
    """A place to store objects; `price` is per GB and month, `speed` None where it is not known."""

    name: str
    price: float
    speed: Speed | None

    def cost(self, size: PromptSize) -> float:
        """Of one prompt's objects per month (C_store of §5.1)."""
        return self.price * size.stored_bytes / 1e9


@dataclass(frozen=True)
class TierEntry:
    """A tier as it is described: measured at `path`, or stated by `read_gb_s` and `latency_ms`."""

    name: str
    price: float
    path: Path | None
    read_gb_s: float | None
    latency_ms: float


@dataclass(frozen=True)
class RatioChoice:
    """Which ratio for a tier. `equal` is the one at which recompute takes as long as loading, if there is one.

    `load_s` is None for a tier of unknown speed; `prefill_s` is Prefill(L) of the context.
    """

    ratio: float
    equal: float | None
    load_s: float | None
    prefill_s: float


@dataclass(frozen=True)
class TierChoice:
    """Which tier for a ratio; `is_hidden` if recompute hides its loading. No tier if no speed is known."""

    tier: Tier | None
    is_hidden: bool


def has_ratio(policy: Policy) -> bool:
    """Whether the share of rows is a field of the policy, so that a plan may choose it."""
    return policy.knob is not None and policy.knob.is_share


def choose_ratio(
    estimator: Estimator, size: PromptSize, speed: Speed | None, minimum: float = MIN_RATIO
) -> RatioChoice:
    """The larger of `minimum` and the ratio whose recompute takes as long as loading, at most 1, in hundredths (§5.1).

    `minimum` if there is no context, or the speed is unknown.
    """
    prefill = estimator.prefill_s(size.context)
    if speed is None:
        return RatioChoice(minimum, None, None, prefill)
    load = estimator.load_s(size, speed)
    equal = estimator.equal_ratio(load, size)
    if equal is None:
        return RatioChoice(minimum, None, load, prefill)
    return RatioChoice(max(minimum, round(min(equal, 1.0), 2)), equal, load, prefill)


def choose_tier(estimator: Estimator, size: PromptSize, tiers: Sequence[Tier], ratio: float) -> TierChoice:
    """The cheapest tier whose loading recompute at `ratio` hides; without one, that with the least delay (§5.1)."""
    recompute = estimator.recompute_s(ratio, size)
    known = [(tier, estimator.load_s(size, tier.speed)) for tier in tiers if tier.speed is not None]
    hidden = [(tier, load) for tier, load in known if load <= recompute]
    if hidden:
        return TierChoice(min(hidden, key=lambda pair: (pair[0].price, pair[1]))[0], True)
    if known:
        return TierChoice(min(known, key=lambda pair: (pair[1], pair[0].price))[0], False)
    return TierChoice(None, False)


@dataclass(frozen=True)
class TierPlan:
    """What a tier would mean for one prompt: delays at the plan's ratio, and the ratio that suits the tier."""

    tier: Tier
    load_s: float | None
    ttft_s: float | None
    choice: RatioChoice
    cost: float  # per month


@dataclass(frozen=True)
class Plan:
    """The two decisions of CacheBlend §5.1: a tier for a ratio, and a ratio for every tier."""

    size: PromptSize
    ratio: float
    recompute_s: float
    tiers: tuple[TierPlan, ...]
    choice: TierChoice

    def of_tier(self, name: str) -> TierPlan:
        return next(planned for planned in self.tiers if planned.tier.name == name)


def make_plan(estimator: Estimator, size: PromptSize, tiers: Sequence[Tier], ratio: float) -> Plan:
    """Estimate one prompt on every tier, and choose."""
    planned = tuple(_plan_tier(estimator, size, tier, ratio) for tier in tiers)
    choice = choose_tier(estimator, size, tiers, ratio)
    return Plan(size, ratio, estimator.recompute_s(ratio, size), planned, choice)


def _plan_tier(estimator: Estimator, size: PromptSize, tier: Tier, ratio: float) -> TierPlan:
    choice, cost = choose_ratio(estimator, size, tier.speed), tier.cost(size)
    if tier.speed is None:
        return TierPlan(tier, None, None, choice, cost)
    return TierPlan(tier, choice.load_s, estimator.ttft_s(ratio, size, tier.speed), choice, cost)
