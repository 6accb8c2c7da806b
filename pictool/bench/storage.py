"""How fast objects are written, read and verified, beside what the disk, memory and the checksum do by themselves.

Objects of random bytes go through the store as compiled ones do. In the same repeat plain files of as many bytes are
written and read, and memory is copied and checksummed in pieces of a layer's size:

| of objects | compared with |
|---|---|
| `write`: put, with fsync of file and directory | `disk_write`: a plain file and fsync |
| `read_cold`: opened, then read and checked layer by layer, as the loader does | `disk_cold` or `disk_direct` |
| `read_warm`: the same from the page cache | `copy`: memory to a buffer of a layer's size |
| `verify`: everything read and checked, warm | `checksum`: BLAKE3 over memory |

The disk's reading is that past the page cache (`disk_direct`) where that is possible and faster.

An object is checksummed whenever it is written or read. `expected` is the rate that follows from the parts: transfer
and checksum one after the other; a cold read is read ahead by the system meanwhile, so it takes the longer of disk and
processor. Cold is as far as this system can drop its caches; what a controller or a host below it holds stays.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.bench.disk_io import BLOCK, is_cached, read_direct, read_file, temporary_directory, write_file
from pictool.bench.repeats import median_ratio, rotated
from pictool.controller.measuring import drop_page_cache
from pictool.core import Geometry, Target
from pictool.errors import InputError
from pictool.store.objects.format import DTYPES, CompiledChunk, ObjectMeta, checksum
from pictool.store.store import Store

LLAMA_8B = Geometry(32, 8, 128)
MEMORY_BYTES = 1 << 28  # more than a processor's caches hold
COMPARED_WITH = {"write": "disk_write", "read_cold": "disk_cold", "read_warm": "copy", "verify": "checksum"}


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
        for name, value in (("tokens", self.tokens), ("objects", self.count), *self._sizes()):
            if value < 1:
                raise InputError(f"{name} {value}: must be 1 or more")

    @property
    def layer_bytes(self) -> int:
        """K and V of one layer of one object."""
        return self.geometry.width * self.tokens * DTYPES[self.dtype][1]

    def _sizes(self) -> Iterator[tuple[str, int]]:
        """The sizes of the geometry, by name."""
        yield from ((name, value) for name, value in self.geometry.fields.items() if name != "parts")
        yield from ((part.name, size) for part in self.geometry.others for size in (part.heads, part.width))

    @property
    def kv_bytes(self) -> int:
        """K and V of one object."""
        return self.layer_bytes * self.geometry.layers


def size_of_mb(mb: float, count: int = 8, geometry: Geometry = LLAMA_8B, dtype: str = "bfloat16") -> ObjectSize:
    """Objects of about `mb` · 10^6 bytes of K and V: of whole tokens."""
    if not 0 < mb < float("inf"):
        raise InputError(f"--mb {mb:g}: must be above 0")
    return ObjectSize(max(1, round(mb * 1e6 / ObjectSize(1, count, geometry, dtype).kv_bytes)), count, geometry, dtype)


@dataclass(frozen=True)
class StorageResult:
    """The measurements of one size.

    Fields:
        file_bytes: of one object file.
        is_cold: whether the page cache dropped the files when it was asked to; None: unknown.
        seconds: of each repeat over all objects, by operation.
    """

    size: ObjectSize
    file_bytes: int
    is_cold: bool | None
    seconds: Mapping[str, Sequence[float]]

    def rates(self, name: str) -> list[float]:
        """GB of K and V (10^9 bytes) per second in every repeat."""
        return [self.size.count * self.size.kv_bytes / seconds / 1e9 for seconds in self.seconds[name]]

    def compared_rates(self, name: str) -> list[float]:
        """The rates of what an operation is compared with."""
        rates = self.rates(COMPARED_WITH[name])
        if name == "read_cold" and "disk_direct" in self.seconds:
            return [max(pair) for pair in zip(rates, self.rates("disk_direct"), strict=True)]
        return rates

    def expected_rates(self, name: str) -> list[float]:
        """The rates that follow from those of the disk, memory and the checksum."""
        moving = self.rates("disk_write" if name == "write" else "copy")
        rates = [1 / (1 / moved + 1 / hashed) for moved, hashed in zip(moving, self.rates("checksum"), strict=True)]
        if name == "read_cold":
            return [min(pair) for pair in zip(rates, self.compared_rates(name), strict=True)]
        return rates

    def share(self, name: str, of: Sequence[float]) -> float:
        """The rate of an operation as a share of other rates: the median of the repeats' ratios."""
        return median_ratio(self.rates(name), of)

    def report(self) -> dict[str, Any]:
        size = self.size
        return {
            "tokens": size.tokens, "objects": size.count, "geometry": size.geometry.fields, "dtype": size.dtype,
            "kv_bytes": size.kv_bytes, "file_bytes": self.file_bytes, "is_cold": self.is_cold,
            "operations": {name: self._operation(name) for name in COMPARED_WITH},
            "median_gb_s": {name: statistics.median(self.rates(name)) for name in self.seconds},
            "raw_s": {name: list(seconds) for name, seconds in self.seconds.items()},
        }  # fmt: skip

    def _operation(self, name: str) -> dict[str, Any]:
        rates, compared, expected = self.rates(name), self.compared_rates(name), self.expected_rates(name)
        return {
            "gb_s": statistics.median(rates), "gb_s_range": [min(rates), max(rates)],
            "own": COMPARED_WITH[name], "own_gb_s": statistics.median(compared), "of_own": self.share(name, compared),
            "expected_gb_s": statistics.median(expected), "of_expected": self.share(name, expected),
        }  # fmt: skip


def bench_storage(
    sizes: Sequence[ObjectSize], parent: str | Path = ".", repeats: int = 5, seed: int = 0,
    on_step: Callable[[], None] = lambda: None, memory_bytes: int = MEMORY_BYTES,
) -> list[StorageResult]:  # fmt: skip
    """Measure in a directory inside `parent`; the repeats of all sizes are interleaved.

    Args:
        on_step: called after each size of each repeat.
        memory_bytes: how much memory is copied and checksummed, over and over.

    Raises:
        InputError: no room, or no such directory.
    """
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: must be 1 or more")
    memory = np.full(max(memory_bytes, *(size.layer_bytes for size in sizes)), 7, dtype=np.uint8)
    by_size: dict[ObjectSize, list[StorageRepeat]] = {size: [] for size in sizes}
    with temporary_directory(parent, max(map(bytes_needed, sizes))) as directory:
        for number in range(repeats):
            for size in rotated(sizes, number):
                with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as root:
                    by_size[size].append(run_repeat(size, Path(root), memory, seed, number))
                on_step()
    return [_result(size, done) for size, done in by_size.items()]


def bytes_needed(size: ObjectSize) -> int:
    """What a repeat takes on the disk: the objects, and plain files beside them."""
    header = 4096 + size.geometry.layers * 512 + 4 * size.tokens
    return size.count * (2 * size.kv_bytes + header)


def _result(size: ObjectSize, repeats: Sequence[StorageRepeat]) -> StorageResult:
    seconds = {name: [repeat.seconds[name] for repeat in repeats] for name in repeats[0].seconds}
    are_cold = [repeat.is_cold for repeat in repeats]
    return StorageResult(size, repeats[0].file_bytes, None if None in are_cold else all(are_cold), seconds)


@dataclass(frozen=True)
class StorageRepeat:
    """Seconds by operation over all objects, bytes of an object file, and whether cold reads were cold (or unknown)."""

    seconds: Mapping[str, float]
    file_bytes: int
    is_cold: bool | None


@dataclass(frozen=True)
class _Files:
    """Objects in a store, and plain files with as many bytes of K and V."""

    size: ObjectSize
    store: Store
    keys: tuple[str, ...]
    plain: tuple[Path, ...]

    @property
    def objects(self) -> list[Path]:
        return [self.store.path(key) for key in self.keys]


def run_repeat(size: ObjectSize, root: Path, memory: Bytes, seed: int, number: int) -> StorageRepeat:
    """Measure everything once in an empty directory. The next repeat measures what is compared in the other order."""
    seconds, files = _write(size, root, np.random.default_rng([seed, number]), bool(number % 2))
    is_cold = _can_drop(files)
    buffer = memoryview(bytearray(size.layer_bytes))
    for operations in _readings(files, buffer, memory):
        names = list(operations)[:: -1 if number % 2 else 1]
        seconds |= {name: taken for name in names if (taken := operations[name]()) is not None}
    return StorageRepeat(seconds, files.objects[0].stat().st_size, is_cold)


def _readings(files: _Files, buffer: memoryview, memory: Bytes) -> Iterator[Mapping[str, Callable[[], float | None]]]:
    """The operations that are compared with each other, by name; cold ones first, since they leave the cache warm."""
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
        "disk_cold": lambda: cold(files.plain, lambda: [read_file(path, block) for path in files.plain]),
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
    """Write objects and plain files in turn. Returns the seconds, without those of drawing bytes, and the files."""
    store, seconds, keys = Store(root / "store"), {"write": 0.0, "disk_write": 0.0}, []
    plain = tuple(root / f"{number}.bin" for number in range(size.count))
    for path in plain:
        data = _draw_numbers(size, draw)
        chunk = _object(size, data, draw)
        writers: dict[str, Callable[[], object]] = {
            "write": partial(store.put, chunk),
            "disk_write": partial(write_file, path, data),
        }
        for name in list(writers)[:: -1 if is_swapped else 1]:
            seconds[name] += _timed(writers[name])
        keys.append(chunk.meta.key)
    return seconds, _Files(size, store, tuple(keys), plain)


def _draw_numbers(size: ObjectSize, draw: np.random.Generator) -> memoryview:
    """Random bytes of K and V, but for one bit of every number: its exponent is not that of inf and nan."""
    data = np.frombuffer(draw.bytes(size.kv_bytes), dtype=np.uint8).copy()
    width = DTYPES[size.dtype][1]
    data[width - 1 :: width] &= 0xBF  # the highest bit of the exponent, little endian
    return data.data


def _object(size: ObjectSize, data: memoryview, draw: np.random.Generator) -> CompiledChunk:
    """An object of random tokens whose K and V are `data`."""
    tokens = draw.integers(0, 1 << 30, size.tokens, dtype=np.int32)
    target = Target("random", "0" * 64, "0" * 64, size.dtype, size.geometry)
    meta = ObjectMeta(target.key(tokens, 0, "none"), target, size.tokens, 0, "none")
    starts = range(0, size.kv_bytes, size.layer_bytes)
    layers = [meta.shape.split(data[at : at + size.layer_bytes]) for at in starts]
    return CompiledChunk(meta, "", tokens, layers)


def _can_drop(files: _Files) -> bool | None:
    """Whether the page cache drops files when it is asked to; None: unknown."""
    drop_page_cache([*files.objects, *files.plain])
    are_cached = [is_cached(path) for path in (*files.objects, *files.plain)]
    return None if None in are_cached else not any(are_cached)


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
    """As many bytes as the objects' K and V, a layer at a time, over and over from `memory`."""
    fit = len(memory) // size.layer_bytes
    for number in range(size.count * size.geometry.layers):
        start = number % fit * size.layer_bytes
        yield memory[start : start + size.layer_bytes]
