"""Speed of compiling, against plain `transformers` prefill of the same chunks, and one chunk at a time.

    python -m benchmarks.compile_speed --out benchmarks/results

A random model of a shape; objects go to disk. Times are medians of interleaved repeats; the raw ones are in the JSON.
TTFT of links: `pic bench sync`.
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

import torch
from transformers import DynamicCache

from benchmarks.output import write_results
from pictool import Chunk, Model, Store, compile
from pictool.bench.prompts import random_chunks
from pictool.bench.repeats import interleave
from pictool.bench.shapes import random_model
from pictool.runtime.twin import transformers_module


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
            module.model(
                torch.tensor([chunk.tokens]), past_key_values=DynamicCache(config=module.config), use_cache=True
            )


def seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(model: Model, module: Any, count: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Compiling `count` chunks, from tokens to objects on disk, beside both baselines."""
    chunks = random_chunks(model, count, tokens)
    runs = {
        "transformers": partial(prefill, module, chunks),
        "compile": partial(compile_together, model, chunks),
        "compile one by one": partial(compile_one_by_one, model, chunks),
    }
    raw = interleave({name: partial(seconds_of, run) for name, run in runs.items()}, repeats)
    median = {name: statistics.median(seconds) for name, seconds in raw.items()}
    return {
        "chunks": count, "tokens_each": tokens, "median_s": median, "raw_s": raw,
        "speed_against_transformers": median["transformers"] / median["compile"],
        "speed_by_batching": median["compile one by one"] / median["compile"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for compile_speed.json")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    model = random_model(options.shape, "cpu", "float32")
    module = transformers_module(model)
    results = {
        f"compile_{count}x{tokens}": measure(model, module, count, tokens, options.repeats)
        for count, tokens in ((8, 512), (64, 64))
    }
    write_results(options.out / "compile_speed.json", {"shape": options.shape, **results})
    for name, result in results.items():
        against, batching = result["speed_against_transformers"], result["speed_by_batching"]
        print(f"{name}: {against:.2f}x transformers, {batching:.2f}x by batching")


if __name__ == "__main__":
    main()
