"""`pic plan`: delays and costs of a prompt by storage tier, and what follows for ratio and tier (CacheBlend §5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pictool.commands.common import (
    UsageError,
    codec_setting,
    note,
    open_model,
    open_store,
    print_json,
    require_text,
)
from pictool.commands.config import setting
from pictool.commands.link import parse_fields
from pictool.commands.plan_report import Check, print_plan, report, store_plan
from pictool.commands.tiers import TierEntry, read_tiers
from pictool.controller.cost import Estimator, PromptSize, Speed
from pictool.controller.decision import MIN_RATIO, STORE_TIER, Plan, Tier, make_plan
from pictool.store.codecs import require_codec
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model

DEFAULT_ALGO = "cacheblend"
DEFAULT_QUERY = "What do these documents say?"  # some tail has to be computed
DEFAULT_CHUNK_TOKENS = 512  # of --tokens
_OPEN_READS = 3  # of an object: the header's length, the header, the tokens


@dataclass(frozen=True)
class PlanOptions:
    """The options of `pic plan`; None where the user said nothing."""

    documents: Sequence[str]
    query: str | None
    algo: str | None
    ratio: float | None
    params: Sequence[str]
    tiers: str | None
    tokens: int | None
    chunk_tokens: int | None
    check: bool
    measure: bool
    codec: str | None = None


def run_plan(
    options: PlanOptions, *, model: str | None, store: str | None, salt: str | None, device: str | None,
    dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    check_options(options)
    codec = require_codec(codec_setting(options.codec)).name
    entries, values = read_tiers(options.tiers), policy_values(options)
    opened, to = open_model(model, device, dtype, salt), open_store(store)
    from pictool.controller.calibration import compute_profile, make_estimator, with_ratio
    from pictool.linker.policies import make_policy

    policy = make_policy(options.algo or DEFAULT_ALGO, {"ratio": MIN_RATIO, **values})
    spec = make_plan_spec(options, policy, codec)
    size = plan_size(opened, to, spec, options)
    measured = compute_profile(opened, options.measure, note_measuring)
    estimator = make_estimator(opened, policy, measured)
    plan = make_plan(estimator, size, make_tiers(opened, to, entries, options.measure), policy.params["ratio"])
    check = None
    if options.check:
        chosen = policy if "ratio" in values else with_ratio(policy, store_plan(plan).choice.ratio)
        check = run_check(opened, to, replace(spec, policy=chosen), estimator, plan)
    if as_json:
        print_json(report(opened, policy, estimator, measured, plan, check))
    else:
        print_plan(opened, policy, estimator, measured, plan, check)


def check_options(options: PlanOptions) -> None:
    """Refuse what makes no sense together."""
    if options.tokens is not None and options.documents:
        raise UsageError("--tokens: plans without documents; leave them or it out")
    if options.tokens is not None and options.check:
        raise UsageError("--check: links documents; name some instead of --tokens")
    if options.tokens is None and not options.documents:
        raise UsageError("nothing to plan for; name documents, or a length of context with --tokens")


def policy_values(options: PlanOptions) -> dict[str, Any]:
    """The policy's fields, as far as the user named them."""
    ratio = {} if options.ratio is None else {"ratio": options.ratio}
    return {**ratio, **parse_fields(options.params)}


def note_measuring(what: str) -> None:
    note(f"measuring {what}, once for this machine and model")


def make_plan_spec(options: PlanOptions, policy: Policy, codec: str) -> Spec:
    """The spec of the prompt that is planned, without documents under --tokens."""
    from pictool.linker.spec import Spec

    query = require_text("the query", DEFAULT_QUERY if options.query is None else options.query)
    return Spec(
        query, options.documents, policy, setting("head", None), setting("query_template", None),
        chunk_tokens=options.chunk_tokens, codec=codec,
    )  # fmt: skip


def plan_size(model: Model, store: Store, spec: Spec, options: PlanOptions) -> PromptSize:
    """The size of the prompt that is planned: of the documents, or of --tokens.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    from pictool.controller.calibration import coded_size, decoding, measure_size, require_room, token_bytes

    if options.tokens is None:
        return measure_size(model, store, spec, again=options.measure, on_measure=note_measuring)
    objects = math.ceil(options.tokens / (options.chunk_tokens or DEFAULT_CHUNK_TOKENS))
    tail = len(model.encode(spec.frame(model).tail))
    size = PromptSize(options.tokens, tail, objects, token_bytes(model))
    require_room(model, size)
    return coded_size(size, decoding(model, spec.codec, options.measure, note_measuring))


def make_tiers(model: Model, store: Store, entries: Sequence[TierEntry], again: bool) -> list[Tier]:
    """The tiers with their speeds: measured where they have a path, else stated and read by the loader as measured."""
    from pictool.controller.calibration import load_profile

    own = load_profile(model, STORE_TIER, store.root, again, note_measuring)

    def speed(entry: TierEntry) -> Speed:
        if entry.name == STORE_TIER:
            return own.cold
        if entry.path is not None:
            return load_profile(model, entry.name, entry.path, again, note_measuring).cold
        assert entry.read_gb_s is not None
        latency = entry.latency_ms / 1e3
        device = Speed(1 / (entry.read_gb_s * 1e9), latency * model.geometry.layers, latency * _OPEN_READS)
        return own.warm.after(device)

    return [Tier(entry.name, entry.price, speed(entry)) for entry in entries]


def run_check(model: Model, store: Store, spec: Spec, estimator: Estimator, plan: Plan) -> Check:
    """Link from the store under the policy, and compare."""
    from pictool.controller.calibration import measure_link

    speed, ratio = store_plan(plan).tier.speed, spec.policy.params["ratio"]
    assert speed is not None
    timing = measure_link(model, store, spec)
    estimated = {
        "load": estimator.load_s(plan.size, speed),
        "recompute": estimator.recompute_s(ratio, plan.size),
        "ttft": estimator.ttft_s(ratio, plan.size, speed),
    }
    return Check(ratio, estimated, {"load": timing.fetch_s, "recompute": timing.recompute_s, "ttft": timing.ttft_s})
