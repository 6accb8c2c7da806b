"""Where TTFT goes (EPIC fig. 10): waiting for KV, choosing rows, every layer and its checks, logits.

Layers are timed from outside, in runs of their own. On CUDA each is waited for, so nothing of a layer overlaps with
the next one, and the whole takes longer than under `sync`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.bench.options import PromptOptions
from pictool.bench.rounds import OnRun, Spread, rounds
from pictool.bench.sample import Prompt, link_prompt, settle
from pictool.bench.sync import make_prompt
from pictool.linker.fusor import Fusor
from pictool.linker.grid import Labelled
from pictool.linker.policies.base import Policy
from pictool.runtime import activations
from pictool.runtime.image import Image

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
    with timed(model) as watch:
        timing = link_prompt(model, prompt, policy, is_cold).timing
    layers, checked = tuple(watch.computing), policy.check_layers(len(watch.computing))
    beside = [whole - layer for whole, layer in zip(watch.prefilling, layers, strict=True)]
    checks = tuple(seconds if layer in checked else 0.0 for layer, seconds in enumerate(beside))
    scoring, logits = sum(watch.scoring), sum(watch.logits)
    return Parts(
        load=timing.load_s, scoring=scoring, select=timing.select_s - scoring, layers=layers, checks=checks,
        logits=logits, other=timing.recompute_s - sum(layers) - sum(checks) - logits,
    )  # fmt: skip


@dataclass
class Stopwatch:
    """Seconds of each call: layers with their checks, layers alone, logits, reading by a small model."""

    prefilling: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    scoring: list[float] = field(default_factory=list)


@contextmanager
def timed(model: Model) -> Iterator[Stopwatch]:
    """Links of this process are timed within; nothing else may link meanwhile."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for owner, name, into in (
            (Fusor, "prefill_layer", watch.prefilling),
            (Fusor, "finish", watch.logits),
            (Image, "compute", watch.computing),
            (activations, "hidden_norms", watch.scoring),
        ):
            stack.enter_context(_clocked(owner, name, into, model))
        yield watch


@contextmanager
def _clocked(owner: Any, name: str, into: list[float], model: Model) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        settle(model)
        started = time.perf_counter()
        result = original(*args, **kwargs)
        settle(model)
        into.append(time.perf_counter() - started)
        return result

    setattr(owner, name, run)
    try:
        yield
    finally:
        setattr(owner, name, original)
