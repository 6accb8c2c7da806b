"""What the loading controller measures of a machine and a model (CacheBlend §5.1): prefill by length, and loading.

`profile` keeps the results.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
from pictool.linker.spec import Document, Spec
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.scratch import nearest_directory, scratch_directory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.link import Timing
    from pictool.runtime.model import Model

_PREFILL_TOKENS = (64, 256, 1024, 4096, 16384)
_LONG_S = 3.0  # what takes this long is run once, and no longer prompt is
_MOST_SCATTERED = 1024  # tokens of context, of which some rows are computed
_LOADS = ((2, 1024), (4, 256), (16, 16))  # objects × tokens of each: many bytes, both, many objects
_MAX_BYTES = 1 << 28  # of random objects at a time
_TAIL, _TAIL_ROOM = "Answer:", 32

Measurements = list[list[float]]


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


def measure_compute(model: Model) -> Measurements:
    """[context, tail, share of the context that is computed, seconds]: of all by length, until one takes long; then of
    scattered rows."""
    model.require_no_states("forecasts of speed")
    tail = len(model.encode(_TAIL))
    lengths = sorted({min(tokens, model.max_positions) - tail for tokens in _PREFILL_TOKENS})
    _full_s(model, lengths[0])  # the weights come into memory
    rows: Measurements = []
    for context in lengths:
        rows.append([context, tail, 1.0, _median_s(partial(_full_s, model, context))])
        if rows[-1][-1] > _LONG_S:
            break
    apart = min(max(_MOST_SCATTERED, lengths[0]), lengths[len(rows) - 1], _MAX_BYTES // model.token_bytes)
    with tempfile.TemporaryDirectory(prefix="pic-measure-") as inside:
        store, policy = Store(inside), EveryNth()
        path = store.put(random_object(model, apart, 0))
        seconds = _median_s(lambda: _timing(model, store, [path], policy).recompute_s)
    return [*rows, [apart, tail, 1 / policy.n, seconds]]


def _full_s(model: Model, context: int) -> float:
    chunk = Chunk("", _random_tokens(model, context, 0), "random")
    return _timing(model, Store(os.devnull), [chunk], make_policy("full", {})).recompute_s


def _timing(model: Model, store: Store, documents: Sequence[Document], policy: Policy) -> Timing:
    from pictool.linker.link import link

    return link(model, store, Spec.raw(documents, _TAIL, policy)).timing


def _median_s(run: Callable[[], float]) -> float:
    """The median of three runs; of what takes long the first."""
    seconds = run()
    return seconds if seconds > _LONG_S else statistics.median([seconds, run(), run()])


def measure_loads(model: Model, place: Path, codec: str) -> Measurements:
    """[bytes of KV, objects, bytes stored, then seconds of loading: cold, warm] of random objects of a codec.

    Cold is from the device itself, as far as the system forgets what it holds of a file; warm from the page cache. The
    objects are written to `place` or its nearest parent that exists, and removed.

    Raises:
        StoreError: the directory cannot be written.
    """
    try:
        with scratch_directory(nearest_directory(place)) as inside:
            return [_measure_load(model, Store(inside), *size, codec) for size in _load_sizes(model)]
    except OSError as error:
        why = error.strerror or error
        raise StoreError(f"{place}: its speed cannot be measured ({why}); make it writable") from error


def _measure_load(model: Model, store: Store, count: int, tokens: int, codec: str) -> list[float]:
    paths = [store.put(random_object(model, tokens, seed, codec)) for seed in range(count)]
    naive, stored = make_policy("naive"), 0
    for path in paths:
        with ObjectFile(path) as file:
            stored += sum(map(file.stored_bytes, range(file.meta.target.geometry.layers)))

    def run(is_cold: bool) -> float:
        if is_cold:
            drop_page_cache(paths)
        return _timing(model, store, paths, naive).fetch_s

    run(False)  # a warm-up
    cold, warm = (_median_s(partial(run, is_cold)) for is_cold in (True, False))
    return [count * tokens * model.token_bytes, count, stored, cold, warm]


def _load_sizes(model: Model) -> list[tuple[int, int]]:
    """Objects × tokens of each, as far as the model's positions and `_MAX_BYTES` go."""
    most = min(model.max_positions - _TAIL_ROOM, _MAX_BYTES // model.token_bytes)
    return [(max(1, min(count, most)), max(1, min(tokens, most // count))) for count, tokens in _LOADS]


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
