"""The speeds of this machine for a model, measured once and then kept; and the ratio that follows (CacheBlend §5.1).

$XDG_CACHE_HOME/pictool/profiles/<sha256 of "of">.json
{"of": {what it holds for: version, machine, model, …}, "rows": [[number, …], …]}

"rows" are the measurements of `measure_compute`; with a path and a codec in "of", those of `measure_loads`. A file that
is not of this form is measured again; a cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pictool.compiler.compile import CODEC
from pictool.controller.cost import Estimator, PromptSize, RatioChoice, Speed, fit_nonnegative
from pictool.core import Chunk
from pictool.errors import InputError, StoreError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy, Prompt, Selection, no_rows
from pictool.linker.resolve import lay_out_spec
from pictool.linker.spec import Document, Spec
from pictool.reading import parse_json, read_file
from pictool.runtime.device import device_name, is_accelerator
from pictool.runtime.machine import cpu_name
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file
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
VERSION = 3  # of profiles
_MAX_PROFILE_BYTES = 1 << 20  # of a kept profile: some ten rows
_MAX_MEASURED = 1e18  # bytes, tokens or seconds: a kept number beyond is damaged

Measurements = list[list[float]]
OnMeasure = Callable[[str], None]  # called with what is measured next, which takes a while


@dataclass(frozen=True)
class LoadProfile:
    """How fast the loader gets objects of a codec: from the store's device, and from the page cache.

    `stored`: bytes in a file per byte of KV.
    """

    device: Speed
    cached: Speed
    stored: float

    def at(self, bytes_s: float) -> Speed:
        """From a device that reads so many bytes a second; what the loader does with them comes on top."""
        return Speed(self.cached.byte_s + self.stored / bytes_s, self.cached.object_s)


def make_estimator(
    model: Model, policy: Policy, again: bool = False, on_measure: OnMeasure | None = None
) -> Estimator:  # fmt: skip
    """The delays of a policy: layers before the first one that it checks are computed whole."""
    rows = _kept(_machine(model), 4, lambda: measure_compute(model), "prefill", again, on_measure)
    layers = model.geometry.layers
    return Estimator.fit(rows, min(policy.check_layers(layers), default=0) / layers)


def load_profile(
    model: Model, store: Store, codec: str, again: bool = False, on_measure: OnMeasure | None = None
) -> LoadProfile:
    """The speed of the place where a store is, or will be.

    Raises:
        StoreError: it has to be measured, and the directory cannot be written.
    """
    of = _machine(model) | {"path": str(store.root.resolve()), "codec": codec}
    rows = _kept(
        of, 5, lambda: measure_loads(model, store.root, codec), f"loading from {store.root}", again, on_measure
    )
    sizes, objects, stored, cold, warm = zip(*rows, strict=True)
    device, cached = (Speed(*fit_nonnegative([sizes, objects], seconds)) for seconds in (cold, warm))
    return LoadProfile(device, cached, sum(stored) / sum(sizes))


def auto_ratio(model: Model, store: Store, spec: Spec, on_measure: OnMeasure | None = None) -> RatioChoice:
    """The ratio for a prompt whose objects are read from where the store lives.

    Args:
        spec: its policy with any ratio. on_measure: called before something is measured.

    Raises:
        PicError: an unusable document, or a store whose directory cannot be measured.
    """
    size = measure_size(model, store, spec)
    estimator = make_estimator(model, spec.policy, on_measure=on_measure)
    return estimator.choose_ratio(size, load_profile(model, store, spec.codec, on_measure=on_measure).device)


def with_ratio(policy: Policy, ratio: float) -> Policy:
    """The same policy with another share of rows.

    Raises:
        InputError: none of its fields is that, or the ratio is no share.
    """
    knob = policy.knob
    field = knob.field if knob is not None and knob.is_share else "ratio"
    return make_policy(policy.name, policy.params | {field: ratio})


def measure_size(model: Model, store: Store, spec: Spec) -> PromptSize:
    """The size of a prompt; nothing is compiled.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    with ExitStack() as opened:
        prompt = lay_out_spec(model, store, spec, opened)
        num_context = prompt.layout.num_context
        num_tail = prompt.layout.num_tokens - num_context
        size = PromptSize(num_context, num_tail, len(prompt.objects), model.token_bytes)
    return require_room(model, size)


def require_room(model: Model, size: PromptSize) -> PromptSize:
    """Refuse what no link would take. Raises InputError: more tokens than the model has positions."""
    if size.context + size.tail > model.max_positions:
        raise InputError(
            f"{size.context} tokens of context and {size.tail} of the query, but {model.name} has "
            f"{model.max_positions} positions; use fewer or shorter documents"
        )
    return size


def _machine(model: Model) -> dict[str, Any]:
    """What measured times hold for, beside the place of the objects."""
    import torch

    device = device_name(model.device) if is_accelerator(model.device) else "cpu"
    return {
        "version": VERSION, "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device_name": device, "device": model.device, "model": model.fingerprint, "dtype": model.dtype,
    }  # fmt: skip


def _kept(
    of: dict[str, Any], width: int, measure: Callable[[], Measurements], what: str, again: bool,
    on_measure: OnMeasure | None,
) -> Measurements:  # fmt: skip
    """The measurements [points, width] of the profile `of`: from the cache, or made now."""
    if not again and (rows := _read(of, width)) is not None:
        return rows
    if on_measure:
        on_measure(what)
    rows = measure()
    write_cache_file(_place(of), json.dumps({"of": of, "rows": rows}, indent=1).encode())
    return rows


def _place(of: dict[str, Any]) -> Path:
    return cache_dir() / "profiles" / f"{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()}.json"


def _read(of: dict[str, Any], width: int) -> Measurements | None:
    """The measurements of a kept profile; None if there is none, or it is damaged."""
    try:
        data = parse_json(read_file(_place(of), _MAX_PROFILE_BYTES))
        rows = [[float(value) for value in row] for row in data["rows"]]
        is_ours = data["of"] == of
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    is_sound = all(len(row) == width and all(0 < value < _MAX_MEASURED for value in row) for row in rows)
    return rows if len(rows) > 1 and is_ours and is_sound else None


# What is measured


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
    meta = ObjectMeta(model.target.key(ids, codec), model.target, tokens, codec)
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
