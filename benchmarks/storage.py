"""How fast objects are written, read and verified, beside what the disk, memory and the checksum do by themselves.

    python -m benchmarks.storage --repeats 4 --out benchmarks/results/bench_storage.json

Objects of random bytes go through the store as compiled ones do. In the same repeat plain files of as many bytes are
written and read, and memory is copied and checksummed in pieces of a layer's size:

| of objects | compared with |
|---|---|
| `write`: put, with fsync of file and directory | `disk_write`: a plain file and fsync |
| `read_cold`: opened, then read and checked layer by layer, as the loader does | `disk_cold` or `disk_direct` |
| `read_warm`: the same from the page cache | `copy`: memory to a buffer of a layer's size |
| `verify`: everything read and checked, warm | `checksum`: BLAKE3 over memory |

The disk's reading is that past the page cache (`disk_direct`) where that is possible and faster. Cold is as far as this
system can drop its caches; what a controller or a host below it holds stays.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.output import write_results
from pictool.bench.repeats import median_ratio
from pictool.bench.shapes import shape_of
from pictool.controller.profile import drop_page_cache
from pictool.core import Geometry, Target
from pictool.runtime.architectures import geometry_of
from pictool.store.objects.format import CompiledChunk, ObjectMeta, checksum
from pictool.store.store import Store

MEMORY_BYTES = 1 << 28  # more than a processor's caches hold
BLOCK = 8 << 20  # bytes of one read
DTYPE = "bfloat16"
COMPARED_WITH = {"write": "disk_write", "read_cold": "disk_cold", "read_warm": "copy", "verify": "checksum"}
Bytes = NDArray[np.uint8]
Seconds = dict[str, float]


def measure(geometry: Geometry, tokens: int, count: int, memory: Bytes, draw: np.random.Generator) -> Seconds:
    """The seconds of every operation over `count` objects of `tokens` tokens."""
    layer_bytes = geometry.width * tokens * 2
    buffer, block = memoryview(bytearray(layer_bytes)), memoryview(bytearray(BLOCK))
    with tempfile.TemporaryDirectory(dir=".", prefix=".pic-bench-") as root:
        store, plain, keys = Store(f"{root}/store"), [Path(root, f"{number}.bin") for number in range(count)], []
        seconds = {"write": 0.0, "disk_write": 0.0}
        for path in plain:
            data = draw_numbers(layer_bytes * geometry.layers, draw)
            chunk = make_object(geometry, tokens, data, draw)
            seconds["write"] += timed(partial(store.put, chunk))
            seconds["disk_write"] += timed(partial(write_file, path, data))
            keys.append(chunk.meta.key)
        objects, pieces = [store.path(key) for key in keys], partial(memory_pieces, memory, layer_bytes)
        number = count * geometry.layers
        operations: Mapping[str, tuple[Sequence[Path], Callable[[], object]]] = {
            "read_cold": (objects, lambda: read_objects(store, keys, buffer)),
            "disk_cold": (plain, lambda: read_files(plain, block, os.O_RDONLY)),
            "disk_direct": (plain, lambda: read_direct(plain)),
            "read_warm": ((), lambda: read_objects(store, keys, buffer)),
            "copy": ((), lambda: [buffer.__setitem__(slice(None), piece.data) for piece in pieces(number)]),
            "verify": ((), lambda: verify_objects(store, keys)),
            "checksum": ((), lambda: [checksum(piece.data) for piece in pieces(number)]),
        }
        for name, (cold, run) in operations.items():
            drop_page_cache(cold)
            seconds[name] = timed(run)
    return seconds


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def draw_numbers(num_bytes: int, draw: np.random.Generator) -> memoryview:
    """Random bytes of K and V, but for one bit of every number: its exponent is not that of inf and nan."""
    data = np.frombuffer(draw.bytes(num_bytes), dtype=np.uint8).copy()
    data[1::2] &= 0xBF  # the highest bit of the exponent, little endian
    return data.data


def make_object(geometry: Geometry, count: int, data: memoryview, draw: np.random.Generator) -> CompiledChunk:
    """An object of random tokens whose K and V are `data`."""
    tokens = draw.integers(0, 1 << 30, count, dtype=np.int32)
    target = Target("random", "0" * 64, "0" * 64, DTYPE, geometry)
    meta = ObjectMeta(target.key(tokens, "none"), target, count, "none")
    size = len(data) // geometry.layers
    layers = [meta.shape.split(data[at : at + size]) for at in range(0, len(data), size)]
    return CompiledChunk(meta, "", tokens, layers)


def write_file(path: Path, data: memoryview) -> None:
    """Write a file and wait until its data are on the device."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_files(paths: Iterable[Path], buffer: memoryview, flags: int) -> None:
    """Read whole files in blocks, each into the same memory."""
    for path in paths:
        fd, offset = os.open(path, flags), 0
        try:
            while got := os.preadv(fd, [buffer], offset):
                offset += got
        finally:
            os.close(fd)


def read_direct(paths: Iterable[Path]) -> None:
    """Read whole files past the page cache."""
    with mmap.mmap(-1, BLOCK) as pages, memoryview(pages) as buffer:  # aligned, as O_DIRECT needs it
        read_files(paths, buffer, os.O_RDONLY | os.O_DIRECT)


def read_objects(store: Store, keys: Iterable[str], buffer: memoryview) -> None:
    for key in keys:
        with store.open(key) as file:
            for layer in range(file.meta.target.geometry.layers):
                file.layer(layer, into=buffer)


def verify_objects(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        with store.open(key) as file:
            file.verify()


def memory_pieces(memory: Bytes, size: int, number: int) -> Iterator[Bytes]:
    """So many pieces of `size` bytes, over and over from `memory`."""
    for start in range(number):
        at = start % (len(memory) // size) * size
        yield memory[at : at + size]


def report(num_bytes: int, repeats: Sequence[Seconds]) -> dict[str, Any]:
    """GB of K and V (10^9 bytes) per second of every operation, and its share of what it is compared with."""
    rates = {name: [num_bytes / seconds[name] / 1e9 for seconds in repeats] for name in repeats[0]}
    own = {name: rates[compared] for name, compared in COMPARED_WITH.items()}
    own["read_cold"] = [max(pair) for pair in zip(rates["disk_cold"], rates["disk_direct"], strict=True)]
    return {
        "kv_bytes": num_bytes,
        "median_gb_s": {name: statistics.median(values) for name, values in rates.items()},
        "of_own": {name: median_ratio(rates[name], own[name]) for name in COMPARED_WITH},
        "raw_s": list(repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--mb", type=float, nargs="+", default=[1.0, 16.0, 128.0], help="sizes of objects")
    parser.add_argument("--objects", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bench_storage.json"))
    options = parser.parse_args()
    geometry = geometry_of(shape_of(options.shape).make_config())
    token_bytes = geometry.layers * geometry.width * 2
    sizes = {mb: max(1, round(mb * 1e6 / token_bytes)) for mb in options.mb}
    memory = np.full(max(MEMORY_BYTES, *(tokens * token_bytes for tokens in sizes.values())), 7, dtype=np.uint8)
    repeats: dict[float, list[Seconds]] = {mb: [] for mb in sizes}
    for number in range(options.repeats):
        for mb, tokens in sizes.items():
            print(f"repeat {number + 1}, {options.objects} objects of {mb:g} MB", file=sys.stderr)
            repeats[mb].append(measure(geometry, tokens, options.objects, memory, np.random.default_rng(number)))
    results = {
        f"{mb:g} MB": report(options.objects * tokens * token_bytes, repeats[mb]) for mb, tokens in sizes.items()
    }
    write_results(options.out, {"shape": options.shape, "objects": options.objects, **results})


if __name__ == "__main__":
    main()
