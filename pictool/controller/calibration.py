"""Calibration of the loading controller (CacheBlend §5.1): measured once per machine, model and place, then cached.

What is measured: prefill by length, scattered rows, loading by place, decoding by codec.

$XDG_CACHE_HOME/pictool/profiles/<sha256 of "of">.json
{"of": {what it holds for: version, machine, model, …}, "rows": [[number, …], …], "scatter": share, "measured_at": s}

"rows" are the measurements of `measure_compute`; with a tier and a path in "of", of `measure_loads`; with a codec, of
`measure_decoding`. "scatter" is how far repeats were apart: what was measured on a busy machine is measured again soon.
A file that is not of this form is measured again; a cache directory that cannot be written only costs time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pictool.compiler.compile import CODEC
from pictool.controller.cost import Computed, Decoding, Estimator, PromptSize, Speed, layer_work
from pictool.controller.decision import STORE_TIER, RatioChoice, choose_ratio
from pictool.core import Chunk
from pictool.errors import InputError, ObjectError, StoreError
from pictool.linker.policies import make_policy
from pictool.linker.policies.base import Policy, Prompt, Selection, no_rows
from pictool.linker.resolve import Part, head_part, open_objects, resolve_documents
from pictool.linker.spec import Document, Spec
from pictool.reading import parse_json, read_file
from pictool.runtime import architectures
from pictool.runtime.device import device_name, is_accelerator
from pictool.runtime.machine import cpu_name
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.scratch import scratch_directory
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.linker.link import Timing
    from pictool.runtime.model import Model

VERSION = 2  # of profiles
_PREFILL_TOKENS = (64, 256, 1024, 4096, 16384)
_LONG_S = 3.0  # what takes this long is run once, and no longer prompt is
_MOST_SCATTERED = 1024  # tokens of context, of which some rows are computed
_LOADS = ((2, 1024), (4, 256), (16, 16))  # objects × tokens of each: many bytes, both, many objects
_MAX_BYTES = 1 << 28  # of random objects at a time
_MAX_PROFILE_BYTES = 1 << 20  # of a kept profile: some ten rows
_MAX_MEASURED = 1e18  # bytes, tokens or seconds: a kept number beyond is damaged
_REPEATS = 3
MAX_SCATTER = 0.5  # of repeats, beyond which the machine was busy
_BUSY_S = 600.0  # for so long a profile of a busy machine is used
MAX_DISAGREEMENT = 3.0  # factor between what a link takes and what the profile says
_TAIL, _TAIL_ROOM = "Answer:", 32

Measurements = list[list[float]]
OnMeasure = Callable[[str], None]  # called with what is measured next, which takes a while


@dataclass(frozen=True)
class Measured:
    """Measurements [points, width], the medians of repeats. `scatter` is their range over their median, of most."""

    rows: Measurements
    scatter: float = 0.0


@dataclass(frozen=True)
class ProfileFacts:
    """When a profile was measured (seconds since 1970), and how evenly."""

    measured_at: float
    scatter: float

    @property
    def is_busy(self) -> bool:
        return self.scatter > MAX_SCATTER


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


def stored_bytes(path: Path) -> int:
    """Bytes that the KV of an object takes in its file.

    Raises:
        ObjectError: no object, or its header is damaged.
    """
    with ObjectFile(path) as file:
        return sum(map(file.stored_bytes, range(file.meta.target.geometry.layers)))


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
        open_objects(model, store, resolve_documents(model, store, spec, opened), opened)
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
        paths = [part.path(model, store) for part in prompt_parts(model, store, spec, opened)]
    timings = []
    for _ in range(_REPEATS):
        drop_page_cache(paths)
        timings.append(vars(link(model, store, spec).timing))
    return Timing(**{name: statistics.median(timing[name] for timing in timings) for name in timings[0]})


def prompt_parts(model: Model, store: Store, spec: Spec, opened: ExitStack) -> list[Part]:
    """The parts of a prompt's documents, and its head if that has tokens."""
    parts = resolve_documents(model, store, spec, opened)
    head = head_part(model, spec, spec.frame(model).head)
    return [*parts, head] if head.chunk.tokens else parts


def token_bytes(model: Model) -> int:
    """Bytes of a token's K and V through all layers, as objects hold them."""
    geometry = model.geometry
    return geometry.layers * geometry.width * model.torch_dtype.itemsize


def random_object(model: Model, tokens: int, seed: int, codec: str = CODEC) -> CompiledChunk:
    """An object of random tokens and random normal K and V: it loads like any other, and no model has to run."""
    import torch

    from pictool.runtime.tensors import to_bytes

    ids = _random_tokens(model, tokens, seed)
    meta = ObjectMeta(model.target.key(ids, 0, codec), model.target, tokens, 0, codec)
    draw, geometry = torch.Generator().manual_seed(seed), model.geometry

    def layer() -> tuple[Any, ...]:
        numbers = torch.randn(tokens * geometry.width, generator=draw).to(model.torch_dtype)
        return meta.shape.split(to_bytes(numbers))

    return CompiledChunk(meta, "", np.asarray(ids, dtype=np.int32), [layer() for _ in range(geometry.layers)])


def _random_tokens(model: Model, count: int, seed: int) -> tuple[int, ...]:
    draw = np.random.default_rng(seed).integers(0, model.config.vocab_size, count)
    return tuple(int(token) for token in draw)


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


@dataclass(frozen=True)
class LoadProfile:
    """How fast the loader gets objects from one place: from the device itself, and from the page cache."""

    cold: Speed
    warm: Speed


def compute_profile(model: Model, again: bool = False, on_measure: OnMeasure | None = None) -> list[Computed]:
    """Full prefills of several lengths, ascending, and a recompute of scattered rows."""
    rows = _kept(machine(model), 3, 4, lambda: measure_compute(model), "prefill", again, on_measure)
    size = token_bytes(model)
    return [
        Computed(PromptSize(int(context), int(tail), 1, size), int(runs), seconds)
        for context, tail, runs, seconds in rows
    ]


def load_profile(
    model: Model, tier: str, directory: Path, again: bool = False, on_measure: OnMeasure | None = None
) -> LoadProfile:
    """The speed of the tier on which `directory` lies (or its nearest parent, if it does not exist yet).

    Raises:
        StoreError: it has to be measured, and the directory cannot be written.
    """
    place = nearest_directory(directory)
    of = machine(model) | {"tier": tier, "path": str(directory.resolve())}
    rows = _kept(of, 2, 6, lambda: measure_loads(model, place), f"loading from {place}", again, on_measure)
    sizes, objects, *seconds = zip(*rows, strict=True)
    cold, cold_open, warm, warm_open = seconds
    return LoadProfile(Speed.fit(sizes, objects, cold, cold_open), Speed.fit(sizes, objects, warm, warm_open))


def decoding(model: Model, codec: str, again: bool = False, on_measure: OnMeasure | None = None) -> Decoding:
    """What the codec costs, of random KV: real KV is somewhat smaller."""
    if codec == CODEC:
        return Decoding()
    rows = _kept(
        machine(model) | {"codec": codec}, 1, 5, lambda: measure_decoding(model, codec), f"decoding {codec}", again,
        on_measure,
    )  # fmt: skip
    return Decoding.fit(*zip(*rows, strict=True))


def machine(model: Model) -> dict[str, Any]:
    """What measured times hold for, beside the place of the objects."""
    import torch

    device = device_name(model.device) if is_accelerator(model.device) else "cpu"
    return {
        "version": VERSION, "cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "device_name": device, "device": model.device, "model": model.fingerprint, "dtype": model.dtype,
    }  # fmt: skip


def nearest_directory(path: Path) -> Path:
    """The directory itself, or the first of its parents that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


def _kept(
    of: dict[str, Any],
    num_counts: int,
    width: int,
    measure: Callable[[], Measured],
    what: str,
    again: bool,
    on_measure: OnMeasure | None,
) -> Measurements:
    """The measurements [points, width] of the profile `of`, the counts first: from the cache, or made now."""
    path = _place(of)
    if not again and (rows := _read(path, of, num_counts, width)) is not None:
        return rows
    if on_measure:
        on_measure(what)
    measured = measure()
    if measured.scatter > MAX_SCATTER and on_measure:
        on_measure(f"{what} on a busy machine: repeats were {measured.scatter:.0%} apart; it is measured again soon")
    kept = {"of": of, "rows": measured.rows, "scatter": measured.scatter, "measured_at": time.time()}
    write_cache_file(path, json.dumps(kept, indent=1).encode())
    return measured.rows


def _place(of: dict[str, Any]) -> Path:
    return cache_dir() / "profiles" / f"{hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()}.json"


def compute_facts(model: Model) -> ProfileFacts | None:
    """When, and how evenly, the profile of this model's computing was measured; None if none is kept."""
    try:
        return _facts(parse_json(read_file(_place(machine(model)), _MAX_PROFILE_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _facts(data: Any) -> ProfileFacts:
    facts = ProfileFacts(float(data["measured_at"]), float(data["scatter"]))
    if not (math.isfinite(facts.measured_at) and math.isfinite(facts.scatter)):
        raise ValueError(facts)
    return facts


def forget_compute(model: Model) -> None:
    """Have the computing of this model measured again when it is next needed."""
    with suppress(OSError):
        _place(machine(model)).unlink()


def disagrees(estimated_s: float, measured_s: float) -> bool:
    """Whether an estimate is so far from what was measured that the profile must be of another state of the machine."""
    low, high = sorted((estimated_s, measured_s))
    return low > 0 and high / low > MAX_DISAGREEMENT


def _read(path: Path, of: dict[str, Any], num_counts: int, width: int) -> Measurements | None:
    """The measurements of a cached profile; None if there is none, it is damaged or old, or of a busy machine."""
    try:
        data = parse_json(read_file(path, _MAX_PROFILE_BYTES))
        rows = [[float(value) for value in row] for row in data["rows"]]
        is_ours, facts = data["of"] == of, _facts(data)
        if facts.is_busy and abs(time.time() - facts.measured_at) > _BUSY_S:
            return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    is_sound = all(
        len(row) == width and all(0 < value < _MAX_MEASURED for value in row) and min(row[:num_counts]) >= 1
        for row in rows
    )
    return rows if rows and is_ours and is_sound else None


def make_estimator(model: Model, policy: Policy, measured: Sequence[Computed]) -> Estimator:
    """The delays of a policy, from what was measured of the model."""
    layers = model.geometry.layers
    return Estimator.fit(measured, layer_work(layers, policy.check_layers(layers), projection_share(model)))


def projection_share(model: Model) -> float:
    """The share of a layer's weights that project to Q, K and V: a checked layer runs these for all rows."""
    query = architectures.query_width(model.config)
    projections = query + model.geometry.width
    return float(projections / (projections + query + 3 * architectures.active_width(model.config)))


def measure_size(
    model: Model, store: Store, spec: Spec, *, again: bool = False, on_measure: OnMeasure | None = None
) -> PromptSize:
    """The size of a prompt; nothing is compiled. Objects that are there have the bytes that they have.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    with ExitStack() as opened:
        parts = prompt_parts(model, store, spec, opened)
        num_context, tail = sum(len(part.chunk) for part in parts), model.encode(spec.frame(model).tail)
        size = PromptSize(num_context, len(tail), len(parts), token_bytes(model))
        require_room(model, size)
        codecs = [part.options.codec for part in parts]
        if all(codec == CODEC for codec in codecs):
            return size
        costs = {codec: decoding(model, codec, again, on_measure) for codec in sorted(set(codecs))}
        stored, decode_s = 0, 0.0
        for part, codec in zip(parts, codecs, strict=True):
            kv_bytes = len(part.chunk) * size.token_bytes
            stored += _stored_bytes(model, store, part) or round(costs[codec].stored * kv_bytes)
            decode_s += costs[codec].seconds(kv_bytes, 1)
        return replace(size, coded_bytes=stored, decode_s=decode_s)


def _stored_bytes(model: Model, store: Store, part: Part) -> int | None:
    """Bytes that a part's KV takes in its object; None if it is still to be compiled."""
    with suppress(ObjectError):
        return stored_bytes(part.path(model, store))
    return None


def coded_size(size: PromptSize, cost: Decoding) -> PromptSize:
    """The size of a prompt whose objects have one codec; none of them needs to exist."""
    return replace(
        size, coded_bytes=round(cost.stored * size.num_bytes), decode_s=cost.seconds(size.num_bytes, size.objects)
    )


def require_room(model: Model, size: PromptSize) -> None:
    """Refuse what no link would take.

    Raises:
        InputError: more tokens than the model has positions.
    """
    if size.num_tokens > model.max_positions:
        raise InputError(
            f"{size.context} tokens of context and {size.tail} of the query, but {model.name} takes "
            f"{model.max_positions} positions; use fewer or shorter documents"
        )


def with_ratio(policy: Policy, ratio: float) -> Policy:
    """The same policy with another share of rows.

    Raises:
        InputError: none of its fields is that, or the ratio is no share.
    """
    knob = policy.knob
    field = knob.field if knob is not None and knob.is_share else "ratio"
    return make_policy(policy.name, policy.params | {field: ratio})


def auto_ratio(
    model: Model, store: Store, spec: Spec, *, on_measure: OnMeasure | None = None
) -> RatioChoice:  # fmt: skip
    """The ratio for a prompt whose objects are read from where the store lives (CacheBlend §5.1).

    Args:
        spec: its policy with any ratio; what counts are the layers that it checks.
        on_measure: called before something is measured, which happens once per machine, model and place.

    Raises:
        PicError: an unusable document, or a store whose directory cannot be measured.
    """
    size = measure_size(model, store, spec, on_measure=on_measure)
    estimator = make_estimator(model, spec.policy, compute_profile(model, on_measure=on_measure))
    speed = load_profile(model, STORE_TIER, store.root, on_measure=on_measure).cold
    return choose_ratio(estimator, size, speed)
