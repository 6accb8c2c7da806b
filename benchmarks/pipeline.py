"""Pipelined against sequential loading (CacheBlend §5), side by side.

    python -m benchmarks.pipeline --out benchmarks/results

A random model of a shape, and a random prompt. Sequential: every layer is loaded into the image, then every layer is
computed; that gives the time of each alone. Pipelined: `link`, as users run it. Objects are read from disk with a cold
page cache, and by a reader that is limited to a rate.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.output import write_results
from pictool import Layout, Model, Policy
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt, with_speculative
from pictool.bench.repeats import interleave, median_ratio
from pictool.bench.shapes import random_model, save_speculative
from pictool.bench.single_request import link_prompt
from pictool.compiler.compile import object_key
from pictool.controller.profile import drop_page_cache
from pictool.linker.fusor import Fusor, always_computed
from pictool.linker.grid import parse_grid
from pictool.linker.loader import Loader, Loads, PlacedObject
from pictool.linker.narrowing import Narrowing
from pictool.linker.policies.base import Prompt
from pictool.runtime.memory.image import Image
from pictool.store.objects.format import ObjectFile

RATES_MB_S = (None, 1000, 250)  # None: the disk itself, cold
POLICIES = ("naive", "legolink-16", "cacheblend-15", "speccache-15")


@contextlib.contextmanager
def rate_limited(mb_s: float | None) -> Iterator[None]:
    """Limit the rate at which objects are read, by all threads together; waiting costs no processor time."""
    if mb_s is None:
        yield
        return
    read, lock, free = ObjectFile._read, threading.Lock(), time.perf_counter()

    def limited(file: ObjectFile, offset: int, count: int, into: memoryview | None = None) -> memoryview:
        nonlocal free
        with lock:
            free = max(free, time.perf_counter()) + count / (mb_s * 1e6)
            until = free
        data = read(file, offset, count, into)
        time.sleep(max(0.0, until - time.perf_counter()))
        return data

    with mock.patch.object(ObjectFile, "_read", limited):
        yield


def link_sequentially(model: Model, bench_prompt: BenchPrompt, policy: Policy) -> dict[str, float]:
    """Seconds of loading all layers, of selecting rows, and of computing them afterwards."""
    store, chunks, tail = bench_prompt.store, bench_prompt.chunks, bench_prompt.tail
    layout = Layout.of([], [chunk.tokens for chunk in chunks], model.encode(tail))
    prompt = Prompt(model, layout, ("", *(chunk.text for chunk in chunks), tail))
    drop_page_cache(store.path(key) for key in store.keys())
    started = time.perf_counter()
    with ExitStack() as opened:
        image = Image(model.stack, layout)
        files = [opened.enter_context(store.open(object_key(model, chunk))) for chunk in chunks]
        placed = [PlacedObject(file, start) for file, (start, _) in zip(files, layout.chunks, strict=True)]
        loader = opened.enter_context(Loader(Loads(image, placed)))
        for layer in range(model.stack.num_layers):
            loader.synchronize(layer)
        loaded = time.perf_counter()
        selection = policy.select(prompt)
        selected = time.perf_counter()
        fusor = Fusor(image, Narrowing(prompt, policy, selection, always_computed(prompt, None)))
        for layer in range(model.stack.num_layers):
            fusor.prefill_layer(layer)
        fusor.finish()
    return {"load_s": loaded - started, "select_s": selected - loaded, "recompute_s": time.perf_counter() - selected}


def measure_once(model: Model, prompt: BenchPrompt, policy: Policy, rate: float | None) -> dict[str, float]:
    """Both ways at one rate."""
    policy.prepare(model)
    with rate_limited(rate):
        apart = link_sequentially(model, prompt, policy)
        timing = link_prompt(model, prompt, policy, is_cold=True).timing
    waiting = {"selecting_s": timing.select_s, "waited_s": timing.load_s, "fetch_s": timing.fetch_s}
    return {**apart, "ttft_s": timing.ttft_s, **waiting}


def summarise(raw: list[dict[str, float]]) -> dict[str, Any]:
    """Medians: of the fields, of TTFT by the larger of loading and computing alone, and of the share of selecting."""
    ttft = [repeat["ttft_s"] for repeat in raw]
    return {
        "median": {field: statistics.median(repeat[field] for repeat in raw) for field in raw[0]},
        "ttft_by_larger": median_ratio(ttft, [max(repeat["load_s"], repeat["recompute_s"]) for repeat in raw]),
        "selecting_share": median_ratio([repeat["selecting_s"] for repeat in raw], ttft),
        "raw": raw,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for pipeline.json")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    model = random_model(options.shape, "cpu", "float32")
    with tempfile.TemporaryDirectory(dir=".") as directory:
        small = save_speculative(options.shape, f"{directory}/speculative")
        policies = with_speculative(parse_grid(POLICIES), small)
        shape = PromptOptions(options.chunks, options.chunk_tokens)
        prompt = make_prompt(model, policies, shape, Path(directory))
        object_bytes = sum(prompt.store.path(key).stat().st_size for key in prompt.store.keys())
        results: dict[str, Any] = {"shape": options.shape, "object_mb": object_bytes / 1e6}
        for rate in RATES_MB_S:
            runs = {each.label: partial(measure_once, model, prompt, each.policy, rate) for each in policies}
            raw = interleave(runs, options.repeats)
            by_label = {label: summarise(each) for label, each in raw.items()}
            results[f"{rate} MB/s" if rate else "disk, cold"] = by_label
            for label, result in by_label.items():
                print(f"{rate or 'disk'} MB/s {label}: TTFT / larger {result['ttft_by_larger']:.2f}", flush=True)
    write_results(options.out / "pipeline.json", results)


if __name__ == "__main__":
    main()
