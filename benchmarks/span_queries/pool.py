"""What a pool of KV on the device saves of a link, by how requests follow one another (Span queries §5.5).

Each request is linked three times, side by side: from files, from host memory that has every layer, and from a pool
whose misses come from that memory too. Requests of a stream read so many documents:

- ``same``: the same ones in the same order, another question (the candidates of a judge);
- ``shuffled``: the same ones in another order;
- ``drawn``: some of all, the popular ones more often (retrieval).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.span_queries.options import PoolOptions
from pictool.bench.prompts import compile_for, random_chunks, random_tail, require_positions
from pictool.bench.repeats import MedianRange, OnRun, median_ratio, rotated
from pictool.core import Chunk
from pictool.engines.base import LinkResult
from pictool.engines.torch import TorchEngine
from pictool.linker.grid import LabelledPolicy
from pictool.linker.policies.base import Policy
from pictool.linker.residency import PoolUse
from pictool.linker.spec import Spec
from pictool.runtime.memory.image import GROWTH
from pictool.runtime.memory.pool import slot_bytes
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

STREAMS = ("same", "shuffled", "drawn")
FILES, MEMORY, POOL = "files", "memory", "pool"
TAIL = 32


@dataclass(frozen=True)
class PoolPoint:
    """One stream under one policy. Fields are the keys of the JSON.

    Fields:
        ttft: seconds, by where objects come from. speedup: TTFT from host memory ÷ from the pool, request by request.
        copied: bytes of KV a request that were copied to the image from the host, by where objects come from.
        resident, stayed: shares of the reused tokens that the pool had; that were in their places.
        tokens_per_ms: of requests that moved any, median; None if none did. duplicates: of all requests.
        scratch: the most slots that were copied aside, of a layer.
    """

    label: str
    stream: str
    tokens: int
    ttft: dict[str, MedianRange]
    speedup: float
    copied: dict[str, float]
    resident: float
    stayed: float
    tokens_per_ms: MedianRange | None
    duplicates: int
    scratch: int

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_pool(
    model: Model, policies: Sequence[LabelledPolicy], options: PoolOptions, directory: Path, on_run: OnRun
) -> list[PoolPoint]:
    """Measure streams of requests; objects go to `directory`, which the caller removes."""
    require_positions(model, options.read * options.tokens + TAIL, "fewer --read or --tokens")
    chunks = random_chunks(model, options.documents, options.tokens, options.seed)
    compile_for(model, Store(directory), chunks, policies)
    points = []
    for labelled in policies:
        for stream in STREAMS:
            requests = requests_of(stream, chunks, options)
            points.append(_measure(model, labelled, stream, requests, options, directory, on_run))
    return points


def num_runs(options: PoolOptions, policies: Sequence[LabelledPolicy]) -> int:
    """How often `on_run` is called."""
    return len(policies) * len(STREAMS) * (options.requests + 1)


def pool_bytes(model: Model, options: PoolOptions, images: int = 1) -> int:
    """Room for so many images, and for the share of all documents beside them."""
    image = options.read * options.tokens + TAIL + GROWTH
    return (images * image + round(options.share * options.documents * options.tokens)) * slot_bytes(model)


def requests_of(stream: str, chunks: Sequence[Chunk], options: PoolOptions) -> list[list[Chunk]]:
    """The documents of each request, one more than are measured."""
    rng = random.Random(f"{options.seed}-{stream}")
    first = list(chunks[: options.read])
    if stream == "same":
        return [first] * (options.requests + 1)
    if stream == "shuffled":
        return [rng.sample(first, len(first)) for _ in range(options.requests + 1)]
    popularity = [1 / (rank + 1) for rank in range(len(chunks))]
    return [_drawn(rng, chunks, popularity, options.read) for _ in range(options.requests + 1)]


def _drawn(rng: random.Random, chunks: Sequence[Chunk], weights: Sequence[float], count: int) -> list[Chunk]:
    """Different documents, by Zipf's law (Efraimidis and Spirakis 2006)."""
    keys = [rng.random() ** (1 / weight) for weight in weights]
    ranked = sorted(range(len(chunks)), key=lambda index: -keys[index])
    return [chunks[index] for index in ranked[:count]]


def _measure(
    model: Model, labelled: LabelledPolicy, stream: str, requests: Sequence[Sequence[Chunk]], options: PoolOptions,
    directory: Path, on_run: OnRun,
) -> PoolPoint:  # fmt: skip
    """Answer a stream's requests from each place in turn; the first request warms up."""
    memory, beside = (warmed(model, labelled.policy, requests, options, directory) for _ in range(2))
    engines = {
        FILES: TorchEngine(model, Store(directory)),
        MEMORY: TorchEngine(model, memory),
        POOL: TorchEngine(model, beside, pool_bytes(model, options)),
    }
    ttft: dict[str, list[float]] = {place: [] for place in engines}
    uses: list[PoolUse] = []
    for number, chunks in enumerate(requests):
        spec = Spec.raw(chunks, random_tail(model, TAIL, options.seed + number), labelled.policy)
        for place in rotated(list(engines), number):
            result = engines[place].link(spec)
            if number:
                ttft[place].append(result.timing.ttft_s)
                uses += use_of(result)
            del result  # its image goes back to the pool
        on_run()
    return _point(labelled.label, stream, options, ttft, uses, model.token_bytes)


def warmed(
    model: Model, policy: Policy, requests: Sequence[Sequence[Chunk]], options: PoolOptions, directory: Path
) -> Store:
    """A store whose host memory has every layer before anything is measured."""
    store = Store(directory, memory_bytes=len(requests) * options.documents * options.tokens * model.token_bytes)
    engine = TorchEngine(model, store)
    for chunk in {chunk for chunks in requests for chunk in chunks}:
        engine.link(Spec.raw([chunk], "x", policy))
    return store


def use_of(result: LinkResult) -> list[PoolUse]:
    """What a link got of the pool, if it has one."""
    return [result.linked.pool] if result.linked and result.linked.pool else []


def _point(
    label: str, stream: str, options: PoolOptions, ttft: dict[str, list[float]], uses: Sequence[PoolUse], size: int
) -> PoolPoint:
    assert all(use.has_room for use in uses), "the pool is too small for a request"
    reused = sum(use.resident + use.loaded for use in uses)
    rates = [use.moved.tokens_per_ms for use in uses if use.moved.tokens]
    every = reused / len(uses) * size
    return PoolPoint(
        label, stream, options.read * options.tokens + TAIL,
        {place: MedianRange.of(values) for place, values in ttft.items()}, median_ratio(ttft[MEMORY], ttft[POOL]),
        {FILES: every, MEMORY: every, POOL: sum(use.loaded for use in uses) / len(uses) * size},
        sum(use.resident for use in uses) / reused, sum(use.stayed for use in uses) / reused,
        MedianRange.of(rates) if rates else None, sum(use.moved.duplicates for use in uses),
        max(use.moved.buffer for use in uses),
    )  # fmt: skip
