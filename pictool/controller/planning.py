"""What a plan is made of: the share of rows, the speed of this machine, the size of a prompt, the speeds of tiers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.controller.calibration import OnMeasure, compute_facts, compute_profile, decoding, load_profile
from pictool.controller.cost import ComputeMeasurement, Estimator, PromptSize, Speed
from pictool.controller.decision import STORE_TIER, Plan, Tier, TierEntry
from pictool.controller.measuring import measure_link, token_bytes
from pictool.controller.prompt_size import coded_size, require_room
from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.grid import label_of
from pictool.linker.policies.base import Policy, Prompt
from pictool.linker.spec import Spec
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_OPEN_READS = 3  # of an object: the header's length, the header, the tokens


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


def static_share(model: Model, policy: Policy, size: PromptSize) -> float:
    """The share of context rows that a policy without a ratio computes, of alike chunks behind a head of one token.

    Raises:
        InputError: the share depends on what documents and prompts say.
    """
    needs = policy.needs
    if needs.tables or needs.runs_model or policy.check_layers(model.geometry.layers):
        raise InputError(
            f"the rows of {label_of(policy)} depend on the content of documents and prompts; plan a fixed share"
        )
    bounds = [1 + round(i * (size.context - 1) / size.objects) for i in range(size.objects + 1)] if size.objects else []
    chunks = [[0] * (end - start) for start, end in itertools.pairwise(bounds)]
    layout = Layout.of([0], chunks, [0] * size.tail)
    rows = policy.select(Prompt(model, layout, ())).rows[: size.context]
    return float(rows.mean()) if size.context else 0.0


def measure_evenly(model: Model, again: bool, on_measure: OnMeasure | None = None) -> list[ComputeMeasurement]:
    """How fast this machine computes. What was measured while it was busy is measured again.

    Raises:
        InputError: it is busy this time, too.
    """
    for is_again in (again, True):
        measured = compute_profile(model, is_again, on_measure)
        facts = compute_facts(model)
        if facts is None or not facts.is_busy:  # None: the cache cannot be written
            return measured
    assert facts is not None
    raise InputError(
        f"this machine is busy: measured times of prefill were {facts.scatter:.0%} apart, and a plan from them would "
        "be wrong; stop other programs, and plan again"
    )


def size_of_length(
    model: Model, spec: Spec, num_tokens: int, chunk_tokens: int, again: bool = False,
    on_measure: OnMeasure | None = None,
) -> PromptSize:  # fmt: skip
    """The size of a prompt with so many tokens of context in chunks of `chunk_tokens`; no document is read.

    Raises:
        InputError: it is too long for the model.
    """
    tail = len(model.encode(spec.frame(model).tail))
    size = PromptSize(num_tokens, tail, math.ceil(num_tokens / chunk_tokens), token_bytes(model))
    require_room(model, size)
    return coded_size(size, decoding(model, spec.codec, again, on_measure))


def measure_tiers(
    model: Model, store: Store, entries: Sequence[TierEntry], again: bool, on_measure: OnMeasure | None = None
) -> list[Tier]:
    """The tiers with their speeds: measured where they have a path, else stated and read by the loader as measured."""
    own = load_profile(model, STORE_TIER, store.root, again, on_measure)

    def speed(entry: TierEntry) -> Speed:
        if entry.name == STORE_TIER:
            return own.cold
        if entry.path is not None:
            return load_profile(model, entry.name, entry.path, again, on_measure).cold
        assert entry.read_gb_s is not None
        latency = entry.latency_ms / 1e3
        device = Speed(1 / (entry.read_gb_s * 1e9), latency * model.geometry.layers, latency * _OPEN_READS)
        return own.warm.after(device)

    return [Tier(entry.name, entry.price, speed(entry)) for entry in entries]


def run_check(model: Model, store: Store, spec: Spec, estimator: Estimator, plan: Plan, ratio: float) -> Check:
    """Link from the store under the policy, and compare."""
    speed = plan.of_tier(STORE_TIER).tier.speed
    assert speed is not None
    timing = measure_link(model, store, spec)
    estimated = {
        "load": estimator.load_s(plan.size, speed),
        "recompute": estimator.recompute_s(ratio, plan.size),
        "ttft": estimator.ttft_s(ratio, plan.size, speed),
    }
    return Check(ratio, estimated, {"load": timing.fetch_s, "recompute": timing.recompute_s, "ttft": timing.ttft_s})
