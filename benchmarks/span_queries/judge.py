"""TTFT of a judge over the outputs of inner calls (Span queries §5.7, figs. 14 and 15), by temperature and fan-out.

Inner calls are run once: each temperature has a pool of outputs that the model generated at it, whose KV is kept, and a
query's candidates are drawn from that. Stock is a prefix cache that has seen all that came before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.span_queries.documents import STOCK, world_cases
from benchmarks.span_queries.options import JudgeOptions
from benchmarks.span_queries.quality import Quality, measure_quality
from pictool.bench.prompts import random_text, require_positions
from pictool.bench.repeats import OnRun
from pictool.core import Chunk
from pictool.engines.torch import TorchEngine
from pictool.eval.datasets.base import Case
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.spans.dsl import cross, fragment, g, par, plus, repeat, system, user
from pictool.spans.execute import Executor
from pictool.spans.operators.joins import Join
from pictool.spans.prompt import make_prompt
from pictool.spans.query import Query
from pictool.spans.running import RunOptions
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

PAGES = 6  # of quality
CANDIDATES = 5


@dataclass(frozen=True)
class Percentiles:
    """Of TTFT in seconds, or of ratios."""

    p1: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        return cls(*(float(value) for value in np.percentile(values, [1, 50, 99])))


@dataclass(frozen=True)
class JudgePoint:
    """One temperature and fan-out. Fields are the keys of the JSON.

    Fields:
        distinct: outputs in the pool that differ. prompt_tokens: median of the outer prompts'.
        ttft, speedup: by label; speedups are stock's TTFT ÷ its own, sample by sample.
    """

    temperature: float
    fan_out: int
    distinct: int
    prompt_tokens: float
    ttft: dict[str, Percentiles]
    speedup: dict[str, Percentiles]
    samples: dict[str, list[float]]


@dataclass(frozen=True)
class JudgeResult:
    """`quality`: of the embedded model's judges over pages and candidates."""

    points: tuple[JudgePoint, ...]
    quality: tuple[Quality, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_judge(
    model: Model, policies: Sequence[LabelledPolicy], options: JudgeOptions, directory: Path, on_run: OnRun
) -> JudgeResult:
    """Measure outer calls; objects and chains go to `directory`, which the caller removes."""
    require_positions(model, max(options.fan_outs) * (options.tokens + 2) + 64, "fewer --fan-out or --tokens")
    engine = TorchEngine(model, Store(directory / "objects"))
    points = []
    pools: dict[float, list[Query]] = {}
    for temperature, fan_out in options.grid:
        if temperature not in pools:
            pools[temperature] = _outputs(engine, temperature, options, on_run)
        samples, tokens = _sample(
            engine, policies, pools[temperature], fan_out, options, directory / f"{temperature}-{fan_out}", on_run
        )
        points.append(_point(temperature, fan_out, pools[temperature], samples, tokens))
    return JudgeResult(tuple(points), tuple(_quality(policies, options, directory / "world", on_run)))


def num_runs(options: JudgeOptions, policies: Sequence[LabelledPolicy]) -> int:
    """How often `on_run` is called."""
    inner = len(options.temperatures) * options.pool
    return inner + len(options.grid) * (options.samples + 1) + options.questions * (1 + len(policies))


def _outputs(engine: TorchEngine, temperature: float, options: JudgeOptions, on_run: OnRun) -> list[Query]:
    """What the inner calls generate at a temperature, with their objects."""
    task = user(random_text(engine.model, 24, [options.seed, 1]))
    call = g(system("You write. "), task, temperature=temperature, max_tokens=options.tokens)
    run = RunOptions(make_policy("naive"), seed=options.seed)
    result = Executor(lambda name: engine, run).run(par(repeat(options.pool, call)))
    for _ in range(options.pool):
        on_run()
    (outputs,) = result.query.children
    assert isinstance(outputs, Join)
    return list(outputs.parts)


def _sample(
    engine: TorchEngine, policies: Sequence[LabelledPolicy], pool: Sequence[Query], fan_out: int, options: JudgeOptions,
    directory: Path, on_run: OnRun,
) -> tuple[dict[str, list[float]], float]:  # fmt: skip
    """TTFT of outer calls over drawn candidates, side by side; the first draw warms up. And the prompts' median."""
    rng = random.Random(f"{options.seed}-{fan_out}")
    stock = TorchEngine(engine.model, Store(directory))
    prefix = make_policy("prefix")
    samples: dict[str, list[float]] = {STOCK: [], **{labelled.label: [] for labelled in policies}}
    lengths: list[int] = []
    for number in range(options.samples + 1):
        over = cross(system("You judge. "), plus(*rng.choices(pool, k=fan_out)), user("Which one?"))
        prompt = make_prompt(engine.model, over)
        plain = [Chunk(chunk.text, chunk.tokens, chunk.source) for chunk in prompt.documents]
        ttft = {STOCK: stock.link(Spec.raw(plain, prompt.tail, prefix, prompt.head)).timing.ttft_s}
        for labelled in policies:
            spec = Spec.raw(prompt.documents, prompt.tail, labelled.policy, prompt.head)
            result = engine.link(spec)
            ttft[labelled.label] = result.timing.ttft_s
        if number:
            lengths.append(result.layout.num_tokens)
            for label, seconds in ttft.items():
                samples[label].append(seconds)
        on_run()
    return samples, float(np.median(lengths))


def _point(
    temperature: float, fan_out: int, pool: Sequence[Query], samples: dict[str, list[float]], tokens: float
) -> JudgePoint:
    ratios = {
        label: [stock / own for stock, own in zip(samples[STOCK], values, strict=True)]
        for label, values in samples.items()
    }
    return JudgePoint(
        temperature, fan_out, len({getattr(output, "tokens", output) for output in pool}), tokens,
        {label: Percentiles.of(values) for label, values in samples.items()},
        {label: Percentiles.of(values) for label, values in ratios.items()}, samples,
    )  # fmt: skip


def _quality(
    policies: Sequence[LabelledPolicy], options: JudgeOptions, directory: Path, on_run: OnRun
) -> list[Quality]:
    """Judges of the embedded model: they read pages, candidates and the question."""
    engine = TorchEngine(load_model("embedded"), Store(directory))
    run = RunOptions(seed=options.seed)
    cases = world_cases(PAGES, options.questions, options.seed)
    return measure_quality(engine, [*parse_grid([BASELINE]), *policies], cases, judge_query, on_run, run)


def judge_query(case: Case) -> Query:
    """A question over pages and over drawn answers to it."""
    pages = [fragment(page) for page in case.documents]
    drawn = g(plus(*pages), case.query, temperature=0.5, max_tokens=case.max_new_tokens)
    return g(plus(*pages, repeat(CANDIDATES, drawn)), case.query, temperature=0, max_tokens=case.max_new_tokens)
