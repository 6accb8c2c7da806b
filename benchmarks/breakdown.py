"""The parts of TTFT (EPIC fig. 10): waiting for KV, selecting rows, every layer and its checks, logits.

    python -m benchmarks.breakdown --plot docs/images/bench-breakdown.svg

The functions that compute them are timed, in runs of their own. An accelerator is synchronized around each part, so no
layer overlaps with the next one, and the whole takes longer than under `sync`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

from benchmarks.output import write_results
from benchmarks.pictures import picture, picture_text
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt
from pictool.bench.repeats import MedianRange, interleave
from pictool.bench.shapes import random_model
from pictool.bench.single_request import link_prompt
from pictool.linker.fusor import Fusor
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies.base import Policy
from pictool.linker.policies.speccache import SpecCache
from pictool.runtime.device import synchronize

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pictool.runtime.model import Model

# What is timed, each part by its name
TIMED = (
    (Fusor, "prefill_layer", "layer"), (Fusor, "_narrow", "check"), (Fusor, "finish", "logits"),
    (SpecCache, "_scores", "scoring"),
)  # fmt: skip
ALGOS = ("naive", "legolink-16", "cacheblend-15", "cacheblend-15:filter=single")
_PART_COLOURS = {
    "load": "#9e9ac8", "scoring": "#31a354", "select": "#a1d99b", "layer 0": "#08519c", "layer 1": "#d94801",
    "other layers": "#9ecae1", "logits": "#fed976", "other": "#bdbdbd",
}  # fmt: skip


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
    model: Model, policies: Sequence[LabelledPolicy], options: PromptOptions, directory: Path
) -> BreakdownResult:
    """Measure the parts of TTFT; objects go to `directory`, which the caller removes."""
    prompt = make_prompt(model, policies, options, directory)
    runs = {each.label: partial(link_in_parts, model, prompt, each.policy, options.is_cold) for each in policies}
    samples = interleave(runs, options.repeats)
    methods = [_policy_breakdown(labelled, model.geometry.layers, samples[labelled.label]) for labelled in policies]
    return BreakdownResult(options.num_tokens, tuple(methods))


def _policy_breakdown(labelled: LabelledPolicy, num_layers: int, samples: Sequence[Parts]) -> PolicyBreakdown:
    policy, ttft = labelled.policy, MedianRange.of([parts.ttft for parts in samples])
    return PolicyBreakdown(
        labelled.label, policy.params, policy.check_layers(num_layers), ttft, Parts.medians(samples), tuple(samples)
    )  # fmt: skip


def link_in_parts(model: Model, prompt: BenchPrompt, policy: Policy, is_cold: bool = False) -> Parts:
    """Link once, with every part timed."""
    with Stopwatch(model) as watch:
        timing = link_prompt(model, prompt, policy, is_cold).timing
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
    """Seconds of each part of the links within it, by its name, in the order in which they ran."""

    def __init__(self, model: Model) -> None:
        self._model, self._patches = model, ExitStack()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def __enter__(self) -> Self:
        for owner, method, name in TIMED:
            self._patches.enter_context(patch.object(owner, method, self._timed(getattr(owner, method), name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A method that is timed: the device has done all work before it, and all of it."""

        def timed(*args: Any) -> Any:
            synchronize(self._model.device)
            started = time.perf_counter()
            result = method(*args)
            synchronize(self._model.device)
            self.seconds[name].append(time.perf_counter() - started)
            return result

        return timed


def plot_breakdown(result: BreakdownResult, title: str, name: str | Path) -> None:
    """Stacked bars of the parts of TTFT (EPIC fig. 10); checks of layers are hatched."""
    with picture(name, 7.2, 1.4 + 0.45 * len(result.methods)) as figure:
        axes = figure.subplots()
        for row, method in enumerate(result.methods):
            _draw_bar(axes, row, method)
        axes.set_yticks(range(len(result.methods)), [picture_text(method.label) for method in result.methods])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("TTFT, milliseconds (median of each part); the share is that of layer 1 with its check")
        axes.set_title(picture_text(title), loc="left")
        _part_legend(figure)


def _draw_bar(axes: Axes, row: int, method: PolicyBreakdown) -> None:
    at = 0.0
    for part, compute, check in bar_parts(method):
        for seconds, hatch in ((compute, None), (check, "////")):
            axes.barh(
                row, seconds * 1e3, left=at, color=_PART_COLOURS[part], hatch=hatch, edgecolor="white", linewidth=0.2,
                height=0.7,
            )  # fmt: skip
            at += seconds * 1e3
    if 1 in method.checked:
        layer_1 = method.parts.layers[1] + method.parts.checks[1]
        axes.annotate(f"  {method.share(layer_1):.0%}", (at, row), va="center", color=_PART_COLOURS["layer 1"])


def bar_parts(method: PolicyBreakdown) -> list[tuple[str, float, float]]:
    """(part, seconds of computing, seconds of checking) from the left to the right of a bar."""
    parts = method.parts
    names = ["layer 0", "layer 1", *["other layers"] * len(parts.layers)]
    layers = list(zip(names, parts.layers, parts.checks, strict=False))
    first = [(name, getattr(parts, name), 0.0) for name in ("load", "scoring", "select")]
    return [*first, *layers, ("logits", parts.logits, 0.0), ("other", parts.other, 0.0)]


def _part_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=part) for part, colour in _PART_COLOURS.items()]
    handles.append(Patch(facecolor="#777777", hatch="////", edgecolor="white", label="checks"))
    figure.legend(handles=handles, loc="outside lower center", ncols=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bench_breakdown.json"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    model, prompt = random_model(options.shape), PromptOptions(new_tokens=0, repeats=options.repeats)
    with tempfile.TemporaryDirectory() as inside:
        result = bench_breakdown(model, parse_grid(ALGOS), prompt, Path(inside))
    write_results(options.out, {"options": asdict(prompt), "results": result.report()})
    if options.plot:
        plot_breakdown(result, f"{model.name}, {prompt.chunks} chunks of {prompt.chunk_tokens} tokens", options.plot)


if __name__ == "__main__":
    main()
