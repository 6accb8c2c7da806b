"""A store of 100,000 small objects: how long get, put, ls, gc and the index take.

    python -m benchmarks.store_scale --out benchmarks/results/store_scale.json

The objects are put without fsync to build the store, with it where put is timed. Reading large objects from disk:
`benchmarks.storage`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pictool.core import Geometry, Target
from pictool.store.database import DATABASE
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.store.upkeep import gc

PAGE = 50
TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "bfloat16", Geometry(2, 2, 8))


def make_object(seed: int) -> CompiledChunk:
    tokens = np.random.default_rng(seed).integers(0, 30_000, 16, dtype=np.int32)
    meta = ObjectMeta(TARGET.key(tokens, "none"), TARGET, len(tokens), "none")
    half = np.random.default_rng(seed).bytes(meta.shape.num_bytes // 2)
    return CompiledChunk(meta, f"text {seed} " + "x" * 100, tokens, [(half, half)] * TARGET.geometry.layers)


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def put_all(store: Store, first: int, count: int) -> None:
    for seed in range(first, first + count):
        store.put(make_object(seed))


def open_all(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        store.open(key).close()


def measure(store: Store, count: int) -> dict[str, Any]:
    with mock.patch("os.fsync"):
        build_s = seconds_of(lambda: put_all(store, 0, count))
    keys = store.keys()
    some = [keys[i] for i in np.random.default_rng(0).integers(0, len(keys), 1000)]
    report = {
        "objects": count,
        "object_bytes": store.path(keys[0]).stat().st_size,
        "put_without_fsync_us": build_s / count * 1e6,
        "put_ms": seconds_of(lambda: put_all(store, count, 200)) / 200 * 1e3,
        "get_us": seconds_of(lambda: open_all(store, some)) / len(some) * 1e6,
        "miss_us": seconds_of(lambda: [store.has("0" * 60 + f"{i:04x}") for i in range(1000)]) / 1000 * 1e6,
        "resolve_us": seconds_of(lambda: [store.resolve(key[:12]) for key in some]) / len(some) * 1e6,
        "ls_first_page_without_index_s": seconds_of(lambda: list(islice(store.objects(), PAGE))),
        "ls_all_index_from_files_s": seconds_of(lambda: list(store.objects())),
        "ls_first_page_s": seconds_of(lambda: list(islice(store.objects(), PAGE))),
        "ls_all_s": seconds_of(lambda: list(store.objects())),
        "index_mb": (store.root / DATABASE).stat().st_size / 1e6,
        "gc_s": seconds_of(lambda: gc(store)),
    }
    num_bytes = sum(store.path(key).stat().st_size for key in store.keys())
    report["gc_evicting_a_tenth_s"] = seconds_of(lambda: gc(store, num_bytes * 9 // 10))
    full = Store(store.root, num_bytes * 9 // 10)
    with mock.patch("os.fsync"):
        report["put_in_a_full_store_us"] = seconds_of(lambda: put_all(full, 2 * count, 2000)) / 2000 * 1e6
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = {"many": measure(Store(Path(directory) / "many"), options.count)}
    print(json.dumps(report, indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
