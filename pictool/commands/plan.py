"""`pic plan`: delays and costs of a prompt by storage tier, and what follows for ratio and tier (CacheBlend §5.1)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.linking.request import (
    AUTO,
    RequestOptions,
    check_documents,
    check_keys,
    make_spec,
    note_measuring,
    parse_fields,
    with_stdin,
)
from pictool.commands.settings.options import (
    POLICY,
    SALT,
    ChunkOption,
    FieldsOption,
    JsonOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings, read_yaml, shown_key
from pictool.controller.decision import MIN_RATIO, STORE_TIER, Plan, Tier, TierPlan, make_plan
from pictool.errors import InputError
from pictool.reading import shown

if TYPE_CHECKING:
    from pictool.controller.calibration import ProfileFacts
    from pictool.controller.cost import ComputeMeasurement, Estimator, PromptSize, Speed
    from pictool.linker.policies.base import Policy
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model
    from pictool.store.store import Store

DEFAULT_ALGO = "cacheblend"
DEFAULT_QUERY = "What do these documents say?"  # some tail has to be computed
DEFAULT_CHUNK_TOKENS = 512  # of --tokens
_OPEN_READS = 3  # of an object: the header's length, the header, the tokens
_TIER_KEYS = ("name", "price_gb_month", "read_gb_s", "latency_ms", "path")
_FAR = 4  # a context this many times the longest prefill that was measured is extrapolated with a warning

app = make_app()


@dataclass(frozen=True)
class PlanOptions:
    """The options of `pic plan`; None where the user said nothing."""

    documents: Annotated[list[str], argument("DOCUMENT", "Text files (- is stdin), .kvo objects or keys.")] = field(
        default_factory=list
    )
    query: Annotated[Optional[str], option("-q, --query", "TEXT", "The question; - is stdin.")] = None
    tokens: Annotated[
        Optional[int], option("--tokens", "N", "Plan for a context of N tokens, without documents.", min=1)
    ] = None
    tiers: Annotated[Optional[str], option("--tiers", "FILE", "YAML of storage tiers, instead of examples.")] = None
    check: Annotated[bool, option("--check", None, "Link too; compare estimates with measured times.")] = False
    measure: Annotated[bool, option("--measure", None, "Measure this machine again.")] = False
    algo: Annotated[Optional[str], option("--algo", "NAME", "Policy; a wrong name lists all.", POLICY)] = None
    ratio: Annotated[
        Optional[float], option("--ratio", "SHARE", "Find a tier for this share of rows (0.15).", POLICY)
    ] = None
    params: FieldsOption = field(default_factory=list)
    chunk_tokens: ChunkOption = None
    as_json: JsonOption = False

    @property
    def request(self) -> RequestOptions:
        """What would be linked; of a policy that has a ratio, without one, with one that is to be found."""
        return RequestOptions(
            documents=self.documents,
            query=DEFAULT_QUERY if self.query is None else self.query,
            algos=[self.algo or DEFAULT_ALGO],
            ratio=AUTO if self.finds_ratio else _text(self.ratio),
            params=self.params,
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def finds_ratio(self) -> bool:
        """Whether the ratio has to be found: the policy has one, and no option sets it."""
        from pictool.linker.grid import parse_policy

        if self.ratio is not None or "ratio" in parse_fields(self.params):
            return False
        with of_command_line():
            return has_ratio(parse_policy(self.algo or DEFAULT_ALGO))


def _text(ratio: float | None) -> str | None:
    return None if ratio is None else repr(ratio)


@dataclass(frozen=True)
class TierEntry:
    """A tier as its file describes it: measured at `path`, or stated by `read_gb_s` and `latency_ms`."""

    name: str
    price: float
    path: Path | None
    read_gb_s: float | None
    latency_ms: float


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
        return tier_named(STORE_TIER, self.plan)


@command(app, "plan", "model", "device", "dtype", "store", *SALT, "codec")
def run_plan(options: PlanOptions, settings: Settings) -> None:
    """Estimate delays by storage tier; choose ratio and tier.

    \b
      pic plan a.txt b.txt -q "Who?" --check
      pic plan --tokens 32768 --tiers tiers.yaml
    """
    check_options(options)
    tiers = read_tiers(options.tiers)
    spec = with_stdin(make_spec(options.request, settings))
    check_documents(options.documents)
    from pictool.controller.choice import make_estimator, with_ratio

    store = open_store(settings)
    check_keys(store, spec.documents, settings.salt)
    model = open_model(settings)
    size = plan_size(model, store, spec, options)
    knob = spec.policy.knob
    ratio = spec.policy.params[knob.field] if knob and knob.is_share else static_share(model, spec.policy, size)
    measured = measure_evenly(model, options.measure)
    estimator = make_estimator(model, spec.policy, measured)
    plan = make_plan(estimator, size, measure_tiers(model, store, tiers, options.measure), ratio)
    check = None
    if options.check:
        if options.finds_ratio:
            ratio = tier_named(STORE_TIER, plan).choice.ratio
            spec = replace(spec, policy=with_ratio(spec.policy, ratio))
        check = run_check(model, store, spec, estimator, plan, ratio)
    report = PlanReport(model, spec.policy, estimator, measured, plan, check)
    if options.as_json:
        print_json(report_json(report))
    else:
        print_report(report)


def has_ratio(policy: Policy) -> bool:
    """Whether the share of rows is a field of the policy, so that a plan may choose it."""
    return policy.knob is not None and policy.knob.is_share


def static_share(model: Model, policy: Policy, size: PromptSize) -> float:
    """The share of context rows that a policy without a ratio computes, of alike chunks behind a head of one token.

    Raises:
        InputError: the share depends on what documents and prompts say.
    """
    from pictool.core import Layout
    from pictool.linker.grid import label_of
    from pictool.linker.policies.base import Prompt

    needs = policy.needs
    if needs.tables or needs.attention or needs.runs_model or policy.check_layers(model.geometry.layers):
        raise InputError(
            f"the rows of {label_of(policy)} depend on what documents and prompts say; plan one of its parts"
        )
    bounds = [1 + round(i * (size.context - 1) / size.objects) for i in range(size.objects + 1)] if size.objects else []
    chunks = [[0] * (end - start) for start, end in itertools.pairwise(bounds)]
    layout = Layout.of([0], chunks, [0] * size.tail)
    rows = policy.select(Prompt(model, layout, ())).rows[: size.context]
    return float(rows.mean()) if size.context else 0.0


def check_options(options: PlanOptions) -> None:
    """Refuse what makes no sense together."""
    if options.tokens is not None and options.documents:
        raise UsageError("--tokens: plans without documents; leave them or it out")
    if options.tokens is not None and options.check:
        raise UsageError("--check: links documents; name some instead of --tokens")
    if options.tokens is None and not options.documents:
        raise UsageError("nothing to plan for; name documents, or a length of context with --tokens")


def measure_evenly(model: Model, again: bool) -> list[ComputeMeasurement]:
    """How fast this machine computes. What was measured while it was busy is measured again.

    Raises:
        InputError: it is busy this time, too.
    """
    from pictool.controller.calibration import compute_facts, compute_profile

    for is_again in (again, True):
        measured = compute_profile(model, is_again, note_measuring)
        facts = compute_facts(model)
        if facts is None or not facts.is_busy:  # None: the cache cannot be written
            return measured
    assert facts is not None
    raise InputError(
        f"this machine is busy: measured times of prefill were {facts.scatter:.0%} apart, and a plan from them would "
        "be wrong; end what else runs here, and plan again"
    )


def plan_size(model: Model, store: Store, spec: Spec, options: PlanOptions) -> PromptSize:
    """The size of the prompt that is planned: of the documents, or of --tokens.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    from pictool.controller.calibration import decoding
    from pictool.controller.cost import PromptSize
    from pictool.controller.measuring import token_bytes
    from pictool.controller.prompt_size import coded_size, measure_size, require_room

    if options.tokens is None:
        return measure_size(model, store, spec, again=options.measure, on_measure=note_measuring)
    objects = math.ceil(options.tokens / (options.chunk_tokens or DEFAULT_CHUNK_TOKENS))
    tail = len(model.encode(spec.frame(model).tail))
    size = PromptSize(options.tokens, tail, objects, token_bytes(model))
    require_room(model, size)
    return coded_size(size, decoding(model, spec.codec, options.measure, note_measuring))


def measure_tiers(model: Model, store: Store, entries: Sequence[TierEntry], again: bool) -> list[Tier]:
    """The tiers with their speeds: measured where they have a path, else stated and read by the loader as measured."""
    from pictool.controller.calibration import load_profile
    from pictool.controller.cost import Speed

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


def run_check(model: Model, store: Store, spec: Spec, estimator: Estimator, plan: Plan, ratio: float) -> Check:
    """Link from the store under the policy, and compare."""
    from pictool.controller.measuring import measure_link

    speed = tier_named(STORE_TIER, plan).tier.speed
    assert speed is not None
    timing = measure_link(model, store, spec)
    estimated = {
        "load": estimator.load_s(plan.size, speed),
        "recompute": estimator.recompute_s(ratio, plan.size),
        "ttft": estimator.ttft_s(ratio, plan.size, speed),
    }
    return Check(ratio, estimated, {"load": timing.fetch_s, "recompute": timing.recompute_s, "ttft": timing.ttft_s})


def tier_named(name: str, plan: Plan) -> TierPlan:
    return next(planned for planned in plan.tiers if planned.tier.name == name)


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
    if facts := compute_facts(report.model):
        print(f"measured  {why_trusted(facts)}")
    longest = max(prefill.size.num_tokens for prefill in report.measured)
    if size.context > _FAR * longest:
        note(f"prefill was measured up to {longest} tokens, which took long; times of {size.context} are extrapolated")
    if report.policy.needs.runs_model:
        note(f"{report.policy.name} reads the prompt with a model of its own; that is not in these times")
    if report.check:
        print_check(report.check)


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
    load = ms(tier_named(tier.name, plan).load_s)
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


def read_tiers(name: str | None) -> list[TierEntry]:
    """The tiers of a file, or the examples that ship with pic.

    Raises:
        InputError: names the file, the tier and the key, and what it must be.
    """
    if name is not None:
        return _parse_tiers(Path(name))
    from importlib.resources import as_file, files

    with as_file(files("pictool.controller") / "tiers.yaml") as path:
        return _parse_tiers(path)


def _parse_tiers(path: Path) -> list[TierEntry]:
    listed = read_yaml(path, ("tiers",)).get("tiers")
    if not isinstance(listed, list) or not listed:
        raise InputError(f"{path}: tiers must be a list of tiers, each with name and price_gb_month")
    entries = [_tier_entry(path, index, tier) for index, tier in enumerate(listed)]
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: name {twice[0]} stands for two tiers; give each its own")
    if STORE_TIER not in names:
        raise InputError(
            f"{path}: has no tier named {STORE_TIER}, where the objects are now; add it with its price_gb_month"
        )
    return entries


def _tier_entry(path: Path, index: int, data: Any) -> TierEntry:
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: tier {index + 1} must be a mapping with the keys {', '.join(_TIER_KEYS)}")
    name = data.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"{path}: name of tier {index + 1} must be a text")
    if unknown := [shown_key(key) for key in data if key not in _TIER_KEYS]:
        raise InputError(
            f"{path}: tier {name} has an unknown key {', '.join(unknown)}; known are {', '.join(_TIER_KEYS)}"
        )
    named = {key for key in ("read_gb_s", "path") if data.get(key) is not None}
    if name == STORE_TIER and named:
        raise InputError(f"{path}: tier {name} is measured where the store lives; leave {' and '.join(named)} out")
    if name != STORE_TIER and len(named) != 1:
        raise InputError(f"{path}: tier {name} must have read_gb_s (stated) or path (measured), one of them")
    if data.get("latency_ms") is not None and "read_gb_s" not in named:
        raise InputError(f"{path}: latency_ms of tier {name} goes with read_gb_s; a measured tier has its own")
    return TierEntry(
        name, _tier_number(path, name, data, "price_gb_month", None), _tier_directory(path, name, data.get("path")),
        _tier_number(path, name, data, "read_gb_s", None) if "read_gb_s" in named else None,
        _tier_number(path, name, data, "latency_ms", 0.0),
    )  # fmt: skip


def _tier_number(path: Path, tier: str, data: Mapping[str, Any], key: str, default: float | None) -> float:
    value = data.get(key, default)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.nan
    if math.isfinite(number) and (number > 0 or (number == 0 and key != "read_gb_s")):
        return number
    least = "above 0" if key == "read_gb_s" else "0 or more"
    raise InputError(f"{path}: {key} of tier {tier} must be a number, {least}, not {shown(value)}")


def _tier_directory(path: Path, tier: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InputError(f"{path}: path of tier {tier} must be a text; put it in quotes")
    directory = path.parent / value
    if not directory.is_dir():
        raise InputError(f"{path}: path of tier {tier}: {value} is no directory; make it, or state read_gb_s instead")
    return directory
