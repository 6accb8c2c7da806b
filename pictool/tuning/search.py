"""Which policies meet a target, as far as a sample says: chains of policies, each tested from the dearest on.

A chain is one policy at falling cost (`prophet` at 40, 20, 10 % of rows). Its members are tested in that order, each at
the chain's whole level, and the first that is not shown to meet the target ends it: fixed-sequence testing, which keeps
the chance of any wrong claim at the level however long the chain is. The level is shared equally between the chains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

import numpy as np

from pictool.eval.policies import FULL
from pictool.linker.grid import LabelledPolicy
from pictool.tuning.bounds import Values, log_capital_above, log_capital_below, lower_bound, upper_bound

LEVEL = 0.1  # chance that the policy that is chosen does not meet the target
MIN_UNITS = 32  # no claim from fewer


class TargetStatus(StrEnum):
    """What the sample says of a policy: it meets the target, it does not, or neither is clear.

    BLOCKED: a dearer one of its chain does not meet the target, so it is not tested.
    """

    MEETS = "meets"
    FAILS = "fails"
    OPEN = "open"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Range:
    """The least and the largest value that a question can have."""

    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """What is known of one policy's mean.

    Fields:
        units: questions (or groups of them) that were measured. low, high: bounds that hold together with all others.
        needed: as many units as would settle that it meets the target if the others are like these; None: no number.
    """

    status: TargetStatus
    units: int
    mean: float
    low: float
    high: float
    needed: int | None


def make_chains(policies: Sequence[LabelledPolicy]) -> list[list[str]]:
    """The labels of the policies, `full` left out, in chains: those that differ in their knob only.

    The order is that of cost, the dearest first, and known before anything is measured.
    """
    chains: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for labelled in policies:
        if labelled == FULL:
            continue
        params, knob = dict(labelled.policy.params), labelled.policy.knob
        cost = 0.0 if knob is None else float(params.pop(knob.field))
        kind = (labelled.policy.name, *(f"{name}={value}" for name, value in sorted(params.items())))
        chains.setdefault(kind, []).append((cost, labelled.label))
    return [[label for _, label in sorted(chain, key=lambda each: -each[0])] for chain in chains.values()]


def judge(
    chains: Sequence[Sequence[str]], values: Mapping[str, Values], limit: float, bounds: Range, level: float = LEVEL,
    means: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Finding]:  # fmt: skip
    """What the values say of every policy.

    Args:
        values: of each label, one number a unit: what must be at most `limit` in the mean.
        bounds: no value is beyond.
        means: of each label, of the values before they were clipped to the bounds. Above `limit`, it is not met.
    """
    each, found = level / len(chains), dict[str, Finding]()
    for chain in chains:
        is_open = True
        has_failed = False
        for label in chain:
            status = _status(values[label], limit, bounds, each)
            if status is TargetStatus.MEETS and (not is_open or means.get(label, limit) > limit):
                status = TargetStatus.OPEN
            if status is not TargetStatus.FAILS and has_failed:
                status = TargetStatus.BLOCKED
            is_open = is_open and status is TargetStatus.MEETS
            has_failed = has_failed or status is TargetStatus.FAILS
            found[label] = _finding(status, values[label], limit, bounds, each)
    return found


def cheapest(found: Mapping[str, Finding], costs: Mapping[str, float]) -> str | None:
    """The label of the policy of least cost that meets the target; of equal ones the first."""
    meeting = [label for label, finding in found.items() if finding.status is TargetStatus.MEETS]
    return min(meeting, key=lambda label: costs[label], default=None)


def worth_measuring(
    chains: Sequence[Sequence[str]], found: Mapping[str, Finding], costs: Mapping[str, float]
) -> list[str]:
    """The labels whose further measurement could change the choice.

    These are open ones that cost less than what is chosen, and the open ones before them in their chain.
    """
    chosen = cheapest(found, costs)
    limit = math.inf if chosen is None else costs[chosen]
    labels = list[str]()
    for chain in chains:
        still_open = [label for label in chain if found[label].status is TargetStatus.OPEN]
        last = max((i for i, label in enumerate(still_open) if costs[label] < limit), default=-1)
        labels += still_open[: last + 1]
    return labels


def _status(values: Values, limit: float, bounds: Range, level: float) -> TargetStatus:
    if len(values) < MIN_UNITS:
        return TargetStatus.OPEN
    odds = -math.log(level)
    if log_capital_below(values, limit, bounds.low, bounds.high) >= odds:
        return TargetStatus.MEETS
    if log_capital_above(values, limit, bounds.low, bounds.high) >= odds:
        return TargetStatus.FAILS
    return TargetStatus.OPEN


def _finding(status: TargetStatus, values: Values, limit: float, bounds: Range, level: float) -> Finding:
    needed = None
    if status is TargetStatus.OPEN and (won := log_capital_below(values, limit, bounds.low, bounds.high)) > 0:
        needed = math.ceil(max(MIN_UNITS, len(values) * max(1.0, -math.log(level) / won)))
    low, high = (bound(values, level, bounds.low, bounds.high) for bound in (lower_bound, upper_bound))
    return Finding(status, len(values), float(np.mean(values)), low, high, needed)
