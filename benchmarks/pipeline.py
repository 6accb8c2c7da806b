"""Pipelined against sequential loading (CacheBlend §5), side by side in one run.

    python -m benchmarks.pipeline --out benchmarks/results

A random model of Qwen2.5-0.5B's shape in float32, 8 chunks × 512 tokens and a tail of 32. Sequential: every layer is
brought into the image, then every layer is computed; that gives the time of each alone. Pipelined: `link`, as users
run it. Objects come from disk with a cold page cache (POSIX_FADV_DONTNEED), and from a reader limited to a rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.link_speed import TAIL, TAIL_TOKENS, random_chunks, random_model
from pictool import Chunk, Layout, Model, Policy, Store, compile, link, load_model, make_policy
from pictool.linker.fusor import Fusor
from pictool.linker.loader import Loader, Placed
from pictool.linker.policies.base import Prompt
from pictool.runtime.image import Image
from pictool.runtime.machine import machine
from pictool.store.format import ObjectFile

RATES_MB_S = (None, 1000, 250)  # None: the disk itself, cold
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": ("naive", {}),
    "legolink-16": ("legolink", {"k": 16}),
    "cacheblend-15": ("cacheblend", {"ratio": 0.15}),
    "speccache-15": ("speccache", {"ratio": 0.15}),
}


@contextlib.contextmanager
def rate_limited(mb_s: float | None) -> Iterator[None]:
    """Reads of objects come no faster than this, all threads together; waiting costs no processor time."""
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


def drop_from_page_cache(store: Store) -> None:
    for key in store.keys():
        fd = os.open(store.path(key), os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def sequential(model: Model, store: Store, chunks: list[Chunk], tail: str, policy: Policy) -> dict[str, float]:
    """Seconds of bringing all layers, of choosing rows, and of computing them afterwards."""
    layout = Layout.of([], [chunk.tokens for chunk in chunks], model.encode(tail))
    prompt = Prompt(model, layout, ("", *(chunk.text for chunk in chunks), tail))
    started = time.perf_counter()
    image = Image(model.stack, layout)
    paths = [done.path for done in compile(model, store, chunks)]
    placed = [Placed(ObjectFile(path), start) for path, (start, _) in zip(paths, layout.chunks, strict=True)]
    with Loader(image, placed) as loader:
        for layer in range(model.stack.num_layers):
            loader.synchronize(layer)
        loaded = time.perf_counter()
        selection = policy.select(prompt)
        selected = time.perf_counter()
        fusor = Fusor(image, prompt, policy, selection)
        for layer in range(model.stack.num_layers):
            fusor.prefill_layer(layer)
        fusor.finish()
    return {"load_s": loaded - started, "select_s": selected - loaded, "recompute_s": time.perf_counter() - selected}


def save_speculative(directory: Path) -> str:
    """A random model of an eighth of the target's layers' size with the target's tokenizer, to score with."""
    config = LlamaConfig(
        vocab_size=1416, hidden_size=448, intermediate_size=2432, num_hidden_layers=12, num_attention_heads=7,
        num_key_value_heads=1, max_position_embeddings=32768, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    load_model("embedded").tokenizer.save_pretrained(directory)
    return str(directory)


def measure(
    model: Model, store: Store, chunks: list[Chunk], tail: str, rate: float | None, repeats: int, small: str
) -> dict[str, Any]:
    """Medians per policy at one rate: load alone, recompute alone, their sum, pipelined TTFT, and TTFT ÷ the larger."""
    results: dict[str, Any] = {}
    for name, (algo, fields) in POLICIES.items():
        policy, rounds = make_policy(algo, {**fields, **({"spec_model": small} if algo == "speccache" else {})}), []
        policy.prepare(model)
        for _ in range(repeats):
            with rate_limited(rate):
                drop_from_page_cache(store)
                apart = sequential(model, store, chunks, tail, policy)
                drop_from_page_cache(store)
                timing = link(model, store, chunks, tail, policy).timing
            rounds.append(
                {
                    **apart,
                    "ttft_s": timing.ttft_s,
                    "selecting_s": timing.select_s,
                    "waited_s": timing.load_s,
                    "fetch_s": timing.fetch_s,
                }
            )
        median = {field: statistics.median(one[field] for one in rounds) for field in rounds[0]}
        ratios = [one["ttft_s"] / max(one["load_s"], one["recompute_s"]) for one in rounds]
        share = statistics.median(one["selecting_s"] / one["ttft_s"] for one in rounds)
        results[name] = {
            "median": median, "ttft_by_larger": statistics.median(ratios), "selecting_share": share, "raw": rounds,
        }  # fmt: skip
        print(f"{rate or 'disk'} MB/s {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in median.items()) +
              f", TTFT / larger {results[name]['ttft_by_larger']:.2f}", file=sys.stderr, flush=True)  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for pipeline.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    model, _ = random_model()
    tail, chunks = model.tokenizer.decode(model.encode(TAIL * 2)[:TAIL_TOKENS]), random_chunks(8, 512, 0)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        small, store = save_speculative(Path(directory) / "small"), Store(Path(directory) / "store")
        compile(model, store, chunks)
        link(model, store, chunks, tail, make_policy("naive", {}))  # warm-up
        results: dict[str, Any] = {
            "command": f"python -m benchmarks.pipeline --out {arguments.out} --repeats {arguments.repeats}",
            "machine": machine(),
            "object_mb": sum(store.path(key).stat().st_size for key in store.keys()) / 1e6,
        }
        for rate in RATES_MB_S:
            name = f"{rate} MB/s" if rate else "disk, cold"
            results[name] = measure(model, store, chunks, tail, rate, arguments.repeats, small)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "pipeline.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
