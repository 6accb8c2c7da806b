"""What a compile would cost, before it runs: tokens, bytes of objects by codec, time by a short measurement, disk."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.compiler.compile import compute_chunks, object_key
from pictool.core import Chunk, CompileOptions
from pictool.store.codecs import codecs, require_codec
from pictool.store.codecs.base import LayerShape
from pictool.store.objects.format import CompiledChunk, encode_object
from pictool.store.store import Store

if TYPE_CHECKING:
    from pictool.runtime.model import Model

SHARE_OF_DISK = 0.1  # more of the free disk than this is warned of
_SAMPLES, _SAMPLE_TOKENS = 8, 2048  # that are compiled for the measurement at most


@dataclass(frozen=True)
class Forecast:
    """What a compile would cost.

    Fields:
        num_chunks, num_tokens: of all; `new_chunks`, `new_tokens`: of what the store lacks, each once.
        num_bytes: of the objects that would be written, by codec; measured on a few of them.
        codec: the one that would be used.
        seconds: of the computation, from the tokens per second of those few; without loading the model.
        free_bytes: of the disk that the store is on.
    """

    num_chunks: int
    num_tokens: int
    new_chunks: int
    new_tokens: int
    num_bytes: Mapping[str, int]
    codec: str
    seconds: float
    free_bytes: int

    @property
    def share_of_disk(self) -> float:
        """Of what is free, that the objects would take."""
        return self.num_bytes[self.codec] / max(self.free_bytes, 1)

    def report(self) -> dict[str, Any]:
        return {
            "chunks": self.num_chunks, "tokens": self.num_tokens, "new_chunks": self.new_chunks,
            "new_tokens": self.new_tokens, "bytes": dict(self.num_bytes), "codec": self.codec,
            "seconds": self.seconds, "free_bytes": self.free_bytes,
        }  # fmt: skip


def forecast(
    model: Model, store: Store, chunks: Sequence[Chunk], options: CompileOptions = CompileOptions()
) -> Forecast:
    """Forecast `compile_chunks`. Computes a few chunks of those that the store lacks, and writes nothing.

    Raises:
        InputError or ModelError, as `compile_chunks`.
    """
    missing = {key: chunk for chunk in chunks if not store.has(key := object_key(model, chunk, options))}
    sampled = _sample(missing)
    seconds_per_token, sizes = (
        _measure(model, sampled, options) if sampled else (0.0, dict.fromkeys(codecs(), (0.0, 0.0)))
    )
    tokens = sum(map(len, missing.values()))
    num_bytes = {codec: round(fixed * len(missing) + each * tokens) for codec, (fixed, each) in sizes.items()}
    return Forecast(
        len(chunks), sum(map(len, chunks)), len(missing), tokens, num_bytes, options.codec,
        seconds_per_token * tokens, free_bytes(store.root),
    )  # fmt: skip


def free_bytes(path: Path) -> int:
    """Of the disk that a path, which need not exist, is on."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def tokens_bytes(model: Model, num_tokens: int, codec: str) -> int:
    """About the bytes of objects of so many tokens, by the model's shape alone: as the codec keeps random numbers."""
    import numpy as np

    shape = LayerShape.of(model.geometry, 64, model.dtype)
    numbers = np.random.default_rng(0).standard_normal(2 * shape.count).astype(np.float32)
    data = numbers.tobytes() if shape.width == 4 else (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    key, value = shape.split(memoryview(data))
    coded = require_codec(codec).encode(key, value, shape)
    return len(coded) * model.geometry.layers * num_tokens // shape.tokens


def _sample(missing: Mapping[str, Chunk]) -> dict[str, Chunk]:
    """A few chunks of all lengths, the shortest first."""
    ordered = sorted(missing, key=lambda key: len(missing[key]))
    picked = ordered[:: max(1, len(ordered) // _SAMPLES)][:_SAMPLES]
    sampled, left = dict[str, Chunk](), _SAMPLE_TOKENS
    for key in picked:
        if sampled and len(missing[key]) > left:
            break
        sampled[key] = missing[key]
        left -= len(missing[key])
    return sampled


def _measure(
    model: Model, sampled: Mapping[str, Chunk], options: CompileOptions
) -> tuple[float, dict[str, tuple[float, float]]]:
    """Seconds per token; and for each codec the bytes of an object, and of each of its tokens."""
    list(compute_chunks(model, dict(list(sampled.items())[:1]), options))  # loads the model, and warms it up
    began = time.perf_counter()
    computed = list(compute_chunks(model, sampled, options))
    seconds = (time.perf_counter() - began) / sum(map(len, sampled.values()))
    return seconds, {codec: _line(codec, computed) for codec in codecs()}


def _line(codec: str, computed: Iterable[CompiledChunk]) -> tuple[float, float]:
    """Bytes = fixed + each · tokens of objects with this codec, by least squares."""
    import numpy as np

    sizes = [
        (chunk.meta.num_tokens, encode_object(replace(chunk, meta=replace(chunk.meta, codec=codec))).num_bytes)
        for chunk in computed
    ]
    tokens, num_bytes = np.array(sizes, dtype=float).T
    if len({*tokens}) < 2:
        return 0.0, float(num_bytes.mean() / tokens.mean())
    each, fixed = np.polyfit(tokens, num_bytes, 1)
    return float(fixed), float(each)
