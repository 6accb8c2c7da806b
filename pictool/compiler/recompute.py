"""Objects computed again from their tokens: whether a stored KV is what the model gives.

Checksums and signatures say that KV is whole and who vouches for it; this says that it is right. Compared are, of every
layer, keys and values (or other parts) and a hybrid's states, after the object's own codec: by their difference in L2,
and by their scale, whose noise is far smaller, since the errors of single numbers cancel in it.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pictool.compiler.compile import compute_chunks
from pictool.core import Chunk, CompileOptions
from pictool.errors import ObjectError
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Buffer
from pictool.store.objects.format import ObjectFile
from pictool.store.signatures import Signed, read_sidecar
from pictool.store.store import Store
from pictool.store.upkeep import set_aside

if TYPE_CHECKING:
    import numpy as np

    from pictool.runtime.model import Model

# What the noise of a dtype may be, of the difference and of the scale: many times what packs, threads and processor
# flags made of honest objects (benchmarks/results/recompute.json), for deeper models and other devices.
LIMITS = {"float32": (1e-3, 1e-4), "float16": (1e-2, 1e-3), "bfloat16": (5e-2, 5e-3)}
NOBODY = "nobody known"  # in place of a signer


@dataclass(frozen=True)
class Difference:
    """Between stored and computed numbers, relative to the computed ones: in L2, and of their scale."""

    part: str
    l2: float
    scale: float

    def is_noise(self, dtype: str) -> bool:
        most_l2, most_scale = LIMITS[dtype]
        return self.l2 <= most_l2 and abs(self.scale) <= most_scale


@dataclass(frozen=True)
class Recomputed:
    """What was computed again: objects by writer, those that differ among them, and where these are now.

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
    """Compute a random share of objects of a store again, and set aside those that differ from what their tokens give.

    Which ones is not to be foreseen: the share is at once the rate at which a planted object is found.

    Raises:
        PicError: an object cannot be read, or computed.
    """
    checked, bad, problems = Counter[str](), Counter[str](), dict[str, str]()
    skipped = 0
    for key in choose(keys, share):
        with store.peek_any(key) as file:
            if is_comparable(model, file):
                writer = _writer(store, file)
                checked[writer] += 1
                problem = find_difference(model, file)
            else:
                problem, skipped = None, skipped + 1
        if problem is not None:
            bad[writer] += 1
            problems[key] = f"{problem}; set aside as {set_aside(store, key)}"
        on_object()
    return Recomputed({name: (count, bad[name]) for name, count in checked.items()}, skipped, problems)


def choose(keys: Sequence[str], share: float) -> list[str]:
    """A random share of keys, at least one if there are some."""
    return random.SystemRandom().sample(sorted(set(keys)), math.ceil(share * len(set(keys))))


def is_comparable(model: Model, file: ObjectFile) -> bool:
    """Whether an object is of this model, computed as it computes, and of nothing but its own tokens."""
    meta = file.meta
    return meta.target == model.target and meta.parent is None and (not meta.sinks or meta.dummy == model.bos_id)


def find_difference(model: Model, file: ObjectFile) -> str | None:
    """What of an object differs from what its tokens give by more than noise; None: nothing does. Raises PicError."""
    worst = [part for part in differences(model, file) if not part.is_noise(model.dtype)]
    if not worst:
        return None
    first = max(worst, key=lambda part: part.l2)
    return (
        f"{file.name}: {first.part} differs by {first.l2:.2%} (scale {first.scale:+.2%}) from what its tokens give, "
        f"which is no noise of {model.dtype}"
    )


def differences(model: Model, file: ObjectFile) -> list[Difference]:
    """The difference of each layer's parts, and of each linear layer's states. Raises PicError."""
    meta, tokens = file.meta, tuple(int(token) for token in file.tokens())
    chunk, options = Chunk("", tokens, file.name), CompileOptions(meta.sinks, meta.codec, cut=meta.cut)
    (again,) = compute_chunks(model, {meta.key: chunk}, options)
    names, codec, found = [part.name for part in meta.target.geometry.parts], codecs()[meta.codec], list[Difference]()
    for index, parts in enumerate(again.layers):
        if meta.codec != "none":  # as it would have been stored
            data = memoryview(bytearray(meta.shape.num_bytes))
            codec.decode(memoryview(codec.encode(parts[0], parts[1], meta.shape)), meta.shape, data)
            parts = meta.shape.split(data)
        pairs = zip(names, file.layer(index), parts, strict=True)
        found += [_difference(f"layer {index}'s {name}", own, other, meta.target.dtype) for name, own, other in pairs]
    for index, states in enumerate(again.states):
        for (name, own), other in zip(file.states(index).items(), states, strict=True):
            found.append(_difference(f"state {index}'s {name}", own, other, meta.state_dtype(name)))
    return found


def _difference(part: str, stored: Buffer, computed: Buffer, dtype: str) -> Difference:
    own, other = _numbers(stored, dtype), _numbers(computed, dtype)
    size = float(other @ other)
    if not size:
        return Difference(part, float(bool(own.any())), 0.0)
    off = own - other
    return Difference(part, math.sqrt(float(off @ off) / size), float(off @ other) / size)


def _numbers(data: Buffer, dtype: str) -> np.ndarray:
    """The numbers of a part, float64."""
    import ml_dtypes
    import numpy as np

    kind = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}[dtype]
    return np.frombuffer(data, dtype=kind).astype(np.float64)


def _writer(store: Store, file: ObjectFile) -> str:
    """Who signed an object, as far as this store's signers tell."""
    signers = None if store.trust is None else store.trust.signers
    return (signers and signers.signer_of(Signed.of_object(file), read_sidecar(file.path))) or NOBODY


def require_right(result: Recomputed, store: Store) -> None:
    """Raises ObjectError if an object differed."""
    if result.problems:
        raise ObjectError(
            f"{store.root}: {len(result.problems)} of {result.objects} recomputed objects are not what their tokens "
            "give; ask who wrote them, and compile their texts again"
        )
