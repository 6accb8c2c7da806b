"""What one plan for several prompts saves, beside a plan for each (Span queries §5.5.1).

Waves of requests are linked in three ways, side by side: from host memory that has every layer; from a pool, one after
the other, each with a plan of its own, where the next one gets the room of the last one; and from a pool of the same
size, all images of a wave at once, with one plan. The streams are those of `pool.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.span_queries.options import PoolOptions
from benchmarks.span_queries.pool import MEMORY, STREAMS, TAIL, pool_bytes, requests_of, use_of, warmed
from pictool.bench.prompts import random_chunks, random_tail
from pictool.bench.repeats import MedianRange, OnRun, median_ratio, rotated
from pictool.core import Chunk
from pictool.engines.torch import TorchEngine
from pictool.errors import PicError
from pictool.linker.grid import LabelledPolicy
from pictool.linker.residency import PoolUse
from pictool.linker.spec import Spec

if TYPE_CHECKING:
    from pictool.runtime.model import Model

EACH, WAVE = "each", "wave"


@dataclass(frozen=True)
class WavePoint:
    """One stream under one policy, in waves of `requests`. Fields are the keys of the JSON.

    Fields:
        seconds: of linking a whole wave. speedup: those of a plan for each ÷ one plan, wave by wave.
        copied: bytes of KV a wave that came from the host. moves, moved: runs and tokens that were moved, a wave.
        tokens_per_ms: of plans that move any, median; None if none does. duplicates: of all plans. scratch_bytes: the
            most of one plan. together: prompts of a plan, mean.
        All but `seconds` and `speedup` by how the pool is used: ``each``, ``wave``.
    """

    label: str
    stream: str
    requests: int
    tokens: int
    seconds: dict[str, MedianRange]
    speedup: float
    copied: dict[str, float]
    moves: dict[str, float]
    moved: dict[str, float]
    tokens_per_ms: dict[str, MedianRange | None]
    duplicates: dict[str, int]
    scratch_bytes: dict[str, int]
    together: dict[str, float]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_waves(
    model: Model, policies: Sequence[LabelledPolicy], options: PoolOptions, directory: Path, on_run: OnRun
) -> list[WavePoint]:
    """Measure waves; `directory` has the objects that `bench_pool` has compiled."""
    if not options.wave:
        return []
    chunks = random_chunks(model, options.documents, options.tokens, options.seed)
    own = replace(options, requests=options.wave * (options.num_waves + 1) - 1)
    return [
        _measure(model, labelled, stream, requests_of(stream, chunks, own), options, directory, on_run)
        for labelled in policies
        for stream in STREAMS
    ]


def num_runs(options: PoolOptions, policies: Sequence[LabelledPolicy]) -> int:
    """How often `on_run` is called."""
    return len(policies) * len(STREAMS) * (options.num_waves + 1) if options.wave else 0


def _measure(
    model: Model, labelled: LabelledPolicy, stream: str, requests: Sequence[Sequence[Chunk]], options: PoolOptions,
    directory: Path, on_run: OnRun,
) -> WavePoint:  # fmt: skip
    """Link a stream's waves in each way in turn; the first wave warms up."""
    stores = [warmed(model, labelled.policy, requests, options, directory) for _ in range(3)]
    size = pool_bytes(model, options, options.wave)
    engines = {
        MEMORY: TorchEngine(model, stores[0]),
        EACH: TorchEngine(model, stores[1], size),
        WAVE: TorchEngine(model, stores[2], size),
    }
    seconds: dict[str, list[float]] = {way: [] for way in engines}
    uses: dict[str, list[list[PoolUse]]] = {way: [] for way in engines}  # by wave
    for number in range(options.num_waves + 1):
        at = number * options.wave
        specs = [
            Spec.raw(chunks, random_tail(model, TAIL, options.seed + at + index), labelled.policy)
            for index, chunks in enumerate(requests[at : at + options.wave])
        ]
        for way in rotated(list(engines), number):
            took, got = _link(engines[way], specs, way == WAVE)
            if number:
                seconds[way].append(took)
                uses[way].append(got)
        on_run()
    return _point(labelled.label, stream, options, seconds, uses, model.token_bytes)


def _link(engine: TorchEngine, specs: Sequence[Spec], together: bool) -> tuple[float, list[PoolUse]]:
    """Link a wave; seconds, and what its links got of the pool. No image is held longer than until the next link."""
    uses: list[PoolUse] = []
    started = time.perf_counter()
    if not together:
        for spec in specs:
            uses += use_of(engine.link(spec))
        return time.perf_counter() - started, uses
    for _, result in engine.link_all(specs):
        if isinstance(result, PicError):
            raise result
        uses += use_of(result)
        del result
    return time.perf_counter() - started, uses


def _point(
    label: str, stream: str, options: PoolOptions, seconds: dict[str, list[float]],
    uses: dict[str, list[list[PoolUse]]], size: int,
) -> WavePoint:  # fmt: skip
    waves, pooled = options.num_waves, {way: sum(uses[way], []) for way in (EACH, WAVE)}
    assert all(use.has_room for own in pooled.values() for use in own), "the pool is too small for a wave"
    plans = {way: list({id(use.moved): use.moved for use in own}.values()) for way, own in pooled.items()}
    rates = {way: [plan.tokens_per_ms for plan in own if plan.tokens] for way, own in plans.items()}
    every = options.wave * options.read * options.tokens * size
    return WavePoint(
        label, stream, options.wave, options.read * options.tokens + TAIL,
        {way: MedianRange.of(values) for way, values in seconds.items()}, median_ratio(seconds[EACH], seconds[WAVE]),
        {MEMORY: every} | {way: sum(use.loaded for use in own) / waves * size for way, own in pooled.items()},
        {way: sum(plan.moves for plan in own) / waves for way, own in plans.items()},
        {way: sum(plan.tokens for plan in own) / waves for way, own in plans.items()},
        {way: MedianRange.of(own) if own else None for way, own in rates.items()},
        {way: sum(plan.duplicates for plan in own) for way, own in plans.items()},
        {way: max(plan.scratch_bytes for plan in own) for way, own in plans.items()},
        {way: len(own) / len(plans[way]) for way, own in pooled.items()},
    )  # fmt: skip
