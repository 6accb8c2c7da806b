"""TTFT of linking against full recompute, compile speed against plain `transformers`, batching; in one run.

    python -m benchmarks.link_speed --out benchmarks/results

A random model of Qwen2.5-0.5B's shape in float32, objects on disk. Times are medians; the raw ones are in the JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from pictool import Chunk, Model, Store, compile, link, load_model, make_policy, wrap_model
from pictool.runtime.machine import machine

TAIL = "Question: Which festival does Gadwick hold, and on which river does it lie, as travellers wrote?\nAnswer:"
TAIL_TOKENS = 32


def random_model() -> tuple[Model, Any]:
    """Our model, and the same weights under plain transformers with its default (SDPA) attention."""
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, use_sliding_window=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    ours.load_state_dict(plain.state_dict())
    return wrap_model(ours, load_model("embedded").tokenizer, "random-qwen2.5-0.5b"), plain


def random_chunks(count: int, tokens: int, seed: int) -> list[Chunk]:
    draw = np.random.default_rng(seed).integers(3, 1400, (count, tokens))
    return [Chunk(f"chunk {i}", tuple(int(token) for token in row), "random") for i, row in enumerate(draw)]


def timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, interleaved so that a slow moment of the machine meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(timed(run))
            print(f"  {name}: {seconds[name][-1]:.3f} s", file=sys.stderr, flush=True)
    return seconds


def plain_prefill(module: Any, chunks: list[Chunk]) -> None:
    """The same chunks, one after another, through transformers' own decoder with a KV cache and no logits."""
    with torch.inference_mode():
        for chunk in chunks:
            module.model(
                torch.tensor([chunk.tokens]), past_key_values=DynamicCache(config=module.config), use_cache=True
            )


def link_times(model: Model, repeats: int) -> dict[str, Any]:
    """TTFT of full, naive and legolink-16 on 8 chunks × 512 tokens + a tail of 32, head empty, objects on disk.

    `speedup` is the median of the rounds' ratios: what runs side by side is compared, not moments of the machine.
    """
    tail = model.tokenizer.decode(model.encode(TAIL * 2)[:TAIL_TOKENS])
    assert len(model.encode(tail)) == TAIL_TOKENS
    chunks = random_chunks(8, 512, 0)
    policies = {
        "full": make_policy("full", {}),
        "naive": make_policy("naive", {}),
        "legolink-16": make_policy("legolink", {"k": 16}),
    }
    with tempfile.TemporaryDirectory() as directory:
        store = Store(directory)
        compile(model, store, chunks)
        link(model, store, chunks, tail, policies["naive"])  # warm-up
        results: dict[str, list[Any]] = {name: [] for name in policies}
        for _ in range(repeats):
            for name, policy in policies.items():
                linked = link(model, store, chunks, tail, policy)
                results[name].append(vars(linked.timing))
                rows, prompt = int(linked.rows[0].sum()), linked.image.layout.num_tokens
                print(f"  {name}: {linked.timing.ttft_s:.3f} s, {rows} of {prompt} rows", file=sys.stderr, flush=True)
                if name == "legolink-16":
                    floor = prompt / rows
    ttft = {name: statistics.median(one["ttft_s"] for one in runs) for name, runs in results.items()}
    rounds = {name: [full["ttft_s"] / one["ttft_s"] for full, one in zip(results["full"], runs, strict=True)]
              for name, runs in results.items()}  # fmt: skip
    speedup = {name: statistics.median(ratios) for name, ratios in rounds.items()}
    return {
        "prompt_tokens": prompt,
        "floor_legolink_16": floor,
        "median_ttft_s": ttft,
        "speedup": speedup,
        "raw": results,
    }


def compile_times(model: Model, plain: Any, count: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Compiling (tokens to objects on disk) against plain prefill of the same chunks, and against one by one."""
    chunks = random_chunks(count, tokens, 1)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as directory:
            compile(model, Store(directory), chunks)

    def one_by_one() -> None:
        with tempfile.TemporaryDirectory() as directory:
            for chunk in chunks:
                compile(model, Store(directory), [chunk])

    runs = {"transformers": lambda: plain_prefill(plain, chunks), "compile": ours, "compile one by one": one_by_one}
    raw = medians(runs, repeats)
    median = {name: statistics.median(seconds) for name, seconds in raw.items()}
    return {
        "chunks": count, "tokens_each": tokens, "median_s": median, "raw_s": raw,
        "speed_against_transformers": median["transformers"] / median["compile"],
        "speed_by_batching": median["compile one by one"] / median["compile"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for link_speed.json")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    model, plain = random_model()
    results: dict[str, Any] = {
        "command": f"python -m benchmarks.link_speed --out {arguments.out} --repeats {arguments.repeats}",
        "machine": machine(),
        "link_8x512": link_times(model, arguments.repeats),
        "compile_8x512": compile_times(model, plain, 8, 512, arguments.repeats),
        "compile_64x64": compile_times(model, plain, 64, 64, arguments.repeats),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "link_speed.json").write_text(json.dumps(results, indent=1) + "\n")
    print_summary(results)


def print_summary(results: dict[str, Any]) -> None:
    linked = results["link_8x512"]
    print(f"legolink-16 {linked['speedup']['legolink-16']:.1f}x (floor {linked['floor_legolink_16']:.1f}x)")
    for name in ("compile_8x512", "compile_64x64"):
        against, batching = results[name]["speed_against_transformers"], results[name]["speed_by_batching"]
        print(f"{name}: {against:.2f}x transformers, {batching:.2f}x by batching")


if __name__ == "__main__":
    main()
