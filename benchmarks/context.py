"""TTFT by the length of the prompt at a fixed size of chunks (EPIC §5.6, fig. 9), and the exponents of its growth.

python -m benchmarks.context --threads 2 --plot docs/images/bench-context
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.output import write_results
from benchmarks.pictures import line_colours, picture, picture_text
from pictool.bench.options import TRANSFORMERS
from pictool.bench.prompts import BenchPrompt, compile_for, random_chunks, random_tail, require_positions
from pictool.bench.repeats import MedianRange, OnRun, interleave, median_or_none, median_ratio
from pictool.bench.shapes import random_model
from pictool.bench.single_request import Measurement, baselines_of, run_linked
from pictool.bench.sync import with_full
from pictool.core import Chunk
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import BASELINE
from pictool.store.store import Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pictool.runtime.model import Model

MeasuredRun = Callable[[], Measurement | None]  # None: the device has too little memory
ALGOS = ("full", "legolink-16", "cacheblend-15", "naive")


@dataclass(frozen=True)
class ContextOptions:
    """Prompts of `start` tokens, doubled as long as they have at most `stop`.

    All chunks have `chunk_tokens` tokens, but the last, which has what is left before the tail.
    """

    start: int = 1024
    stop: int = 32768
    chunk_tokens: int = 512
    tail_tokens: int = 32
    repeats: int = 3
    seed: int = 0
    is_cold: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt, ascending."""
        return tuple(self.start << i for i in range((self.stop // self.start).bit_length()))


@dataclass(frozen=True)
class Growth:
    """seconds ~ tokens ^ exponent. `error` is the exponent's standard error; two points have none."""

    exponent: float
    error: float | None

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> Growth | None:
        """The least-squares line through (log tokens, log seconds); None for less than two lengths."""
        if len(tokens) < 2:
            return None
        x, y = np.log(tokens), np.log(seconds)
        x, y = x - x.mean(), y - y.mean()
        square = float(x @ x)
        exponent = float(x @ y) / square
        residual = y - exponent * x
        error = math.sqrt(float(residual @ residual) / (len(x) - 2) / square) if len(x) > 2 else None
        return cls(exponent, error)

    def __str__(self) -> str:
        return f"{self.exponent:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def free_memory() -> None:
    """Return the memory of models that nothing uses any more to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def longer_half(count: int) -> slice:
    """The longer half of `count` lengths, with the middle one: what is constant per prompt weighs least there."""
    return slice(count // 2, count)


@dataclass(frozen=True)
class CurvePoint:
    """One method at one length. Fields are the keys of the JSON, as of `sync`; `speedup` is None if `full` ended."""

    tokens: int
    ttft: MedianRange
    recompute_s: float | None
    rows: float
    bytes_read: int
    peak_bytes: float | None
    speedup: float | None
    samples: tuple[Measurement, ...]


@dataclass(frozen=True)
class Curve:
    """One method over the lengths. `out_of_memory`: the tokens for which the device's memory was not enough."""

    label: str
    params: dict[str, Any]
    points: tuple[CurvePoint, ...]
    out_of_memory: int | None
    algo: str = ""

    @property
    def ttft(self) -> Growth | None:
        """The growth of the medians of TTFT."""
        return Growth.fit([point.tokens for point in self.points], [point.ttft.median for point in self.points])

    @property
    def long_ttft(self) -> Growth | None:
        """The same over the longer half of the lengths."""
        half = self.points[longer_half(len(self.points))]
        return Growth.fit([point.tokens for point in half], [point.ttft.median for point in half])

    @property
    def recompute(self) -> Growth | None:
        """The growth of computing rows alone."""
        known = [(point.tokens, point.recompute_s) for point in self.points if point.recompute_s is not None]
        return Growth.fit([tokens for tokens, _ in known], [seconds for _, seconds in known])

    def report(self) -> dict[str, Any]:
        growth = {name: getattr(self, name) for name in ("ttft", "long_ttft", "recompute")}
        return {**asdict(self), "growth": {name: fit and asdict(fit) for name, fit in growth.items()}}


@dataclass(frozen=True)
class ContextResult:
    """`curves`: `full` first, then the policies in their order, `transformers` last."""

    lengths: tuple[int, ...]
    curves: tuple[Curve, ...]

    def report(self) -> dict[str, Any]:
        return {**asdict(self), "curves": [curve.report() for curve in self.curves]}


def bench_context(
    model: Model,
    policies: Sequence[LabelledPolicy],
    options: ContextOptions,
    directory: Path,
    on_run: OnRun | None = None,
) -> ContextResult:
    """Measure prompts of growing length; their objects go to `directory`, which the caller removes.

    Args:
        on_run: called after each of at most lengths · (policies and baselines) · (repeats + 1) runs.

    Raises:
        PicError: a prompt that is too long for the model, a policy that does not fit it, no room for the objects.
    """
    require_positions(model, options.lengths[-1], "--to with less")
    policies = with_full(policies)
    samples_at: dict[int, dict[str, list[Measurement]]] = {}
    ended: dict[str, int] = {}
    measured_baselines = baselines_of(model)
    for tokens, prompt in make_prompts(model, policies, options, Store(directory / "objects")):
        baselines = measured_baselines(prompt.ids(model), 1)
        runs = _runs(model, policies, options.is_cold, prompt, baselines)
        runs = {label: run for label, run in runs.items() if label not in ended}
        measured = interleave(runs, options.repeats, on_run)
        ended |= {label: tokens for label, samples in measured.items() if None in samples}
        samples_at[tokens] = {
            label: [sample for sample in samples if sample] for label, samples in measured.items() if label not in ended
        }
    methods = {labelled.label: (labelled.policy.params, labelled.policy.name) for labelled in policies}
    if model.is_of_transformers:
        methods[TRANSFORMERS] = ({}, TRANSFORMERS)
    curves = [
        Curve(label, params, _points(label, samples_at), ended.get(label), algo)
        for label, (params, algo) in methods.items()
    ]
    return ContextResult(options.lengths, tuple(curves))


def make_prompts(
    model: Model, policies: Sequence[LabelledPolicy], options: ContextOptions, store: Store
) -> list[tuple[int, BenchPrompt]]:
    """The prompt of each length; a longer one begins like a shorter one. All chunks are compiled."""
    context = [length - options.tail_tokens for length in options.lengths]
    longest = random_chunks(model, context[-1] // options.chunk_tokens, options.chunk_tokens, options.seed)
    tail = random_tail(model, options.tail_tokens, options.seed)
    prompts = []
    for tokens, length in zip(context, options.lengths, strict=True):
        count, rest = divmod(tokens, options.chunk_tokens)
        last: list[Chunk] = random_chunks(model, 1, rest, options.seed + 1) if rest else []
        prompts.append((length, BenchPrompt(store, (*longest[:count], *last), tail)))
    chunks = dict.fromkeys(chunk for _, prompt in prompts for chunk in prompt.chunks)
    compile_for(model, store, list(chunks), policies)
    return prompts


def _runs(
    model: Model, policies: Sequence[LabelledPolicy], is_cold: bool, prompt: BenchPrompt,
    baselines: Mapping[str, Callable[[], Measurement]],
) -> dict[str, MeasuredRun]:  # fmt: skip
    runs: dict[str, MeasuredRun] = {
        labelled.label: _unless_out_of_memory(partial(run_linked, model, prompt, labelled.policy, 0, is_cold))
        for labelled in policies
    }
    return runs | {label: _unless_out_of_memory(run) for label, run in baselines.items()}


def _unless_out_of_memory(run: Callable[[], Measurement]) -> MeasuredRun:
    """The run, or None where the device's memory is not enough; then what it took is freed."""

    def guarded() -> Measurement | None:
        try:
            return run()
        except torch.OutOfMemoryError:
            pass
        free_memory()  # after the error, which holds tensors, is gone
        return None

    return guarded


def _points(label: str, samples_at: dict[int, dict[str, list[Measurement]]]) -> tuple[CurvePoint, ...]:
    """The points of one method, from the samples by length and label."""
    return tuple(
        _point(tokens, samples[label], samples.get(BASELINE))
        for tokens, samples in samples_at.items()
        if label in samples
    )


def _point(tokens: int, samples: list[Measurement], full: list[Measurement] | None) -> CurvePoint:
    first, ttft = samples[0], [sample.ttft_s for sample in samples]
    return CurvePoint(
        tokens=tokens, ttft=MedianRange.of(ttft),
        recompute_s=median_or_none([sample.recompute_s for sample in samples]),
        rows=first.rows, bytes_read=first.bytes_read,
        peak_bytes=median_or_none([sample.peak_bytes for sample in samples]),
        speedup=median_ratio([sample.ttft_s for sample in full], ttft) if full else None,
        samples=tuple(samples),
    )  # fmt: skip


def plot_context(result: ContextResult, title: str, name: str | Path) -> None:
    """TTFT by length, both logarithmic, with the exponents (EPIC fig. 9)."""
    with picture(name, 8.4, 4.2) as figure:
        axes = figure.subplots()
        by_label = line_colours({curve.label: curve.algo for curve in result.curves})
        for curve in result.curves:
            _draw_curve(axes, curve, by_label[curve.label])
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(result.lengths, [_short(tokens) for tokens in result.lengths])
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter(lambda seconds, _: _time(seconds))
        axes.yaxis.set_minor_formatter(lambda *_: "")
        axes.set(xlabel="tokens of the prompt", ylabel="TTFT")
        axes.set_title(picture_text(title), loc="left")
        title = "exponent over all lengths;\nover the longer half of them"
        figure.legend(loc="outside right upper", title=title, alignment="left", labelspacing=0.8)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Medians, with the least and the most of the repeats; a cross where memory was not enough."""
    tokens = [point.tokens for point in curve.points]
    ttft = [point.ttft for point in curve.points]
    label = f"{picture_text(curve.label)}\n{curve.ttft or '-'}; {curve.long_ttft or '-'}"
    is_baseline = curve.label == TRANSFORMERS
    axes.plot(
        tokens, [spread.median for spread in ttft], label=label, color=colour, marker="o", markersize=4,
        linestyle="--" if is_baseline else "-", zorder=3 if is_baseline else 2,
    )  # fmt: skip
    low, high = [spread.low for spread in ttft], [spread.high for spread in ttft]
    axes.fill_between(tokens, low, high, color=colour, alpha=0.15, lw=0)
    if curve.out_of_memory and ttft:
        axes.plot(tokens[-1], ttft[-1].median, marker="x", markersize=10, color=colour)
        axes.annotate("out of memory after this", (tokens[-1], ttft[-1].median), fontsize=7, color=colour)


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--stop", type=int, default=ContextOptions.stop, help="tokens of the longest prompt")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bench_context.json"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, lengths = random_model(options.shape), ContextOptions(stop=options.stop)
    with tempfile.TemporaryDirectory() as inside:
        result = bench_context(model, parse_grid(ALGOS), lengths, Path(inside))
    for curve in result.curves:
        print(f"{curve.label:<16} exponent {curve.ttft or '-'}, of the longer half {curve.long_ttft or '-'}")
    write_results(options.out, {"options": asdict(lengths), "results": result.report()})
    if options.plot:
        plot_context(result, f"{model.name}, chunks of {lengths.chunk_tokens} tokens", options.plot)


if __name__ == "__main__":
    main()
