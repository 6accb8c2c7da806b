"""A store of 100,000 small objects: how long get, put, ls, gc and the index take; and reading large ones from disk.

    python -m benchmarks.store_scale --out benchmarks/results/store_scale.json

The objects are put without fsync to build the store, with it where put is timed. Reading: objects of 64 MB that are not
in the page cache, through `ObjectFile` (with checksums) against plain sequential reads of the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pictool.core import Geometry, Target
from pictool.store.format import CompiledChunk, ObjectFile, ObjectMeta
from pictool.store.index import INDEX_FILE
from pictool.store.store import Store
from pictool.store.upkeep import gc

PAGE = 50
_READ = 8 << 20


def small(seed: int) -> CompiledChunk:
    return chunk(seed, 16, Geometry(2, 2, 8))


def chunk(seed: int, tokens: int, geometry: Geometry) -> CompiledChunk:
    target = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "bfloat16", geometry)
    ids = np.random.default_rng(seed).integers(0, 30_000, tokens, dtype=np.int32)
    meta = ObjectMeta(target.key(ids, 0, "none"), target, tokens, 0, "none")
    part = np.random.default_rng(seed).bytes(meta.shape.num_bytes // 2)
    return CompiledChunk(meta, f"text {seed} " + "x" * 100, ids, [(part, part)] * geometry.layers)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def open_all(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.open(key).close()


def measure_many(store: Store, count: int) -> dict[str, Any]:
    with mock.patch("os.fsync"):
        build_s = timed(lambda: [store.put(small(seed)) for seed in range(count)])
    keys = store.keys()
    some = [keys[i] for i in np.random.default_rng(0).integers(0, len(keys), 1000)]
    one = store.path(keys[0]).stat().st_size
    found = {
        "objects": count,
        "object_bytes": one,
        "put_without_fsync_us": build_s / count * 1e6,
        "put_ms": timed(lambda: [store.put(small(count + seed)) for seed in range(200)]) / 200 * 1e3,
        "get_us": timed(lambda: open_all(store, some)) / len(some) * 1e6,
        "miss_us": timed(lambda: [store.has("0" * 60 + f"{i:04x}") for i in range(1000)]) / 1000 * 1e6,
        "resolve_us": timed(lambda: [store.resolve(key[:12]) for key in some]) / len(some) * 1e6,
        "ls_first_page_without_index_s": timed(lambda: list(islice(store.objects(), PAGE))),
        "ls_all_index_from_files_s": timed(lambda: list(store.objects())),
        "ls_first_page_s": timed(lambda: list(islice(store.objects(), PAGE))),
        "ls_all_s": timed(lambda: list(store.objects())),
        "index_mb": (store.root / INDEX_FILE).stat().st_size / 1e6,
        "gc_s": timed(lambda: gc(store)),
    }
    held = sum(store.path(key).stat().st_size for key in store.keys())
    found["gc_evicting_a_tenth_s"] = timed(lambda: gc(store, held * 9 // 10))
    full = Store(store.root, held * 9 // 10)
    with mock.patch("os.fsync"):
        full_s = timed(lambda: [full.put(small(2 * count + seed)) for seed in range(2000)])
    found["put_in_a_full_store_us"] = full_s / 2000 * 1e6
    return found


def drop(paths: Sequence[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_plain(paths: Sequence[Path]) -> None:
    buffer = bytearray(_READ)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_objects(paths: Sequence[Path]) -> None:
    for path in paths:
        with ObjectFile(path) as file:
            buffer = memoryview(bytearray(file.layer_bytes))
            for layer in range(file.meta.target.geometry.layers):
                file.layer(layer, into=buffer)


def measure_reading(store: Store, count: int, rounds: int) -> dict[str, Any]:
    paths = [store.put(chunk(seed, 512, Geometry(32, 8, 128))) for seed in range(count)]
    size = sum(path.stat().st_size for path in paths)
    rates: dict[str, list[float]] = {"plain": [], "objects": []}
    for _ in range(rounds):
        for name, work in (("plain", read_plain), ("objects", read_objects)):
            drop(paths)
            rates[name].append(size / timed(lambda work=work: work(paths)) / 1e9)  # type: ignore[misc]
    best = {name: max(found) for name, found in rates.items()}
    return {"object_mb": size / count / 1e6, "gb_s": best, "share": best["objects"] / best["plain"], "all": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = {"reading": measure_reading(Store(Path(directory) / "large"), given.large, given.rounds)}
        report["many"] = measure_many(Store(Path(directory) / "many"), given.count)
    print(json.dumps(report, indent=1))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
