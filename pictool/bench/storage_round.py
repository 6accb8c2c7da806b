"""One round of `pic bench storage`: objects of one size written, read and verified, beside plain files and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pictool.bench.disk import BLOCK, is_cached, read_direct, read_plain, write_plain
from pictool.controller.calibration import drop_page_cache
from pictool.core import Geometry, Target
from pictool.errors import InputError
from pictool.store.format import DTYPES, CompiledChunk, ObjectMeta, checksum
from pictool.store.store import Store

LLAMA_8B = Geometry(32, 8, 128)
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ObjectSize:
    """Objects of one size: `count` of them, of `tokens` tokens each."""

    tokens: int
    count: int = 8
    geometry: Geometry = LLAMA_8B
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        for name, value in (("tokens", self.tokens), ("objects", self.count), *vars(self.geometry).items()):
            if value < 1:
                raise InputError(f"{name} {value}: must be 1 or more")

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer of one object."""
        return 2 * self.geometry.kv_heads * self.tokens * self.geometry.head_dim * DTYPES[self.dtype][1]

    @property
    def kv_bytes(self) -> int:
        """K and V of one object."""
        return self.layer_bytes * self.geometry.layers


def size_of_mb(mb: float, count: int = 8, geometry: Geometry = LLAMA_8B, dtype: str = "bfloat16") -> ObjectSize:
    """Objects of so many 10^6 bytes of K and V, as near as whole tokens come."""
    if not 0 < mb < float("inf"):
        raise InputError(f"--mb {mb:g}: must be above 0")
    return ObjectSize(max(1, round(mb * 1e6 / ObjectSize(1, count, geometry, dtype).kv_bytes)), count, geometry, dtype)


@dataclass(frozen=True)
class Round:
    """Seconds by operation, each over all objects; bytes of an object file; whether cold reads were (None: unknown)."""

    seconds: Mapping[str, float]
    file_bytes: int
    is_cold: bool | None


@dataclass(frozen=True)
class _Files:
    """Objects in a store, and plain files of as many bytes of K and V."""

    size: ObjectSize
    store: Store
    keys: tuple[str, ...]
    plain: tuple[Path, ...]

    @property
    def objects(self) -> list[Path]:
        return [self.store.path(key) for key in self.keys]


def run_round(size: ObjectSize, root: Path, memory: Bytes, seed: int, number: int) -> Round:
    """Measure everything once in an empty directory. Of what is compared, another comes first in the next round."""
    seconds, files = _write(size, root, np.random.default_rng([seed, number]), bool(number % 2))
    is_cold = _forgets(files)
    buffer = memoryview(bytearray(size.layer_bytes))
    for operations in _readings(files, buffer, memory):
        names = list(operations)[:: -1 if number % 2 else 1]
        seconds |= {name: taken for name in names if (taken := operations[name]()) is not None}
    return Round(seconds, files.objects[0].stat().st_size, is_cold)


def _readings(files: _Files, buffer: memoryview, memory: Bytes) -> Iterator[Mapping[str, Callable[[], float | None]]]:
    """What is compared with each other, in the order in which it can be measured: cold reads leave the cache warm."""
    size, block = files.size, memoryview(bytearray(BLOCK))

    def cold(paths: Iterable[Path], read: Callable[[], object]) -> float:
        drop_page_cache(paths)
        return _timed(read)

    def direct() -> float | None:
        sizes: list[int | None] = []
        drop_page_cache(files.plain)
        taken = _timed(lambda: sizes.extend(read_direct(path) for path in files.plain))
        return None if None in sizes else taken

    yield {
        "read_cold": lambda: cold(files.objects, lambda: _read_objects(files, buffer)),
        "disk_cold": lambda: cold(files.plain, lambda: [read_plain(path, block) for path in files.plain]),
        "disk_direct": direct,
    }
    yield {
        "read_warm": lambda: _timed(lambda: _read_objects(files, buffer)),
        "copy": lambda: _timed(lambda: _copy(size, memory, np.frombuffer(buffer, dtype=np.uint8))),
    }
    yield {
        "verify": lambda: _timed(lambda: _verify(files)),
        "checksum": lambda: _timed(lambda: [checksum(piece.data) for piece in _pieces(size, memory)]),
    }


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _write(
    size: ObjectSize, root: Path, draw: np.random.Generator, is_swapped: bool
) -> tuple[dict[str, float], _Files]:
    """Seconds of writing objects and plain files in turn, less making their bytes; and what was written."""
    store, seconds, keys = Store(root / "store"), {"write": 0.0, "disk_write": 0.0}, []
    plain = tuple(root / f"{number}.bin" for number in range(size.count))
    for path in plain:
        data = memoryview(draw.bytes(size.kv_bytes))
        chunk = _object(size, data, draw)
        writers: dict[str, Callable[[], object]] = {
            "write": partial(store.put, chunk),
            "disk_write": partial(write_plain, path, data),
        }
        for name in list(writers)[:: -1 if is_swapped else 1]:
            seconds[name] += _timed(writers[name])
        keys.append(chunk.meta.key)
    return seconds, _Files(size, store, tuple(keys), plain)


def _object(size: ObjectSize, data: memoryview, draw: np.random.Generator) -> CompiledChunk:
    """An object of random tokens whose K and V are `data`."""
    tokens = draw.integers(0, 1 << 30, size.tokens, dtype=np.int32)
    target = Target("random", "0" * 64, "0" * 64, size.dtype, size.geometry)
    meta = ObjectMeta(target.key(tokens, 0, "none"), target, size.tokens, 0, "none")
    half = size.layer_bytes // 2
    starts = range(0, size.kv_bytes, size.layer_bytes)
    layers = [(data[at : at + half], data[at + half : at + 2 * half]) for at in starts]
    return CompiledChunk(meta, "", tokens, layers)


def _forgets(files: _Files) -> bool | None:
    """Whether the page cache drops files when it is asked to."""
    drop_page_cache([*files.objects, *files.plain])
    held = [is_cached(path) for path in (*files.objects, *files.plain)]
    return None if None in held else not any(held)


def _read_objects(files: _Files, buffer: memoryview) -> None:
    for key in files.keys:
        with files.store.open(key) as file:
            for layer in range(files.size.geometry.layers):
                file.layer(layer, into=buffer)


def _verify(files: _Files) -> None:
    for key in files.keys:
        with files.store.open(key) as file:
            file.verify()


def _copy(size: ObjectSize, memory: Bytes, buffer: Bytes) -> None:
    for piece in _pieces(size, memory):
        buffer[:] = piece


def _pieces(size: ObjectSize, memory: Bytes) -> Iterator[Bytes]:
    """As many bytes as the objects' K and V, a layer at a time, round and round through `memory`."""
    fit = len(memory) // size.layer_bytes
    for number in range(size.count * size.geometry.layers):
        start = number % fit * size.layer_bytes
        yield memory[start : start + size.layer_bytes]
