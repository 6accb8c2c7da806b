"""The report of `pic plan`, as JSON and as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.commands.console.verbosity import note
from pictool.controller.decision import MIN_RATIO, STORE_TIER, Plan, TierPlan, has_ratio

if TYPE_CHECKING:
    from pictool.controller.calibration import ProfileFacts
    from pictool.controller.cost import ComputeMeasurement, Estimator, PromptSize
    from pictool.controller.planning import Check
    from pictool.linker.policies.base import Policy
    from pictool.runtime.model import Model

_FAR = 4  # a context this many times the longest prefill that was measured is extrapolated with a warning


@dataclass(frozen=True)
class PlanReport:
    """What was planned, for which model and policy, and from what measurements."""

    model: Model
    policy: Policy
    estimator: Estimator
    measured: Sequence[ComputeMeasurement]
    plan: Plan
    check: Check | None

    @property
    def store_tier(self) -> TierPlan:
        """The plan of the tier on which the store lives."""
        return self.plan.of_tier(STORE_TIER)


def report_json(report: PlanReport) -> dict[str, Any]:
    """The JSON of `pic plan --json`; seconds, bytes, and what a tier costs per month."""
    plan, estimator, check = report.plan, report.estimator, report.check
    size, tier = plan.size, plan.choice.tier
    return {
        "model": report.model.name,
        "algo": report.policy.name,
        "ratio": plan.ratio,
        "tokens": {"context": size.context, "tail": size.tail},
        "objects": size.objects,
        "bytes": size.stored_bytes, "kv_bytes": size.num_bytes, "decode_s": size.decode_s,
        "prefill": {
            "measured": [[prefill.size.num_tokens, prefill.runs, prefill.seconds] for prefill in report.measured],
            "constant_s": estimator.constant_s, "token_s": estimator.token_s, "pair_s": estimator.pair_s,
            "run_s": estimator.run_s, "context_s": estimator.prefill_s(size.context),
        },
        "recompute_s": plan.recompute_s,
        "bfloat16_gain": bfloat16_gain(report.model),
        "tiers": [_tier_json(planned, plan) for planned in plan.tiers],
        "choice": {
            "ratio": report.store_tier.choice.ratio, "tier": tier.name if tier else None,
            "is_hidden": plan.choice.is_hidden,
        },
        "check": check and {**vars(check), "error": check.errors},
    }  # fmt: skip


def _tier_json(planned: TierPlan, plan: Plan) -> dict[str, Any]:
    tier, choice = planned.tier, planned.choice
    return {
        "name": tier.name, "price_gb_month": tier.price, "speed": tier.speed and vars(tier.speed),
        "load_s": planned.load_s, "ttft_s": planned.ttft_s,
        "is_hidden": planned.load_s is not None and planned.load_s <= plan.recompute_s,
        "ratio": choice.ratio, "ratio_equal": choice.equal, "cost_month": planned.cost,
    }  # fmt: skip


def print_report(report: PlanReport) -> None:
    from pictool.controller.calibration import compute_facts

    model, plan, size = report.model, report.plan, report.plan.size
    print(
        f"prompt    {size.context} tokens of context in {size.objects} objects ({_kv(size)}), {size.tail} of the query"
    )
    full = ms(report.estimator.prefill_s(size.context + size.tail))
    print(f"model     {model.name} ({model.dtype}, {model.device}): TTFT of full recompute {full}")
    chosen = "ratio" if has_ratio(report.policy) else "which computes a share of rows of"
    print(f"policy    {report.policy.name}, {chosen} {plan.ratio:.3g}")
    print()
    print_table(
        ["tier", "load", "recompute", "TTFT", "ratio", "$/month"],
        [
            [planned.tier.name, ms(planned.load_s), ms(plan.recompute_s), ms(planned.ttft_s),
             f"{planned.choice.ratio if has_ratio(report.policy) else plan.ratio:.3g}", f"{planned.cost:.2g}"]
            for planned in plan.tiers
        ],
    )  # fmt: skip
    print()
    print(f"ratio     {why_ratio(report)}")
    print(f"tier      {why_tier(plan)}")
    if (gain := bfloat16_gain(model) or 0.0) > 1:
        print(f"bfloat16  products are {gain:.1f}x as fast, and objects half as large: --dtype bfloat16")
    if facts := compute_facts(report.model):
        print(f"measured  {why_trusted(facts)}")
    longest = max(prefill.size.num_tokens for prefill in report.measured)
    if size.context > _FAR * longest:
        note(f"prefill was measured up to {longest} tokens, which took long; times of {size.context} are extrapolated")
    if report.policy.needs.runs_model:
        note(f"{report.policy.name} reads the prompt with a second model; these times do not include it")
    if report.check:
        print_check(report.check)


def bfloat16_gain(model: Model) -> float | None:
    """How many times as fast products would be in bfloat16; None unless the model is in float32 on a CPU."""
    from pictool.runtime.products import bfloat16_gain

    return bfloat16_gain() if (model.device, model.dtype) == ("cpu", "float32") else None


def why_trusted(facts: ProfileFacts) -> str:
    """When this machine was measured, and how evenly."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.measured_at))
    return f"{when}, repeats within {facts.scatter:.0%}; --measure measures again"


def _kv(size: PromptSize) -> str:
    """The KV of a prompt's objects, and what it takes if it is coded."""
    plain = f"{size.num_bytes / 1e6:.1f} MB of KV"
    if size.coded_bytes is None or size.coded_bytes == size.num_bytes:
        return plain
    return f"{plain} in {size.coded_bytes / 1e6:.1f} MB, {ms(size.decode_s)} to decode"


def why_ratio(report: PlanReport) -> str:
    """The ratio for the store's tier, and the reason."""
    choice = report.store_tier.choice
    if not has_ratio(report.policy):
        return f"{report.plan.ratio:.3g}, as {report.policy.name} chooses its rows"
    if choice.equal is None or choice.load_s is None:
        return f"{choice.ratio:g} on {STORE_TIER}: nothing has to be loaded"
    chosen = f"{choice.ratio:g} on {STORE_TIER}"
    recompute, load = ms(report.estimator.recompute_s(choice.ratio, report.plan.size)), ms(choice.load_s)
    if choice.equal >= 1:
        return f"{chosen}: computing everything ({recompute}) takes no longer than loading ({load})"
    if choice.equal <= MIN_RATIO:
        return f"{chosen}: loading ({load}) is hidden by recompute ({recompute}); less than {MIN_RATIO:g} costs quality"
    return f"{chosen}: recompute ({recompute}) takes as long as loading ({load}), so it costs no time"


def why_tier(plan: Plan) -> str:
    """The tier for the plan's ratio, and the reason."""
    tier, recompute = plan.choice.tier, ms(plan.recompute_s)
    if tier is None:
        return f"none for ratio {plan.ratio:g}: no tier's speed is known"
    load = ms(plan.of_tier(tier.name).load_s)
    chosen = f"{tier.name} for ratio {plan.ratio:g}"
    if plan.choice.is_hidden:
        return f"{chosen}: the cheapest whose loading ({load}) is hidden by recompute ({recompute})"
    return f"{chosen}: recompute ({recompute}) hides no tier's loading; this one delays least ({load})"


def print_check(check: Check) -> None:
    print()
    rows = [
        ["TTFT" if name == "ttft" else name, ms(check.estimated[name]), ms(check.measured[name]),
         "-" if error is None else f"{error:+.0%}"]
        for name, error in check.errors.items()
    ]  # fmt: skip
    print_table([f"ratio {check.ratio:g}", "estimated", "measured", "error"], rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"
