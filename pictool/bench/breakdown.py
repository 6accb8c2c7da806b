"""Where TTFT goes (EPIC fig. 10): waiting for KV, choosing rows, every layer and its checks, logits.

Layers are timed from outside, in runs of their own. On CUDA each is waited for, so nothing of a layer overlaps with
the next one, and the whole takes longer than under `sync`.
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
from pictool.bench.rounds import OnRun, Spread, rounds
from pictool.bench.sample import Prompt, link_prompt, settle
from pictool.bench.sync import make_prompt
from pictool.linker.grid import Labelled
from pictool.linker.policies.base import Policy

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Parts:
    """Seconds of one link, which add up to its TTFT.

    Fields:
        load: opening objects and waiting for layers. scoring: a small model reads the prompt. select: the rest of
            resolving, laying out and choosing.
        layers: [layers], computing rows. checks: [layers], comparing and narrowing; 0 where a layer is not checked.
        other: embedding, and what stands between the layers.
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
        alone = self.load + self.scoring + self.select + self.logits + self.other
        return alone + sum(self.layers) + sum(self.checks)

    @classmethod
    def medians(cls, several: Sequence[Parts]) -> Parts:
        """Part by part; their sum is near the median of the sums."""
        columns = {name: [getattr(one, name) for one in several] for name in asdict(several[0])}
        return cls(**{name: _median(values) for name, values in columns.items()})


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(statistics.median(layer) for layer in zip(*values, strict=True))
    return statistics.median(values)


@dataclass(frozen=True)
class Broken:
    """One policy's TTFT, and the medians of its parts. `checked`: the layers at which it compares."""

    label: str
    params: dict[str, Any]
    checked: tuple[int, ...]
    ttft: Spread
    parts: Parts
    samples: tuple[Parts, ...]

    def share(self, seconds: float) -> float:
        """Of all parts."""
        return seconds / self.parts.ttft


@dataclass(frozen=True)
class BreakdownResult:
    prompt_tokens: int
    methods: tuple[Broken, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_breakdown(
    model: Model,
    policies: Sequence[Labelled],
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
    prompt = make_prompt(model, policies, options, directory)
    runs = {one.label: partial(link_in_parts, model, prompt, one.policy, options.is_cold) for one in policies}
    measured = rounds(runs, options.repeats, on_run)
    num_layers = model.geometry.layers
    methods = tuple(
        Broken(
            one.label, one.policy.params, one.policy.check_layers(num_layers),
            Spread.of([parts.ttft for parts in measured[one.label]]), Parts.medians(measured[one.label]),
            tuple(measured[one.label]),
        )
        for one in policies
    )  # fmt: skip
    return BreakdownResult(options.num_tokens, methods)


def link_in_parts(model: Model, prompt: Prompt, policy: Policy, is_cold: bool = False) -> Parts:
    """One link with every layer timed."""
    watch = Stopwatch(model)
    timing = link_prompt(model, prompt, policy, is_cold, watch.stage).timing
    seconds, num_layers = watch.seconds, model.geometry.layers
    checked = policy.check_layers(num_layers)
    whole, each_check = seconds["layer"], iter(seconds["check"])
    checks = tuple(next(each_check) if layer in checked else 0.0 for layer in range(num_layers))
    layers = tuple(layer - check for layer, check in zip(whole, checks, strict=True))
    scoring, logits = sum(seconds["scoring"]), sum(seconds["logits"])
    return Parts(
        load=timing.load_s, scoring=scoring, select=timing.select_s - scoring, layers=layers, checks=checks,
        logits=logits, other=timing.recompute_s - sum(layers) - sum(checks) - logits,
    )  # fmt: skip


class Stopwatch:
    """Seconds of each part of a link that is timed on its own, by its name, in the order in which they ran."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one part; the device has finished what came before, and all of it."""
        settle(self._model)
        started = time.perf_counter()
        yield
        settle(self._model)
        self.seconds[name].append(time.perf_counter() - started)
