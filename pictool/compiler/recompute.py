"""Objects computed again from their tokens: whether a stored KV is what the model gives.

Checksums and signatures say that KV is whole and who vouches for it; this says that it is right. Compared are, of every
layer, keys and values (or other parts) and a hybrid's states: each token by itself, all tokens together, and their
scale, whose noise is far smaller, since the errors of single numbers cancel in it.

A token's difference is that of its vectors of all heads in L2, relative to the computed ones, or to the median token of
the part if that is larger: tokens with tiny values (attention sinks) differ by the noise of all others. Of a coded part
only that counts by which a stored number is farther from the computed one than the codec's own rounding takes it:
otherwise a number at the edge of two codes would differ by a whole step of the codec.

What differs by more than `LIMITS` is compared with the noise of this model on this chunk: what it computes with its
input rounded anew. That is at least as large as what two honest compiles differ by, and a model may have ten times the
noise of another.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from pictool.compiler.compile import compute_chunks
from pictool.core import UNNAMED, Chunk
from pictool.errors import ObjectError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Buffer
from pictool.store.objects.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.remote.transfer import TransferResult, pull, require_pullable
from pictool.store.scratch import scratch_directory
from pictool.store.signatures import Signed, read_sidecar
from pictool.store.store import Store
from pictool.store.upkeep import expire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pictool.runtime.model import Model

    Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Apart:
    """How far numbers are apart, relative to the computed ones: all tokens together, their scale, the worst token."""

    l2: float
    scale: float
    token: float


# What is noise in any case, several times what packs, threads and processor flags made of honest objects of most models
# (a token in bfloat16: 0.012 and 0.07; 0.44 of Gemma 3). The KV of other tokens is 0.97 apart and more in some layer
# (benchmarks/results/recompute.json, recompute_smollm2.json, recompute_gemma3.json).
LIMITS = {
    "float32": Apart(1e-3, 1e-4, 1e-3),
    "float16": Apart(1e-2, 1e-3, 5e-2),
    "bfloat16": Apart(5e-2, 5e-3, 0.2),
}
CODED = 5e-2  # the limit of a token under a lossy codec at least: noise may change the scale of a group of numbers
NOISE_FACTOR = 4.0  # how many times the noise of the model on this chunk is noise, too
ROUNDED = 2  # times that the input is rounded anew to measure it
REROUTED = 0.01  # of the tokens: where rounding decides near ties of a router, so many may have had other experts
NOBODY = "an unknown key"  # in place of a signer


@dataclass(frozen=True)
class Difference:
    """Between the stored and the computed numbers of a part; what may be noise (`limits`); the worst token's index."""

    part: str
    apart: Apart
    limits: Apart
    at: int

    @property
    def is_noise(self) -> bool:
        return self.excess <= 1

    @property
    def excess(self) -> float:
        """The largest of its numbers, as a share of its limit."""
        pairs = zip(astuple(self.apart), astuple(self.limits), strict=True)
        return max(float(value / limit) for value, limit in pairs)

    def allowing(self, noise: Difference) -> Difference:
        """The same where this noise was measured."""
        pairs = zip(astuple(self.limits), astuple(noise.apart), strict=True)
        return replace(self, limits=Apart(*(max(limit, NOISE_FACTOR * value) for limit, value in pairs)))


@dataclass(frozen=True)
class Recomputed:
    """What was computed again: objects by writer, and those that differ among them.

    Fields:
        writers: (objects, those that differ) by signer.
        skipped: objects of another model, dtype or dummy token, and blocks of chains, whose KV is not of their tokens
            alone.
        problems: a line for each object that differs, by key.
    """

    writers: dict[str, tuple[int, int]] = field(default_factory=dict)
    skipped: int = 0
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def objects(self) -> int:
        return sum(count for count, _ in self.writers.values())


def recompute(
    model: Model, store: Store, keys: Sequence[str], share: float, on_object: Callable[[], None] = lambda: None
) -> Recomputed:
    """Compute a random share of objects of a store again, and remove those that differ from what their tokens give.

    Which ones is not to be foreseen: the share is at once the rate at which a planted object is found.

    Raises:
        PicError: an object cannot be read, or computed.
    """
    found = _Findings(model)
    for key in choose(keys, share):
        if not found.is_right(key, store):
            expire(store, [key], force=True)
        on_object()
    return found.result()


def pull_checked(
    model: Model, store: Store, keys: Sequence[str], share: float, on_object: Callable[[], None] = lambda: None
) -> tuple[TransferResult, Recomputed]:
    """`pull`; a random share of the objects that are not here is computed again before it is in the store.

    Until then such an object is in a scratch directory, with which it is removed if this process is killed.

    Raises:
        InputError and PicError, as `pull` and `recompute`; what was fetched and checked before is here.
    """
    remote, found, results = require_pullable(store, keys), _Findings(model), list[TransferResult]()
    checked = set(choose([key for key in keys if not store.path(key).exists()], share))
    store.ensure_store()
    with scratch_directory(store.root) as directory:
        incoming = Store(directory, store.max_bytes, remote=remote, on_warning=store.on_warning, trust=store.trust)
        for key in dict.fromkeys(keys):
            results.append(pull(incoming if key in checked else store, [key]))
            if key in checked and found.is_right(key, incoming):
                with incoming.path(key).open("rb") as file:
                    store.insert(key, file)
                store.add_signatures(key, read_sidecar(incoming.path(key)))
            on_object()
    return TransferResult.of(results), found.result()


class _Findings:
    """What was computed again so far."""

    def __init__(self, model: Model) -> None:
        self._model, self._skipped = model, 0
        self._checked, self._bad, self._problems = Counter[str](), Counter[str](), dict[str, str]()

    def is_right(self, key: str, place: Store) -> bool:
        """Compute an object again, which is in `place`; False if it differs. Raises PicError."""
        with place.peek_any(key) as file:
            if not is_comparable(self._model, file):
                self._skipped += 1
                return True
            writer = _writer(place, file)
            self._checked[writer] += 1
            problem = find_difference(self._model, file)
        if problem is not None:
            self._bad[writer] += 1
            self._problems[key] = f"{problem}; it is not kept"
        return problem is None

    def result(self) -> Recomputed:
        writers = {name: (count, self._bad[name]) for name, count in self._checked.items()}
        return Recomputed(writers, self._skipped, self._problems)


def choose(keys: Sequence[str], share: float) -> list[str]:
    """A random share of keys, at least one if there are some."""
    return random.SystemRandom().sample(sorted(set(keys)), math.ceil(share * len(set(keys))))


def is_comparable(model: Model, file: ObjectFile) -> bool:
    """Whether an object is of this model, computed as it computes, and of nothing but its own tokens."""
    meta = file.meta
    return meta.target == model.target and meta.parent is None and UNNAMED not in {*chain(*meta.after)}


def find_difference(model: Model, file: ObjectFile) -> str | None:
    """What of an object differs from what its tokens give by more than noise; None: nothing does. Raises PicError."""
    worst = max(differences(model, file), key=lambda part: part.excess)
    if worst.is_noise:
        return None
    apart = worst.apart
    return (
        f"{file.name}: {worst.part} differs by {apart.l2:.2%} (scale {apart.scale:.2%}, token {worst.at} "
        f"{apart.token:.2%}) from the KV of its tokens, more than the noise of {model.dtype}"
    )


def differences(model: Model, file: ObjectFile) -> list[Difference]:
    """The difference of each layer's parts, and of each linear layer's states. Raises PicError."""
    from pictool.runtime.prefill import rounded_anew

    again = _compute(model, file)
    found = list(_compare(model, again, file.layer, lambda index: list(file.states(index).values())))
    for seed in range(0 if all(part.is_noise for part in found) else ROUNDED):
        with rounded_anew(model.stack, seed):
            noisy = _compute(model, file)
        noise = _compare(model, again, partial(_coded, noisy), noisy.states.__getitem__)
        found = [part.allowing(other) for part, other in zip(found, noise, strict=True)]
    return found


def _compute(model: Model, file: ObjectFile) -> CompiledChunk:
    chunk = Chunk("", tuple(int(token) for token in file.tokens()), file.name)
    (again,) = compute_chunks(model, {file.meta.key: chunk}, file.meta.options)
    return again


def _compare(
    model: Model, again: CompiledChunk, layer: Callable[[int], Sequence[Buffer]],
    states: Callable[[int], Sequence[Buffer]],
) -> Iterator[Difference]:  # fmt: skip
    """Between what is, or would be, stored of each layer, and of each linear layer, and what was computed."""
    meta, dtype = again.meta, again.meta.target.dtype
    for index, parts in enumerate(again.layers):
        limits, left_out = _limits(model, meta, index)
        rows = zip(meta.target.geometry.parts, layer(index), parts, _coded(again, index), strict=True)
        for part, *numbers in rows:
            shape = part.heads, meta.num_tokens, part.width
            stored, raw, coded = (_numbers(data, dtype).reshape(shape) for data in numbers)
            apart, at = _apart(stored, raw, coded, left_out)
            yield Difference(f"layer {index}'s {part.name}", apart, limits, at)
    for index, computed in enumerate(again.states):
        for name, *numbers in zip(meta.state_dims, states(index), computed, strict=True):
            stored, raw = (_numbers(data, meta.state_dtype(name)).reshape(1, 1, -1) for data in numbers)
            yield Difference(f"state {index}'s {name}", _apart(stored, raw, raw)[0], LIMITS[model.dtype], 0)


def _limits(model: Model, meta: ObjectMeta, layer: int) -> tuple[Apart, int]:
    """What is noise in a layer in any case, and how many tokens may have had other experts.

    Keys and values of the first layer depend on their own token alone, so that each has the noise of one rounding: its
    limit is that of all together.
    """
    limits, left_out = LIMITS[model.dtype], 0
    if layer == 0 and model.geometry.states is None:
        limits = replace(limits, token=limits.l2)
    elif model.is_routed_by_rounding:
        left_out = math.ceil(REROUTED * meta.num_tokens)
    if not codecs()[meta.codec].is_lossless:
        limits = replace(limits, token=max(limits.token, CODED))
    return limits, left_out


def _coded(chunk: CompiledChunk, layer: int) -> Sequence[Buffer]:
    """The parts of a layer, coded and decoded."""
    shape, parts = chunk.meta.shape, chunk.layers[layer]
    if codecs()[chunk.meta.codec].is_lossless:
        return parts
    codec, data = codecs()[chunk.meta.codec], memoryview(bytearray(shape.num_bytes))
    codec.decode(memoryview(codec.encode(parts[0], parts[1], shape)), shape, data)
    return shape.split(data)


def _apart(stored: Floats, raw: Floats, coded: Floats, left_out: int = 0) -> tuple[Apart, int]:
    """How far numbers [heads, tokens, width] are from those computed, without the worst tokens; the worst that counts.

    `coded` are the computed ones as they would have been stored.
    """
    import numpy as np

    beyond = np.maximum(np.abs(stored - raw) - np.abs(coded - raw), 0.0)
    errors, sizes = np.square(beyond).sum((0, 2)), np.square(raw).sum((0, 2))  # of each token
    least = np.finfo(np.float64).tiny
    of_tokens = np.sqrt(errors / np.maximum(sizes, max(float(np.median(sizes)), least)))
    kept = np.argsort(of_tokens)[: max(1, len(of_tokens) - left_out)]
    at, size = int(kept[-1]), max(float(sizes[kept].sum()), least)
    off = float(((stored - coded) * coded).sum((0, 2))[kept].sum())
    return Apart(math.sqrt(float(errors[kept].sum()) / size), abs(off) / size, float(of_tokens[at])), at


def _numbers(data: Buffer, dtype: str) -> Floats:
    """The numbers of a part, float64."""
    import numpy as np

    from pictool.store.codecs.numbers import array_dtype

    return np.frombuffer(data, dtype=array_dtype(dtype)).astype(np.float64)


def _writer(store: Store, file: ObjectFile) -> str:
    """Who signed an object, as far as this store's signers tell."""
    signers = None if store.trust is None else store.trust.signers
    return (signers and signers.signer_of(Signed.of_object(file), read_sidecar(file.path))) or NOBODY


def require_right(result: Recomputed, store: Store) -> None:
    """Raises ObjectError if an object differed."""
    if result.problems:
        raise ObjectError(
            f"{store.root}: {len(result.problems)} of {result.objects} recomputed objects do not match "
            "their tokens; ask who wrote them, and compile their texts again"
        )
