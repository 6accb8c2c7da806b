"""TTFT by the length of the prompt at a fixed size of chunks (EPIC §5.6, fig. 9), and the exponents of its growth."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pictool.bench.options import TRANSFORMERS, ContextOptions
from pictool.bench.prompts import BenchPrompt, compile_for, random_chunks, random_tail, require_positions
from pictool.bench.repeats import MedianRange, OnRun, interleave, median_or_none, median_ratio
from pictool.bench.roofline import Rates, measure_rates
from pictool.bench.single_request import Measurement, baselines_of, run_linked
from pictool.bench.sync import with_full
from pictool.core import Chunk
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies import BASELINE
from pictool.linker.policies.base import PlotStyle
from pictool.runtime.device import free_memory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MeasuredRun = Callable[[], Measurement | None]  # None: the device has too little memory
TRANSFORMERS_STYLE = PlotStyle(line_colors=("#8c8c8c",))


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
    floor_s: float | None
    samples: tuple[Measurement, ...]

    @property
    def ttft_by_floor(self) -> float | None:
        return None if self.floor_s is None else self.ttft.median / self.floor_s


@dataclass(frozen=True)
class Curve:
    """One method over the lengths. `out_of_memory`: the tokens for which the device's memory was not enough."""

    label: str
    params: dict[str, Any]
    points: tuple[CurvePoint, ...]
    out_of_memory: int | None
    style: PlotStyle = PlotStyle()

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
        values = {name: value for name, value in asdict(self).items() if name != "style"}
        growth = {name: getattr(self, name) for name in ("ttft", "long_ttft", "recompute")}
        return {**values, "growth": {name: fit and asdict(fit) for name, fit in growth.items()}}


@dataclass(frozen=True)
class ContextResult:
    """`curves`: `full` first, then the policies in their order, `transformers` last."""

    lengths: tuple[int, ...]
    rates: Rates
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
    rates = measure_rates(model.device, model.dtype)
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
    rates = rates.or_better(measure_rates(model.device, model.dtype))
    methods = {labelled.label: (labelled.policy.params, labelled.policy.plot) for labelled in policies}
    if model.is_of_transformers:
        methods[TRANSFORMERS] = ({}, TRANSFORMERS_STYLE)
    curves = [
        Curve(label, params, _points(label, samples_at, rates), ended.get(label), style)
        for label, (params, style) in methods.items()
    ]
    return ContextResult(options.lengths, rates, tuple(curves))


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


def _points(label: str, samples_at: dict[int, dict[str, list[Measurement]]], rates: Rates) -> tuple[CurvePoint, ...]:
    """The points of one method, from the samples by length and label."""
    return tuple(
        _point(tokens, samples[label], samples.get(BASELINE), rates)
        for tokens, samples in samples_at.items()
        if label in samples
    )


def _point(tokens: int, samples: list[Measurement], full: list[Measurement] | None, rates: Rates) -> CurvePoint:
    first, ttft = samples[0], [sample.ttft_s for sample in samples]
    return CurvePoint(
        tokens=tokens, ttft=MedianRange.of(ttft),
        recompute_s=median_or_none([sample.recompute_s for sample in samples]),
        rows=first.rows, bytes_read=first.bytes_read,
        peak_bytes=median_or_none([sample.peak_bytes for sample in samples]),
        speedup=median_ratio([sample.ttft_s for sample in full], ttft) if full else None,
        floor_s=first.floor_s(rates), samples=tuple(samples),
    )  # fmt: skip
