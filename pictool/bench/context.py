"""TTFT as prompts grow at a fixed size of chunks (EPIC §5.6, fig. 9), and the exponents with which it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pictool.bench.floor import Rates, measure_rates
from pictool.bench.growth import Growth, upper_half
from pictool.bench.options import ContextOptions
from pictool.bench.plain import plain_module, run_plain
from pictool.bench.rounds import OnRun, Spread, median_of, median_ratio, rounds
from pictool.bench.sample import PLAIN, Prompt, Sample, compile_for, run_linked
from pictool.bench.sync import with_full
from pictool.bench.workload import random_chunks, random_tail, require_positions
from pictool.core import Chunk
from pictool.linker.grid import Labelled
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Run = Callable[[], Sample | None]


@dataclass(frozen=True)
class Point:
    """One method at one length. `speedup` as of `sync`, None if `full` had no memory left."""

    tokens: int
    ttft: Spread
    recompute_s: float | None
    rows: float
    bytes_read: int
    peak_bytes: float | None
    speedup: float | None
    floor_s: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Curve:
    """One method over the lengths; at `out_of_memory` tokens, if not None, the device's memory was not enough."""

    label: str
    params: dict[str, Any]
    points: tuple[Point, ...]
    out_of_memory: int | None

    @property
    def ttft(self) -> Growth | None:
        """The exponent of the medians of TTFT."""
        return Growth.fit([one.tokens for one in self.points], [one.ttft.median for one in self.points])

    @property
    def long_ttft(self) -> Growth | None:
        """The same over the longer half of the lengths."""
        half = self.points[upper_half(len(self.points))]
        return Growth.fit([one.tokens for one in half], [one.ttft.median for one in half])

    @property
    def recompute(self) -> Growth | None:
        """The exponent of computing rows alone."""
        known = [(one.tokens, one.recompute_s) for one in self.points if one.recompute_s is not None]
        return Growth.fit([tokens for tokens, _ in known], [seconds for _, seconds in known])

    def report(self) -> dict[str, Any]:
        growth = {name: getattr(self, name) for name in ("ttft", "long_ttft", "recompute")}
        return {**asdict(self), "growth": {name: one and asdict(one) for name, one in growth.items()}}


@dataclass(frozen=True)
class ContextResult:
    """`curves`: `full` first, then the policies in their order, `transformers` last."""

    lengths: tuple[int, ...]
    rates: Rates
    curves: tuple[Curve, ...]

    def report(self) -> dict[str, Any]:
        return {**asdict(self), "curves": [one.report() for one in self.curves]}


def bench_context(
    model: Model,
    policies: Sequence[Labelled],
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
    policies, plain = with_full(policies), plain_module(model)
    rates = measure_rates(model.device, model.dtype)
    runs_at = partial(_runs, model, plain, policies, options.is_cold)
    found: dict[int, dict[str, list[Sample]]] = {}
    ended: dict[str, int] = {}
    for tokens, prompt in make_prompts(model, policies, options, Store(directory / "objects")):
        runs = {label: run for label, run in runs_at(prompt).items() if label not in ended}
        measured = rounds(runs, options.repeats, on_run)
        ended |= {label: tokens for label, samples in measured.items() if None in samples}
        found[tokens] = {label: [one for one in measured[label] if one] for label in runs if label not in ended}
    rates = rates.or_better(measure_rates(model.device, model.dtype))
    params = {one.label: one.policy.params for one in policies} | {PLAIN: {}}
    curves = [Curve(label, params[label], _points(label, found, rates), ended.get(label)) for label in params]
    return ContextResult(options.lengths, rates, tuple(curves))


def make_prompts(
    model: Model, policies: Sequence[Labelled], options: ContextOptions, store: Store
) -> list[tuple[int, Prompt]]:
    """The prompt of each length; a longer one begins like a shorter one, all chunks are compiled."""
    context = [length - options.tail_tokens for length in options.lengths]
    whole = random_chunks(model, context[-1] // options.chunk_tokens, options.chunk_tokens, options.seed)
    tail = random_tail(model, options.tail_tokens, options.seed)
    prompts = []
    for tokens, length in zip(context, options.lengths, strict=True):
        count, left = divmod(tokens, options.chunk_tokens)
        last: list[Chunk] = random_chunks(model, 1, left, options.seed + 1) if left else []
        prompts.append((length, Prompt(store, (*whole[:count], *last), tail)))
    compile_for(model, store, list(dict.fromkeys(chunk for _, one in prompts for chunk in one.chunks)), policies)
    return prompts


def _runs(model: Model, plain: Any, policies: Sequence[Labelled], is_cold: bool, prompt: Prompt) -> dict[str, Run]:
    runs: dict[str, Run] = {
        one.label: _if_memory(partial(run_linked, model, prompt, one.policy, 0, is_cold)) for one in policies
    }
    return {**runs, PLAIN: _if_memory(partial(run_plain, model, plain, prompt.ids(model), 1))}


def _if_memory(run: Callable[[], Sample]) -> Run:
    """The run, or None where the device's memory is not enough; what it had taken is given back."""

    def guarded() -> Sample | None:
        try:
            return run()
        except torch.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()  # the error, and all that it held on to, is gone
        return None

    return guarded


def _points(label: str, found: dict[int, dict[str, list[Sample]]], rates: Rates) -> tuple[Point, ...]:
    """One method's points, from the samples by length and label."""
    at = {tokens: samples for tokens, samples in found.items() if label in samples}
    return tuple(_point(tokens, samples[label], samples.get("full"), rates) for tokens, samples in at.items())


def _point(tokens: int, mine: list[Sample], full: list[Sample] | None, rates: Rates) -> Point:
    ttft = [one.ttft_s for one in mine]
    return Point(
        tokens=tokens, ttft=Spread.of(ttft), recompute_s=median_of([one.recompute_s for one in mine]),
        rows=mine[0].rows, bytes_read=mine[0].bytes_read, peak_bytes=median_of([one.peak_bytes for one in mine]),
        speedup=median_ratio([one.ttft_s for one in full], ttft) if full else None,
        floor_s=rates.floor_s(mine[0].bytes_read, mine[0].flops), samples=tuple(mine),
    )  # fmt: skip
