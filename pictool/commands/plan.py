"""`pic plan`: delays and costs of a prompt by storage tier, and what follows for ratio and tier (CacheBlend §5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import print_json
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
from pictool.commands.planning.report import PlanReport, print_report, report_json
from pictool.commands.planning.tiers import read_tiers
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
from pictool.commands.settings.settings import Settings
from pictool.controller.decision import STORE_TIER, TierEntry, has_ratio, make_plan

if TYPE_CHECKING:
    from pictool.controller.cost import PromptSize
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model
    from pictool.store.store import Store

DEFAULT_ALGO = "cacheblend"
DEFAULT_QUERY = "What do these documents say?"  # some tail has to be computed
DEFAULT_CHUNK_TOKENS = 512  # of --tokens

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
    tiers: Annotated[
        Optional[str], option("--tiers", "FILE", "Read the storage tiers from a YAML file (examples).")
    ] = None
    check: Annotated[bool, option("--check", None, "Also link, and print measured times next to the estimates.")] = (
        False
    )
    measure: Annotated[bool, option("--measure", None, "Measure this machine again.")] = False
    algo: Annotated[
        Optional[str], option("--algo", "NAME", "A policy with a ratio. A wrong name lists all.", POLICY)
    ] = None
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


@command(app, "plan", "model", "device", "dtype", "store", *SALT, "codec")
def run_plan(options: PlanOptions, settings: Settings) -> None:
    """Estimate loading and recompute by storage tier; choose ratio and tier.

    \b
      pic plan a.txt b.txt -q "Who?" --check
      pic plan --tokens 32768 --tiers tiers.yaml
    """
    check_options(options)
    tiers = read_tiers(options.tiers)
    spec = with_stdin(make_spec(options.request, settings))
    check_documents(options.documents)
    store = open_store(settings)
    check_keys(store, spec.documents, settings.salt)
    report = make_report(options, open_model(settings), store, spec, tiers)
    if options.as_json:
        print_json(report_json(report))
    else:
        print_report(report)


def make_report(
    options: PlanOptions, model: Model, store: Store, spec: Spec, tiers: Sequence[TierEntry]
) -> PlanReport:  # fmt: skip
    """Measure, where that is still to be done; plan, and with --check compare with a link."""
    from pictool.controller.choice import make_estimator, with_ratio
    from pictool.controller.planning import measure_evenly, measure_tiers, run_check, static_share

    size = plan_size(model, store, spec, options)
    knob = spec.policy.knob
    ratio = spec.policy.params[knob.field] if knob and knob.is_share else static_share(model, spec.policy, size)
    measured = measure_evenly(model, options.measure, note_measuring)
    estimator = make_estimator(model, spec.policy, measured)
    plan = make_plan(estimator, size, measure_tiers(model, store, tiers, options.measure, note_measuring), ratio)
    check = None
    if options.check:
        if options.finds_ratio:
            ratio = plan.of_tier(STORE_TIER).choice.ratio
            spec = replace(spec, policy=with_ratio(spec.policy, ratio))
        check = run_check(model, store, spec, estimator, plan, ratio)
    return PlanReport(model, spec.policy, estimator, measured, plan, check)


def plan_size(model: Model, store: Store, spec: Spec, options: PlanOptions) -> PromptSize:
    """The size of the prompt that is planned: of the documents, or of --tokens.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    from pictool.controller.planning import size_of_length
    from pictool.controller.prompt_size import measure_size

    if options.tokens is None:
        return measure_size(model, store, spec, again=options.measure, on_measure=note_measuring)
    chunk_tokens = options.chunk_tokens or DEFAULT_CHUNK_TOKENS
    return size_of_length(model, spec, options.tokens, chunk_tokens, options.measure, note_measuring)


def check_options(options: PlanOptions) -> None:
    """Refuse what makes no sense together."""
    if options.tokens is not None and options.documents:
        raise UsageError("--tokens: plans without documents; leave one of them out")
    if options.tokens is not None and options.check:
        raise UsageError("--check: needs documents; name some instead of --tokens")
    if options.tokens is None and not options.documents:
        raise UsageError("nothing to plan for; name documents, or a length of context with --tokens")
