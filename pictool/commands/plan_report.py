"""What `pic plan` prints: a table of tiers, the two choices and why, and how the estimates compare with a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.commands.common import note
from pictool.controller.cost import Computed, Estimator, PromptSize
from pictool.controller.decision import MIN_RATIO, STORE_TIER, Plan, RatioChoice, TierPlan

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy
    from pictool.runtime.model import Model

_FAR = 4  # so many times the longest prefill that was measured is too far to be sure


@dataclass(frozen=True)
class Check:
    """A link from the store: seconds of load, recompute and ttft as they were estimated, and as they were."""

    ratio: float
    estimated: Mapping[str, float]
    measured: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float | None]:
        """Relative: +1 is an estimate twice as long as what was measured. None where nothing was measured."""
        return {name: self.estimated[name] / real - 1 if real else None for name, real in self.measured.items()}


def store_plan(plan: Plan) -> TierPlan:
    """The plan of the tier on which the store lives."""
    return next(one for one in plan.tiers if one.tier.name == STORE_TIER)


def report(
    model: Model, policy: Policy, estimator: Estimator, measured: Sequence[Computed], plan: Plan,
    check: Check | None,
) -> dict[str, Any]:  # fmt: skip
    """The JSON of `pic plan --json`; seconds, bytes, and what a tier costs per month."""
    size, tier = plan.size, plan.choice.tier
    return {
        "model": model.name,
        "algo": policy.name,
        "ratio": plan.ratio,
        "tokens": {"context": size.context, "tail": size.tail},
        "objects": size.objects,
        "bytes": size.stored_bytes, "kv_bytes": size.num_bytes, "decode_s": size.decode_s,
        "prefill": {
            "measured": [[one.size.num_tokens, one.runs, one.seconds] for one in measured],
            "constant_s": estimator.constant_s, "token_s": estimator.token_s, "pair_s": estimator.pair_s,
            "run_s": estimator.run_s, "context_s": estimator.prefill_s(size.context),
        },
        "recompute_s": plan.recompute_s,
        "tiers": [_row(one, plan) for one in plan.tiers],
        "choice": {
            "ratio": store_plan(plan).choice.ratio, "tier": tier.name if tier else None,
            "is_hidden": plan.choice.is_hidden,
        },
        "check": check and {**vars(check), "error": check.errors},
    }  # fmt: skip


def _row(one: TierPlan, plan: Plan) -> dict[str, Any]:
    speed = one.tier.speed
    return {
        "name": one.tier.name, "price_gb_month": one.tier.price, "speed": speed and vars(speed), "load_s": one.load_s,
        "ttft_s": one.ttft_s, "is_hidden": one.load_s is not None and one.load_s <= plan.recompute_s,
        "ratio": one.choice.ratio, "ratio_equal": one.choice.equal, "cost_month": one.cost,
    }  # fmt: skip


def print_plan(
    model: Model, policy: Policy, estimator: Estimator, measured: Sequence[Computed], plan: Plan,
    check: Check | None,
) -> None:  # fmt: skip
    size = plan.size
    print(
        f"prompt    {size.context} tokens of context in {size.objects} objects ({_kv(size)}), {size.tail} of the query"
    )
    full = ms(estimator.prefill_s(size.context + size.tail))
    print(f"model     {model.name} ({model.dtype}, {model.device}): TTFT of full recompute {full}")
    print(f"policy    {policy.name}, ratio {plan.ratio:g}")
    print()
    print_table(
        ["tier", "load", "recompute", "TTFT", "ratio", "cost/month"],
        [
            [one.tier.name, ms(one.load_s), ms(plan.recompute_s), ms(one.ttft_s), f"{one.choice.ratio:g}",
             f"{one.cost:.2g}"]
            for one in plan.tiers
        ],
    )  # fmt: skip
    print()
    print(f"ratio     {why_ratio(store_plan(plan).choice, estimator, plan)}")
    print(f"tier      {why_tier(plan)}")
    longest = max(one.size.num_tokens for one in measured)
    if size.context > _FAR * longest:
        note(f"prefill was measured up to {longest} tokens, which took long; times of {size.context} are extrapolated")
    if policy.needs.runs_model:
        note(f"{policy.name} reads the prompt with a model of its own; that is not in these times")
    if check:
        print_check(check)


def _kv(size: PromptSize) -> str:
    """The KV of a prompt's objects, and what it takes if it is coded."""
    plain = f"{size.num_bytes / 1e6:.1f} MB of KV"
    if size.coded_bytes is None or size.coded_bytes == size.num_bytes:
        return plain
    return f"{plain} in {size.coded_bytes / 1e6:.1f} MB, {ms(size.decode_s)} to decode"


def why_ratio(choice: RatioChoice, estimator: Estimator, plan: Plan) -> str:
    """The ratio for the store's tier, and the reason."""
    if choice.equal is None or choice.load_s is None:
        return f"{choice.ratio:g} on {STORE_TIER}: nothing has to be loaded"
    chosen = f"{choice.ratio:g} on {STORE_TIER}"
    recompute, load = ms(estimator.recompute_s(choice.ratio, plan.size)), ms(choice.load_s)
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
    load = ms(next(one.load_s for one in plan.tiers if one.tier == tier))
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
