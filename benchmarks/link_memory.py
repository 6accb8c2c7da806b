"""Peak memory of a link over N, each in a process of its own: it must grow like N, with no N×N mask.

    python -m benchmarks.link_memory --out benchmarks/results

A tiny random model (2 layers, hidden 64), chunks of 512 tokens. What is reported is the growth of the peak resident
set over that of a process that has done everything but link (model loaded, objects compiled).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.link_speed import random_chunks
from pictool import Model, Store, compile, link, load_model, make_policy, wrap_model
from pictool.runtime.machine import machine

LENGTHS = (1024, 4096, 16384)
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("full", {}),
    ("naive", {}),
    ("legolink", {"k": 16}),
    ("legolink", {"k": 128}),
)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tiny_model() -> Model:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1416, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return wrap_model(AutoModelForCausalLM.from_config(config), load_model("embedded").tokenizer)


def prepare(length: int, store: str) -> None:
    compile(tiny_model(), Store(store), random_chunks(length // 512, 512, 0))


def measure(length: int, policy: str, fields: dict[str, Any], store: str) -> int:
    """Bytes by which linking raises this process's peak."""
    model, chunks = tiny_model(), random_chunks(length // 512, 512, 0)
    link(model, Store(store), chunks[:1], "why?", make_policy(policy, fields))
    before = peak_bytes()
    link(model, Store(store), chunks, "why?", make_policy(policy, fields))
    return peak_bytes() - before


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for link_memory.json")
    arguments = parser.parse_args()
    peaks: dict[str, dict[str, int]] = {}
    for policy, fields in POLICIES:
        name = policy + "".join(f"-{value}" for value in fields.values())
        peaks[name] = {}
        for length in LENGTHS:
            with tempfile.TemporaryDirectory() as store:
                in_own_process(prepare, length, store)
                peaks[name][str(length)] = in_own_process(measure, length, policy, fields, store)
            print(f"{name:14} N={length:6d}  {peaks[name][str(length)] / 2**20:8.1f} MiB", flush=True)
    results = {
        "command": f"python -m benchmarks.link_memory --out {arguments.out}", "machine": machine(),
        "peak_growth_bytes": peaks, "an_n_by_n_mask_would_be_bytes": {str(n): 4 * n * n for n in LENGTHS},
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "link_memory.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
