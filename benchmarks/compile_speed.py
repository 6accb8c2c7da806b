"""Speed of compiling, against plain `transformers` prefill of the same chunks, and one chunk at a time.

    python -m benchmarks.compile_speed --out benchmarks/results

A random model of a shape; objects go to disk. Times are medians of interleaved repeats, ratios those of the repeats'
ratios; the raw ones are in the JSON. TTFT of links: `pic bench`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.output import write_results
from pictool import Chunk, Model, Store, compile
from pictool.bench.prompts import random_chunks
from pictool.bench.repeats import interleave, median_ratio
from pictool.bench.shapes import random_model
from pictool.fidelity.transformers_module import transformers_module
from pictool.runtime.architectures import cache_name


def compile_together(model: Model, chunks: Sequence[Chunk]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        compile(model, Store(directory), chunks)


def compile_one_by_one(model: Model, chunks: Sequence[Chunk]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for chunk in chunks:
            compile(model, Store(directory), [chunk])


def prefill(module: Any, chunks: Sequence[Chunk]) -> None:
    """The chunks one after another through transformers' own decoder, with a KV cache and no logits."""
    with torch.inference_mode():
        for chunk in chunks:
            cache = {cache_name(module.model): DynamicCache(config=module.config)}
            module.model(torch.tensor([chunk.tokens]), use_cache=True, **cache)


def seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def mixed_lengths() -> list[int]:
    """Lengths from 16 to 512, as many short as long ones on a logarithmic scale."""
    return [round(length) for length in np.geomspace(16, 512, 24)]


LENGTHS = {"8x512": [512] * 8, "64x64": [64] * 64, "mixed": mixed_lengths()}


def measure(model: Model, module: Any, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Compiling chunks of these lengths, from tokens to objects on disk, beside both baselines."""
    chunks = [chunk for seed, length in enumerate(lengths) for chunk in random_chunks(model, 1, length, seed)]
    runs = {
        "transformers": partial(prefill, module, chunks),
        "compile": partial(compile_together, model, chunks),
        "compile one by one": partial(compile_one_by_one, model, chunks),
    }
    raw = interleave({name: partial(seconds_of, run) for name, run in runs.items()}, repeats)
    return {
        "tokens": list(lengths), "median_s": {name: statistics.median(seconds) for name, seconds in raw.items()},
        "raw_s": raw,
        "speed_against_transformers": median_ratio(raw["transformers"], raw["compile"]),
        "speed_by_packing": median_ratio(raw["compile one by one"], raw["compile"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for compile_speed.json")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--only", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = random_model(options.shape, "cpu", "float32")
    module = transformers_module(model)
    results = {}
    for name in options.only:
        results[name] = result = measure(model, module, LENGTHS[name], options.repeats)
        against, packing = result["speed_against_transformers"], result["speed_by_packing"]
        print(f"{name}: {against:.2f}x transformers, {packing:.2f}x by packing")
    write_results(options.out / "compile_speed.json", {"shape": options.shape, **results})


if __name__ == "__main__":
    main()
