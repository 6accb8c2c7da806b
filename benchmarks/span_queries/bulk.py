"""Bulks of queries in an order that lets shared texts meet in a small cache (Span queries §5.8, table 4)."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.span_queries.documents import STOCK
from benchmarks.span_queries.options import BulkOptions
from pictool.bench.prompts import require_disk
from pictool.bench.repeats import MedianRange, OnRun
from pictool.compiler.compile import Compiled
from pictool.core import Chunk
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError
from pictool.eval.datasets.base import Dataset
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.spans.bulk import Items, schedule
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_BLOCK = 64  # tokens of a block of the prefix cache
_ROOM = 2.0  # queries of the largest size that a cache holds at least
_OVERHEAD = 1.2  # of an object's file over its KV


@dataclass(frozen=True)
class BulkRow:
    """One policy with one size of bulks; size 0 is all. Fields are the keys of the JSON.

    Fields:
        speedup: mean TTFT of stock ÷ its own, by repeat. ttft: means, in seconds, by repeat.
        expected_hits, hits: share of the documents' tokens that were cached, by the schedule, and as it was.
    """

    label: str
    size: int
    speedup: MedianRange
    ttft: MedianRange
    expected_hits: float
    hits: float
    samples: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class BulkResult:
    """What was asked, and the rows, those of stock first. `capacity`: bytes of each cache."""

    dataset: str
    queries: int
    documents: int
    distinct: int
    tokens: int
    capacity: int
    rows: tuple[BulkRow, ...]

    def report(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Asked:
    """A query: its documents and its tail."""

    documents: tuple[Chunk, ...]
    tail: str

    @property
    def items(self) -> Items:
        return {document.tokens: len(document) for document in self.documents}


@dataclass
class _Runner:
    """One policy over one order. What it has reused is known from what it compiled."""

    label: str
    size: int
    policy: Policy
    order: Sequence[int]
    expected_hits: float

    def run(self, engine: TorchEngine, asked: _Asked) -> tuple[float, int]:
        """Seconds to the first token, compiling among them, and the documents' tokens that were cached."""
        compiled: list[Compiled] = []
        started = time.perf_counter()
        result = engine.link(Spec.raw(asked.documents, asked.tail, self.policy), on_compile=compiled.append)
        seconds = time.perf_counter() - started
        total = sum(asked.items.values())
        if not self.policy.needs.objects:  # storing the chain comes after the first token
            return result.timing.ttft_s, total - min(total, round(result.recomputed))
        return seconds, total - sum(len(done.chunk) for done in compiled)


def bench_bulk(
    model: Model,
    policies: Sequence[LabelledPolicy],
    dataset: Dataset,
    options: BulkOptions,
    directory: Path,
    on_run: OnRun,
) -> BulkResult:
    """Measure a dataset's queries, in a drawn order, under stock and the policies by size of bulk.

    Stock is a prefix cache of the same capacity, in the order as given. Caches begin empty in every repeat.
    """
    queries = read_queries(model, dataset, options)
    items = [asked.items for asked in queries]
    distinct = {key: size for each in items for key, size in each.items()}
    tokens = max(options.share * sum(distinct.values()), _ROOM * max(sum(each.values()) for each in items))
    capacity = int(tokens * model.token_bytes * _OVERHEAD)
    runners = [*_stock(items), *(_runner(labelled, size, items, int(tokens)) for labelled in policies
                                 for size in options.sizes)]  # fmt: skip
    require_disk(directory, capacity * len(runners))
    ttft: list[list[list[float]]] = [[] for _ in runners]
    hits = [0] * len(runners)
    for repeat in range(options.repeats):
        root = directory / str(repeat)
        engines = [TorchEngine(model, Store(root / str(at), max_bytes=capacity)) for at in range(len(runners))]
        for of_runner in ttft:
            of_runner.append([])
        for step in range(len(queries)):
            for at, (runner, engine) in enumerate(zip(runners, engines, strict=True)):
                seconds, cached = runner.run(engine, queries[runner.order[step]])
                ttft[at][repeat].append(seconds)
                hits[at] += cached
                on_run()
        shutil.rmtree(root)
    total = sum(sum(each.values()) for each in items)
    rows = [_row(runner, ttft[0], own, hit / (total * options.repeats))
            for runner, own, hit in zip(runners, ttft, hits, strict=True)]  # fmt: skip
    return BulkResult(
        dataset.name, len(queries), sum(len(asked.documents) for asked in queries), len(distinct), total, capacity,
        tuple(rows),
    )  # fmt: skip


def num_runs(options: BulkOptions, policies: Sequence[LabelledPolicy], queries: int) -> int:
    """How often `on_run` is called."""
    return options.repeats * queries * (1 + len(policies) * len(options.sizes))


def read_queries(model: Model, dataset: Dataset, options: BulkOptions) -> list[_Asked]:
    """The queries of a dataset in a drawn order, each with its documents in a drawn order.

    Raises:
        InputError: a dataset that cannot be read, or whose queries are too long for the model.
    """
    rng = random.Random(options.seed)
    chunk_of: Callable[[str], Chunk] = _Chunks(model)
    queries = []
    for case in islice(dataset.cases(), options.limit):
        documents = tuple(chunk_of(text) for text in case.documents)
        tokens = sum(map(len, documents))
        if tokens + 512 > model.max_positions:
            raise InputError(f"case {case.id}: {tokens} tokens, too many for {model.name}; use another --shape")
        queries.append(_Asked(tuple(rng.sample(documents, len(documents))), case.query))
    rng.shuffle(queries)
    return queries


class _Chunks:
    """Chunks by their texts, so that equal texts are tokenized once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[str, Chunk] = {}

    def __call__(self, text: str) -> Chunk:
        if text not in self._known:
            self._known[text] = Chunk(text, self._model.encode(text), "document")
        return self._known[text]


def _stock(items: Sequence[Items]) -> list[_Runner]:
    return [_Runner(STOCK, 1, make_policy("prefix", {"block": _BLOCK}), range(len(items)), 0.0)]


def _runner(labelled: LabelledPolicy, size: int, items: Sequence[Items], tokens: int) -> _Runner:
    order = bulk_order(items, size, tokens)
    planned = schedule([items[index] for index in order], tokens)
    return _Runner(labelled.label, size, labelled.policy, order, planned.hits_as_given / (planned.total or 1))


def bulk_order(items: Sequence[Items], size: int, tokens: int) -> list[int]:
    """The order of queries that come in bulks of `size` (0: all); each bulk is clustered."""
    size = size or len(items)
    order: list[int] = []
    for start in range(0, len(items), size):
        planned = schedule(items[start : start + size], tokens)
        order += [start + index for index in planned.order]
    return order


def _row(runner: _Runner, stock: Sequence[Sequence[float]], own: Sequence[Sequence[float]], hits: float) -> BulkRow:
    means = [statistics.fmean(values) for values in own]
    ratios = [statistics.fmean(theirs) / mean for theirs, mean in zip(stock, means, strict=True)]
    return BulkRow(
        runner.label, runner.size, MedianRange.of(ratios), MedianRange.of(means), runner.expected_hits, hits,
        tuple(map(tuple, own)),
    )  # fmt: skip


def rows_by_size(rows: Sequence[BulkRow]) -> Mapping[str, list[BulkRow]]:
    """Rows by label, in their order."""
    by_label: dict[str, list[BulkRow]] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    return by_label
