"""Honest objects computed again: the noise of packs, threads, dtypes and processor flags; and planted ones, found.

    python -m benchmarks.recompute --objects 1008 --out benchmarks/results/recompute.json

Objects of the embedded small model are compiled in processes with other processor flags (`FLAGS`), each dtype, with one
thread and two, alone and in packs; then all are computed again here, alone, with this process's own flags. A planted
object is an honest one, of which one layer's values are 1 % larger, with checksums that hold.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write_results
from pictool import Chunk, Model, Store, load_model
from pictool.compiler.compile import compile_chunks, compute_chunks
from pictool.compiler.recompute import LIMITS, choose, differences, find_difference
from pictool.core import CompileOptions
from pictool.store.objects.format import CompiledChunk
from pictool.world.generate import PageShape, write_prompt

MODEL = "embedded-small"
FLAGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
WAYS = [(threads, alone) for threads in (1, 2) for alone in (False, True)]


def chunks_of(model: Model, name: str, count: int) -> list[Chunk]:
    """Different chunks of pages, of 16 to 300 tokens."""
    draw, found = random.Random(name), list[Chunk]()
    while len(found) < count:
        for page in write_prompt(draw, 8, PageShape()).pages:
            tokens = model.encode(page)
            length = min(len(tokens), draw.randint(16, 300))
            found.append(Chunk(page, tuple(tokens[:length]), name))
    return found[:count]


def write_objects(root: Path, flags: str, count: int) -> None:
    """Compile `count` objects in every way of every dtype, each way to a store of its own."""
    for dtype in LIMITS:
        model = load_model(MODEL, "cpu", dtype)
        for threads, alone in WAYS:
            torch.set_num_threads(threads)
            chunks = chunks_of(model, f"{flags} {dtype} {threads} {alone}", count)
            compile_chunks(model, Store(root / dtype / f"{threads}-{alone}"), chunks, alone=alone)


def compare(root: Path, flags: str) -> list[dict[str, Any]]:
    """Compute all again: a row for each way, with the largest differences."""
    rows, torch_threads = [], torch.get_num_threads()
    for dtype in LIMITS:
        model = load_model(MODEL, "cpu", dtype)
        for threads, alone in WAYS:
            store, found, alarms = Store(root / dtype / f"{threads}-{alone}"), [], 0
            for key in store.keys():
                with store.peek(key) as file:
                    parts = differences(model, file)
                found += parts
                alarms += not all(part.is_noise(dtype) for part in parts)
            rows.append({
                "flags": flags, "dtype": dtype, "threads": threads, "pack": "alone" if alone else "together",
                "objects": len(store.keys()), "alarms": alarms, "l2": max(part.l2 for part in found),
                "scale": max(abs(part.scale) for part in found), "threads_here": torch_threads,
            })  # fmt: skip
    return rows


def planted(chunk: CompiledChunk, layer: int, dtype: str) -> CompiledChunk:
    """A chunk whose values in one layer are 1 % larger."""
    import ml_dtypes

    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    layers = list(chunk.layers)
    values = np.frombuffer(layers[layer][1], dtype=kind).astype(np.float32) * 1.01
    layers[layer] = (layers[layer][0], values.astype(kind).tobytes())
    return replace(chunk, layers=layers)


def plant(root: Path, dtype: str, count: int, share: float) -> dict[str, Any]:
    """Of `count` planted objects among as many honest ones: how many a recompute of all, and of a share, finds."""
    model = load_model(MODEL, "cpu", dtype)
    store, draw, bad = Store(root / f"planted-{dtype}"), random.Random(dtype), set[str]()
    chunks = {model.key(c.tokens, 0, "none"): c for c in chunks_of(model, f"planted {dtype}", 2 * count)}
    for number, computed in enumerate(compute_chunks(model, chunks, CompileOptions())):
        if number % 2:
            bad.add(computed.meta.key)
            computed = planted(computed, draw.randrange(len(computed.layers)), dtype)
        store.put(computed, durable=False)
    found = set()
    for key in store.keys():
        with store.peek(key) as file:
            if find_difference(model, file) is not None:
                found.add(key)
    at_share = [len(bad & found & set(choose(store.keys(), share))) / len(bad) for _ in range(1000)]
    return {
        "dtype": dtype, "planted": len(bad), "found": len(found & bad), "honest": len(chunks) - len(bad),
        "alarms": len(found - bad), "share": share, 
        "found_at_share": sum(at_share) / len(at_share),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1008)
    parser.add_argument("--planted", type=int, default=50, help="of each dtype")
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", nargs=2, metavar=("DIR", "FLAGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    each = -(-options.objects // (len(FLAGS) * len(LIMITS) * len(WAYS)))
    if options.write:
        write_objects(Path(options.write[0]), options.write[1], each)
        return
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for flags, variables in FLAGS.items():
            place = Path(root, flags.replace(" ", "-"))
            command = [sys.executable, "-m", "benchmarks.recompute", "--objects", str(options.objects)]
            subprocess.run([*command, "--write", str(place), flags], env=os.environ | variables, check=True)
            rows += compare(place, flags)
        found = [plant(Path(root), dtype, options.planted, options.share) for dtype in LIMITS]
    most = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for row in rows:
        most[row["dtype"]] = [max(most[row["dtype"]][0], row["l2"]), max(most[row["dtype"]][1], row["scale"])]
    results = {
        "objects": sum(row["objects"] for row in rows), "alarms": sum(row["alarms"] for row in rows),
        "limits": LIMITS, "most": most, "planted": found, "rows": rows,
    }  # fmt: skip
    for name in ("objects", "alarms", "most", "planted"):
        print(name, results[name])
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
