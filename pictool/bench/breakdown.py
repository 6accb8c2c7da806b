"""The parts of TTFT (EPIC fig. 10): waiting for KV, selecting rows, every layer and its checks, logits.

A hook of the link times them, in runs of their own. An accelerator is synchronized around each part, so no layer
overlaps with the next one, and the whole takes longer than under `sync`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt
from pictool.bench.repeats import MedianRange, OnRun, interleave
from pictool.bench.single_request import link_prompt
from pictool.errors import InputError
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies.base import Policy
from pictool.runtime.device import synchronize

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Parts:
    """Seconds of one link, which add up to its TTFT. Fields are the keys of the JSON.

    Fields:
        load: opening objects and waiting for layers.
        scoring: a second model reads the prompt. select: the rest of resolving, laying out and selecting.
        layers: [layers], computing rows. checks: [layers], comparing and narrowing; 0 where a layer is not checked.
        other: embedding, and work between the layers.
    """

    load: float
    scoring: float
    select: float
    layers: tuple[float, ...]
    checks: tuple[float, ...]
    logits: float
    other: float

    @property
    def ttft(self) -> float:
        outside_layers = self.load + self.scoring + self.select + self.logits + self.other
        return outside_layers + sum(self.layers) + sum(self.checks)

    @classmethod
    def medians(cls, several: Sequence[Parts]) -> Parts:
        """The median of each part; their sum is near the median of the sums."""
        columns = {name: [getattr(parts, name) for parts in several] for name in asdict(several[0])}
        return cls(**{name: _median(values) for name, values in columns.items()})


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(statistics.median(layer) for layer in zip(*values, strict=True))
    return statistics.median(values)


@dataclass(frozen=True)
class PolicyBreakdown:
    """One policy's TTFT, and the medians of its parts. `checked`: the layers at which it compares."""

    label: str
    params: dict[str, Any]
    checked: tuple[int, ...]
    ttft: MedianRange
    parts: Parts
    samples: tuple[Parts, ...]

    def share(self, seconds: float) -> float:
        """These seconds as a share of all parts."""
        return seconds / self.parts.ttft


@dataclass(frozen=True)
class BreakdownResult:
    prompt_tokens: int
    methods: tuple[PolicyBreakdown, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_breakdown(
    model: Model,
    policies: Sequence[LabelledPolicy],
    options: PromptOptions,
    directory: Path,
    on_run: OnRun | None = None,
) -> BreakdownResult:
    """Measure the parts of TTFT; objects go to `directory`, which the caller removes.

    Args:
        on_run: called after each of the policies · (repeats + 1) runs.

    Raises:
        PicError: a prompt that is too long for the model, a policy that does not fit it, no room for the objects.
    """
    if not model.is_of_transformers:
        raise InputError(f"{model.name}: llama.cpp does not show the time of each layer; use pic bench sync")
    prompt = make_prompt(model, policies, options, directory)
    runs = {each.label: partial(link_in_parts, model, prompt, each.policy, options.is_cold) for each in policies}
    samples = interleave(runs, options.repeats, on_run)
    methods = [_policy_breakdown(labelled, model.geometry.layers, samples[labelled.label]) for labelled in policies]
    return BreakdownResult(options.num_tokens, tuple(methods))


def _policy_breakdown(labelled: LabelledPolicy, num_layers: int, samples: Sequence[Parts]) -> PolicyBreakdown:
    policy, ttft = labelled.policy, MedianRange.of([parts.ttft for parts in samples])
    return PolicyBreakdown(
        labelled.label, policy.params, policy.check_layers(num_layers), ttft, Parts.medians(samples), tuple(samples)
    )  # fmt: skip


def link_in_parts(model: Model, prompt: BenchPrompt, policy: Policy, is_cold: bool = False) -> Parts:
    """Link once, with every part timed."""
    watch = Stopwatch(model)
    timing = link_prompt(model, prompt, policy, is_cold, watch.stage).timing
    seconds, num_layers = watch.seconds, model.geometry.layers
    checked = policy.check_layers(num_layers)
    with_check, check = seconds["layer"], iter(seconds["check"])
    checks = tuple(next(check) if layer in checked else 0.0 for layer in range(num_layers))
    layers = tuple(both - check_s for both, check_s in zip(with_check, checks, strict=True))
    scoring, logits = sum(seconds["scoring"]), sum(seconds["logits"])
    return Parts(
        load=timing.load_s, scoring=scoring, select=timing.select_s - scoring, layers=layers, checks=checks,
        logits=logits, other=timing.recompute_s - sum(layers) - sum(checks) - logits,
    )  # fmt: skip


class Stopwatch:
    """Seconds of each part of a link that is timed on its own, by its name, in the order in which they ran.

    Its `stage` is the hook of `link`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one part: the device has done all work before it, and all of it."""
        synchronize(self._model.device)
        started = time.perf_counter()
        yield
        synchronize(self._model.device)
        self.seconds[name].append(time.perf_counter() - started)
