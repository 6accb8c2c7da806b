"""TTFT by the number of documents (Span queries §5.6, fig. 13b): stock, a miss and a hit, interleaved."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.questions.world import World
from benchmarks.span_queries.options import DocumentsOptions
from benchmarks.span_queries.quality import Quality, measure_quality
from pictool.bench.prompts import random_chunks, random_tail, require_disk, require_positions
from pictool.bench.repeats import MedianRange, OnRun, interleave, median_ratio
from pictool.core import Chunk
from pictool.engines.torch import TorchEngine
from pictool.eval.datasets.base import Case
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import BASELINE
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.spans.dsl import fragment, g, plus
from pictool.spans.query import Query
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

STOCK = "stock"  # a prefix cache finds nothing of new documents: full recompute
_TAIL = 32


@dataclass(frozen=True)
class Measured:
    """One way to answer. `speedup`: TTFT of stock ÷ its own, median of the repeats' ratios."""

    label: str
    ttft: MedianRange
    speedup: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class DocumentsPoint:
    """One number of documents. `quality` is of the embedded model over as many pages."""

    documents: int
    prompt_tokens: int
    measured: tuple[Measured, ...]
    quality: tuple[Quality, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_documents(
    model: Model, policies: Sequence[LabelledPolicy], options: DocumentsOptions, directory: Path, on_run: OnRun
) -> list[DocumentsPoint]:
    """Measure queries over 1 and more documents; objects go to `directory`, which the caller removes.

    A hit finds all objects in the page cache; a miss compiles the documents, each on its own, stores and links them.
    """
    longest = max(options.counts) * options.tokens + _TAIL
    require_positions(model, longest, "fewer --documents or --tokens")
    require_disk(directory, 2 * longest * model.token_bytes)
    chunks = random_chunks(model, max(options.counts), options.tokens, options.seed)
    engine = TorchEngine(model, Store(directory / "objects"))
    engine.compile(chunks)
    tail = random_tail(model, _TAIL, options.seed)
    embedded = TorchEngine(load_model("embedded"), Store(directory / "world"))
    points = []
    for count in options.counts:
        samples = interleave(_runs(engine, policies, chunks[:count], tail, directory), options.repeats, on_run)
        quality = world_quality(embedded, policies, count, options, on_run)
        points.append(DocumentsPoint(count, count * options.tokens + _TAIL, measured(samples), tuple(quality)))
    return points


def num_runs(options: DocumentsOptions, policies: Sequence[LabelledPolicy]) -> int:
    """How often `on_run` is called."""
    timed = (1 + 2 * len(policies)) * (options.repeats + 1)
    return len(options.counts) * (timed + options.questions * (1 + len(policies)))


def measured(samples: dict[str, list[float]]) -> tuple[Measured, ...]:
    """The medians; `samples` of stock come first."""
    stock = samples[STOCK]
    return tuple(
        Measured(label, MedianRange.of(own), median_ratio(stock, own), tuple(own)) for label, own in samples.items()
    )


def _runs(
    engine: TorchEngine, policies: Sequence[LabelledPolicy], chunks: Sequence[Chunk], tail: str, directory: Path
) -> dict[str, Callable[[], float]]:
    (full,) = parse_grid([BASELINE])
    runs: dict[str, Callable[[], float]] = {STOCK: partial(_hit, engine, Spec.raw(chunks, tail, full.policy))}
    for labelled in policies:
        spec = Spec.raw(chunks, tail, labelled.policy)
        runs[f"{labelled.label}, miss"] = partial(_miss, engine.model, spec, chunks, directory / "miss")
        runs[f"{labelled.label}, hit"] = partial(_hit, engine, spec)
    return runs


def _hit(engine: TorchEngine, spec: Spec) -> float:
    return engine.link(spec).timing.ttft_s


def _miss(model: Model, spec: Spec, chunks: Sequence[Chunk], directory: Path) -> float:
    shutil.rmtree(directory, ignore_errors=True)
    engine = TorchEngine(model, Store(directory))
    started = time.perf_counter()
    engine.compile(chunks, spec.objects)
    compile_s = time.perf_counter() - started
    return compile_s + engine.link(spec).timing.ttft_s


def world_quality(
    engine: TorchEngine, policies: Sequence[LabelledPolicy], count: int, options: DocumentsOptions, on_run: OnRun
) -> list[Quality]:
    """Answers of the embedded model over `count` pages; questions of all kinds, in a drawn order of the pages."""
    cases = world_cases(count, options.questions, options.seed)
    return measure_quality(engine, [*parse_grid([BASELINE]), *policies], cases, world_query, on_run)


def world_cases(count: int, questions: int, seed: int) -> list[Case]:
    """As many cases of `count` pages, a few of each prompt."""
    cases = World(seed=seed, prompts=questions, chunks=count, per_kind=1).cases()
    return list(itertools.islice(cases, questions))


def world_query(case: Case) -> Query:
    """A question over the pages, which commute."""
    return g(plus(*map(fragment, case.documents)), case.query, temperature=0, max_tokens=case.max_new_tokens)
