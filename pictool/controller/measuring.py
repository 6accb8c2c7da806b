"""What the loading controller measures of a machine and a model (CacheBlend §5.1): computing, loading, decoding.

Measured are prefill by length, scattered rows, loading by place, and decoding by codec, each as a median of repeats.
`calibration` keeps the results.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pictool.compiler.compile import CODEC
from pictool.core import Chunk
from pictool.errors import StoreError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy, Prompt, Selection, no_rows
from pictool.linker.resolve import open_objects, resolve_prompt
from pictool.linker.spec import Document, Spec
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.scratch import scratch_directory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.link import Timing
    from pictool.runtime.model import Model

_PREFILL_TOKENS = (64, 256, 1024, 4096, 16384)
_LONG_S = 3.0  # what takes this long is run once, and no longer prompt is
_MOST_SCATTERED = 1024  # tokens of context, of which some rows are computed
_LOADS = ((2, 1024), (4, 256), (16, 16))  # objects × tokens of each: many bytes, both, many objects
_MAX_BYTES = 1 << 28  # of random objects at a time
_REPEATS = 3
_TAIL, _TAIL_ROOM = "Answer:", 32

Measurements = list[list[float]]


@dataclass(frozen=True)
class Measured:
    """Measurements [points, width], the medians of repeats. `scatter` is their range over their median, of most."""

    rows: Measurements
    scatter: float = 0.0


@dataclass(frozen=True)
class EveryNth(Policy):
    """Scattered rows, as a dynamic policy computes them: what they cost more than consecutive ones."""

    name: ClassVar[str] = "every-nth"
    reference: ClassVar[str] = "for measuring only"
    n: int = 8

    def select(self, prompt: Prompt) -> Selection:
        rows = no_rows(prompt.layout)
        rows[:: self.n] = True
        return Selection(rows)


def measure_compute(model: Model) -> Measured:
    """[context, tail, runs, seconds] of full recompute by length until one takes long; then of scattered rows.

    What a busy moment of the machine made longer than a longer prompt is cut to that.
    """
    model.require_no_states("forecasts of speed")
    tail = len(model.encode(_TAIL))
    seconds = _grow(model, tail)
    short = [context for context in seconds if seconds[context] <= _LONG_S]
    apart = max((context for context in short if context <= _MOST_SCATTERED), default=min(seconds))
    apart = min(apart, _MAX_BYTES // token_bytes(model))
    with tempfile.TemporaryDirectory(prefix="pic-measure-") as inside:
        store, policy = Store(inside), EveryNth()
        path = store.put(random_object(model, apart, 0))
        runs = [partial(_full_s, model, context) for context in short]
        (*medians, scattered), spread = _medians([*runs, partial(_recompute_s, model, store, [path], policy)])
    seconds |= dict(zip(short, medians, strict=True))
    prefills = [[context, tail, 1, min(list(seconds.values())[i:])] for i, context in enumerate(seconds)]
    return Measured([*prefills, [apart, tail, math.ceil(apart / policy.n), scattered]], spread)


def _grow(model: Model, tail: int) -> dict[int, float]:
    """A first run of every length of context, ascending, until one takes long."""
    lengths = sorted({min(tokens, model.max_positions) for tokens in _PREFILL_TOKENS})
    _full_s(model, lengths[0] - tail)  # the weights come into memory
    seconds: dict[int, float] = {}
    for tokens in lengths:
        seconds[tokens - tail] = _full_s(model, tokens - tail)
        if seconds[tokens - tail] > _LONG_S:
            break
    return seconds


def _full_s(model: Model, context: int) -> float:
    chunk = Chunk("", _random_tokens(model, context, 0), "random")
    return _recompute_s(model, Store(os.devnull), [chunk], make_policy("full", {}))


def _recompute_s(model: Model, store: Store, documents: Sequence[Document], policy: Policy) -> float:
    from pictool.linker.link import link

    return link(model, store, Spec.raw(documents, _TAIL, policy)).timing.recompute_s


def _medians(runs: Sequence[Callable[[], float]]) -> tuple[list[float], float]:
    """The median seconds of each run, and how far the repeats of most were apart.

    All runs make a round, and rounds are repeated: a busy moment of the machine meets one round only.
    """
    columns = list(zip(*([run() for run in runs] for _ in range(_REPEATS)), strict=True))
    medians = [statistics.median(column) for column in columns]
    spreads = [(max(column) - min(column)) / median for column, median in zip(columns, medians, strict=True) if median]
    return medians, statistics.median(spreads) if spreads else 0.0


def measure_loads(model: Model, directory: Path) -> Measured:
    """[bytes, objects, then seconds: cold loading, cold opening, warm loading, warm opening] of random objects.

    Cold is from the device itself, as far as the system forgets what it holds of a file; warm from the page cache. The
    objects are written to `directory`, and removed.

    Raises:
        StoreError: the directory cannot be written.
    """
    try:
        with scratch_directory(directory) as inside:
            return _measure_loads(model, Store(inside))
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"{directory}: its speed cannot be measured ({why}); make it writable") from error


def _measure_loads(model: Model, store: Store) -> Measured:
    sizes = _load_sizes(model)
    runs: list[Callable[[], float]] = []
    for count, tokens in sizes:
        paths = [store.put(random_object(model, tokens, seed)) for seed in range(count)]
        _load_s(model, store, paths, False)  # a warm-up
        runs += [
            partial(time_it, model, store, paths, cold) for cold in (True, False) for time_it in (_load_s, _open_s)
        ]
    medians, spread = _medians(runs)
    seconds = iter(medians)
    rows = [
        [count * tokens * token_bytes(model), count, *itertools.islice(seconds, len(runs) // len(sizes))]
        for count, tokens in sizes
    ]
    return Measured(rows, spread)


def measure_decoding(model: Model, codec: str) -> Measured:
    """[bytes of KV, objects, bytes stored, then seconds of loading: plain, coded] of random objects, from memory."""
    runs: list[Callable[[], float]] = []
    counts: Measurements = []
    with tempfile.TemporaryDirectory(prefix="pic-measure-") as inside:
        store = Store(inside)
        for count, tokens in _load_sizes(model):
            for kind in (CODEC, codec):
                paths = [store.put(random_object(model, tokens, seed, kind)) for seed in range(count)]
                _load_s(model, store, paths, False)  # a warm-up
                runs.append(partial(_load_s, model, store, paths, False))
            counts.append([count * tokens * token_bytes(model), count, sum(map(stored_bytes, paths))])
        medians, spread = _medians(runs)
    seconds = iter(medians)
    return Measured([[*row, next(seconds), next(seconds)] for row in counts], spread)


def _load_sizes(model: Model) -> list[tuple[int, int]]:
    """Objects × tokens of each, as far as the model's positions and `_MAX_BYTES` go."""
    most = min(model.max_positions - _TAIL_ROOM, _MAX_BYTES // token_bytes(model))
    return [(max(1, min(count, most)), max(1, min(tokens, most // count))) for count, tokens in _LOADS]


def _load_s(model: Model, store: Store, paths: Sequence[Path], is_cold: bool) -> float:
    """Seconds of the loader under `naive`."""
    from pictool.linker.link import link

    if is_cold:
        drop_page_cache(paths)
    return link(model, store, Spec.raw(paths, _TAIL, make_policy("naive"))).timing.fetch_s


def _open_s(model: Model, store: Store, paths: Sequence[Path], is_cold: bool) -> float:
    """Seconds of finding, opening and checking the objects."""
    if is_cold:
        drop_page_cache(paths)
    with ExitStack() as opened:
        started = time.perf_counter()
        spec = Spec.raw(paths, _TAIL, make_policy("naive"))
        open_objects(model, store, resolve_prompt(model, store, spec, opened).objects, opened)
        return time.perf_counter() - started


def measure_link(model: Model, store: Store, spec: Spec) -> Timing:
    """The times of a link whose objects are read from their device, if the system allows that: medians, field by field.

    Texts that are not compiled yet are compiled first.

    Raises:
        PicError: see `link`.
    """
    from pictool.linker.link import Timing, link

    link(model, store, spec)  # a warm-up, which compiles what is missing
    store.drain()
    with ExitStack() as opened:
        paths = [part.path(model, store) for part in resolve_prompt(model, store, spec, opened).objects]
    timings = []
    for _ in range(_REPEATS):
        drop_page_cache(paths)
        timings.append(vars(link(model, store, spec).timing))
    return Timing(**{name: statistics.median(timing[name] for timing in timings) for name in timings[0]})


def token_bytes(model: Model) -> int:
    """Bytes of a token's K and V through all layers, as objects hold them."""
    geometry = model.geometry
    return geometry.layers * geometry.width * model.torch_dtype.itemsize


def stored_bytes(path: Path) -> int:
    """Bytes that the KV of an object takes in its file.

    Raises:
        ObjectError: no object, or its header is damaged.
    """
    with ObjectFile(path) as file:
        return sum(map(file.stored_bytes, range(file.meta.target.geometry.layers))) + file.state_bytes


def random_object(model: Model, tokens: int, seed: int, codec: str = CODEC) -> CompiledChunk:
    """An object of random tokens and random normal K and V: it loads like any other, and no model has to run."""
    import torch

    from pictool.runtime.tensors import to_bytes

    model.require_no_states("forecasts of speed")
    ids = _random_tokens(model, tokens, seed)
    meta = ObjectMeta(model.target.key(ids, 0, codec), model.target, tokens, 0, codec)
    draw, geometry = torch.Generator().manual_seed(seed), model.geometry

    def layer() -> tuple[Any, ...]:
        numbers = torch.randn(tokens * geometry.width, generator=draw).to(model.torch_dtype)
        return meta.shape.split(to_bytes(numbers))

    return CompiledChunk(meta, "", np.asarray(ids, dtype=np.int32), [layer() for _ in range(geometry.layers)])


def _random_tokens(model: Model, count: int, seed: int) -> tuple[int, ...]:
    """Tokens that a document may have: no control tokens."""
    allowed = np.setdiff1d(np.arange(model.config.vocab_size), [*model.encoder.control.values()])
    return tuple(np.random.default_rng(seed).choice(allowed, count).tolist())


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Make the next reading of these files come from their device, where the system allows it; others are left out."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)  # what is not on the device yet cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
