"""The search: chains from the dearest policy on, what meets the target, and what is worth measuring further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from pictool.eval.policies import parse_policies
from pictool.linker.grid import LabelledPolicy, label_of
from pictool.linker.policies.base import Knob, Policy, Prompt, Selection, first_rows
from pictool.tuning.search import LEVEL, Range, TargetStatus, cheapest, judge, make_chains, worth_measuring

CHAINS = [["a-40", "a-10", "a-5"], ["b-20", "b-0"]]
COSTS = {"a-40": 0.4, "a-10": 0.1, "a-5": 0.05, "b-20": 0.2, "b-0": 0.0}
GOOD, BAD, HARD = np.full(400, 0.001), np.full(400, 0.5), np.tile([0.0, 0.0, 0.0, 0.19], 100)


def found(**values: np.ndarray) -> dict[str, TargetStatus]:
    named = {label.replace("_", "-"): each for label, each in values.items()}
    return {label: one.status for label, one in judge(CHAINS, named, 0.05, Range(0, 1)).items()}


def test_chains_are_policies_that_differ_in_ratio_or_k_only_the_dearest_first() -> None:
    policies = parse_policies(["cacheblend:ratio=.05,.2", "naive", "legolink:k=4,16", "cacheblend:ratio=.1:on=kv"])
    assert sorted(make_chains(policies)) == [
        ["cacheblend-10:on=kv"], ["cacheblend-20", "cacheblend-5"], ["legolink-16", "legolink-4"], ["naive"]
    ]  # fmt: skip


@dataclass(frozen=True)
class Edges(Policy):
    """A policy of somebody else's, whose knob is none of ours; its `k` is a text."""

    name: ClassVar[str] = "edges"
    reference: ClassVar[str] = "none"
    knob: ClassVar[Knob | None] = Knob("last")
    last: int = 2
    k: str = "both"

    def select(self, prompt: Prompt) -> Selection:
        return Selection(first_rows(prompt.layout, self.last))


def test_policies_that_differ_in_their_knob_are_a_chain_whatever_it_is_called() -> None:
    kinds = [Edges(last, k) for last in (2, 4) for k in ("both", "left")]
    policies = [LabelledPolicy(label_of(policy), policy) for policy in kinds]
    assert [labelled.label for labelled in policies] == ["edges-2", "edges-2:k=left", "edges-4", "edges-4:k=left"]
    assert sorted(make_chains(policies)) == [["edges-4", "edges-2"], ["edges-4:k=left", "edges-2:k=left"]]


def test_a_policy_counts_only_if_all_dearer_ones_of_its_chain_do() -> None:
    assert found(a_40=GOOD, a_10=GOOD, a_5=BAD, b_20=BAD, b_0=GOOD) == {
        "a-40": TargetStatus.MEETS, "a-10": TargetStatus.MEETS, "a-5": TargetStatus.FAILS,
        "b-20": TargetStatus.FAILS, "b-0": TargetStatus.BLOCKED,
    }  # fmt: skip
    assert found(a_40=HARD, a_10=GOOD, a_5=GOOD, b_20=GOOD, b_0=GOOD)["a-10"] is TargetStatus.OPEN


def test_few_units_say_nothing() -> None:
    few = np.zeros(31)
    assert set(found(a_40=few, a_10=few, a_5=few, b_20=few, b_0=few).values()) == {TargetStatus.OPEN}


def test_what_is_measured_further_could_still_be_the_cheapest() -> None:
    values = {"a-40": GOOD, "a-10": GOOD, "a-5": HARD, "b-20": HARD, "b-0": HARD}
    judged = judge(CHAINS, values, 0.05, Range(0, 1))
    assert cheapest(judged, COSTS) == "a-10"
    assert worth_measuring(CHAINS, judged, COSTS) == ["a-5", "b-20", "b-0"]  # b-20 since b-0 comes after it
    dear = COSTS | {"b-0": 0.15}
    assert worth_measuring(CHAINS, judged, dear) == ["a-5"]


def test_what_is_chosen_meets_the_target_as_often_as_said() -> None:
    """Means from 0.2 down to 0.0005 with a heavy tail; what is chosen wrongly is rare."""
    rng, wrong, chosen = np.random.default_rng(5), 0, 0
    means = {"a-40": 0.01, "a-10": 0.045, "a-5": 0.055, "b-20": 0.052, "b-0": 0.2}
    for _ in range(100):
        values = {label: np.where(rng.random(800) < mean / 2, 2.0, 0.0) for label, mean in means.items()}
        judged = judge(CHAINS, values, 0.05, Range(0, 2))
        label = cheapest(judged, COSTS)
        chosen += label is not None
        wrong += label is not None and means[label] > 0.05
    assert wrong <= 100 * LEVEL and chosen > 50


def test_how_many_units_it_may_take() -> None:
    (one,) = judge([["a"]], {"a": np.zeros(64)}, 0.05, Range(0, 5)).values()
    assert one.status is TargetStatus.OPEN and one.needed is not None
    (more,) = judge([["a"]], {"a": np.zeros(one.needed)}, 0.05, Range(0, 5)).values()
    assert more.status is TargetStatus.MEETS and more.low == pytest.approx(0, abs=1e-6)


def test_a_mean_above_the_limit_is_not_met_whatever_the_clipped_values_say() -> None:
    values = {"a": np.where(np.arange(400) == 7, 1.0, 0.0)}
    (clipped,) = judge([["a"]], values, 0.05, Range(0, 1)).values()
    (heavy,) = judge([["a"]], values, 0.05, Range(0, 1), means={"a": 0.06}).values()
    assert (clipped.status, heavy.status) == (TargetStatus.MEETS, TargetStatus.OPEN)


def test_what_is_plain_at_a_hundred_questions_is_certified_by_two_hundred() -> None:
    """A tenth of the limit, with a tail: four chains as in `pic tune`."""
    rng, certified = np.random.default_rng(6), 0
    for _ in range(100):
        values = {label: np.where(rng.random(200) < 0.003, 1.0, 0.002) for label in "abcd"}
        judged = judge([[label] for label in values], values, 0.05, Range(0, 1))
        certified += judged["a"].status is TargetStatus.MEETS
    assert certified >= 70
