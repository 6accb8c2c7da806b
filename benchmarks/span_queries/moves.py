"""How many tokens a millisecond CIDRA moves (Span queries §5.5.1, fig. 13a), beside what else could be done."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.span_queries.options import MovesOptions
from pictool.bench.repeats import MedianRange, OnRun, interleave
from pictool.core import Layout
from pictool.runtime.device import synchronize
from pictool.runtime.memory.cidra import Move
from pictool.runtime.memory.image import Image
from pictool.runtime.memory.pool import Pool, Repositioning

if TYPE_CHECKING:
    from pictool.runtime.model import Model

KINDS = ("permutation", "overlap", "duplicates")
LINK = "link"  # the same tokens from host memory into an image, as every link does it


@dataclass(frozen=True)
class MovesPoint:
    """Tokens that were moved at once. `tokens_per_ms` is over the repeats; the others are of the last plan.

    `kind`: all blocks change places (permutation); a range is moved by half its length over itself (overlap); every
    block goes to two places (duplicates). ``link`` is what moving is to be compared with: the linker copies un-rotated
    KV from memory into an image, and rotates it there; it has no batches.
    """

    kind: str
    tokens: int
    batch: int
    tokens_per_ms: MedianRange
    moves: int
    batches: int
    duplicates: int
    scratch: int  # blocks

    def report(self) -> dict[str, Any]:
        return asdict(self)


def bench_moves(model: Model, options: MovesOptions, on_run: OnRun) -> list[MovesPoint]:
    """Measure moves of blocks whose keys are rotated on the way; planning is not among the time."""
    points = []
    for tokens in options.tokens:
        count = tokens // options.block
        pool = Pool(model, 2 * count * options.block, scratch=options.block)
        pool.clear()
        runs = {
            (kind, batch): partial(_run, pool, moves_of(kind, count, options), batch * options.block)
            for kind in KINDS
            for batch in options.batches
        }
        named: dict[str, Callable[[], Repositioning]] = {f"{kind} {batch}": run for (kind, batch), run in runs.items()}
        done = interleave(named | {LINK: partial(_place, model, tokens)}, options.repeats, on_run)
        points += [_point(kind, batch, done[f"{kind} {batch}"], options.block) for kind, batch in runs]
        points.append(_point(LINK, 0, done[LINK]))
        del pool, runs, named
    return points


def num_runs(options: MovesOptions) -> int:
    """How often `on_run` is called."""
    return len(options.tokens) * (len(KINDS) * len(options.batches) + 1) * (options.repeats + 1)


def moves_of(kind: str, count: int, options: MovesOptions) -> list[Move]:
    """Moves of `count` blocks in a pool of twice as many, each to a position of its own."""
    rng, block = random.Random(options.seed), options.block
    if kind == "permutation":
        sources, targets = list(range(count)), rng.sample(range(count), count)
    elif kind == "overlap":
        sources, targets = list(range(count)), [source + count // 2 for source in range(count)]
    else:
        sources, targets = [source // 2 for source in range(count)], [count + source for source in range(count)]
    return [
        Move(source * block, target * block, rng.randrange(1, 4096), block)
        for source, target in zip(sources, targets, strict=True)
    ]


def _run(pool: Pool, moves: Sequence[Move], batch: int) -> Repositioning:
    return pool.reposition(moves, batch)


@torch.inference_mode()
def _place(model: Model, tokens: int) -> Repositioning:
    """What the linker does with the KV of one object of so many tokens."""
    geometry = model.geometry
    kv = torch.zeros(geometry.kv_heads, tokens, geometry.head_dim, dtype=model.torch_dtype, device=model.device)
    image = Image(model.stack, Layout.of((), [range(tokens)], (0,)))
    synchronize(model.device)
    started = time.perf_counter()
    for layer in range(geometry.layers):
        image.fill(layer, 0, kv, kv)
        image.relocate(layer, 0, tokens)
    synchronize(model.device)
    return Repositioning(1, tokens, seconds=time.perf_counter() - started)


def _point(kind: str, batch: int, done: Sequence[Repositioning], block: int = 1) -> MovesPoint:
    last = done[-1]
    rate = MedianRange.of([each.tokens_per_ms for each in done])
    return MovesPoint(kind, last.tokens, batch, rate, last.moves, last.batches, last.duplicates, last.scratch // block)
