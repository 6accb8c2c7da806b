"""Codecs on real KV of the embedded model in bfloat16: size, speed on one core, error, and keys rotated or not.

    python -m benchmarks.codecs --out benchmarks/results/codecs.json

Sizes count the KV only (not header, tokens and text). Speeds are decoded bytes (of KV in bfloat16) per second.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pictool.compiler.chunking import make_chunk
from pictool.linker.dequantize import dequantized
from pictool.runtime.model import Model, load_model
from pictool.runtime.tensors import to_bytes
from pictool.store.codecs import codecs
from pictool.store.codecs.base import Codec, LayerShape
from pictool.store.codecs.quantized import Quantizing
from training.world.generate import write_prompt

CPU = torch.device("cpu")
Layer = tuple[torch.Tensor, torch.Tensor]  # key, value: [kv_heads, tokens, head_dim]


def real_layers(model: Model, num_chunks: int) -> list[Layer]:
    """KV of held-out chunks, each layer of each chunk as an object has it, in bfloat16."""
    layers_of_all: list[Layer] = []
    pages = [page for seed in range(num_chunks // 8) for page in write_prompt(random.Random(f"codecs-{seed}"), 8).pages]
    for _, layers in model.prefill([make_chunk(model, page, "page").tokens for page in pages], (), True):
        layers_of_all += [(key.bfloat16(), value.bfloat16()) for key, value in layers]
    return layers_of_all


def size_of(codec: Codec, layers: list[Layer]) -> tuple[int, int]:
    """Coded and uncoded bytes."""
    coded = sum(len(codec.encode(to_bytes(key), to_bytes(value), shape_of(key))) for key, value in layers)
    return coded, sum(shape_of(key).num_bytes for key, _ in layers)


def shape_of(key: torch.Tensor) -> LayerShape:
    return LayerShape(key.shape[0], key.shape[1], key.shape[2], "bfloat16")


def decoded(codec: Codec, layer: Layer) -> torch.Tensor:
    """float32 [2, kv_heads, tokens, head_dim]."""
    shape = shape_of(layer[0])
    out = bytearray(shape.num_bytes)
    coded = codec.encode(to_bytes(layer[0]), to_bytes(layer[1]), shape)
    codec.decode(memoryview(coded), shape, memoryview(out))
    return torch.frombuffer(out, dtype=torch.bfloat16).float().view(2, *shape.dims)


def error_of(codec: Codec, layers: list[Layer]) -> dict[str, float]:
    """Relative L2 error of all keys, and of all values."""
    wrong, whole = np.zeros(2), np.zeros(2)
    for layer in layers:
        now = decoded(codec, layer)
        for part in (0, 1):
            was = layer[part].float()
            wrong[part] += float((now[part] - was).square().sum())
            whole[part] += float(was.square().sum())
    return dict(zip(("key", "value"), np.sqrt(wrong / whole).tolist(), strict=True))


def rotated(model: Model, layers: list[Layer]) -> list[Layer]:
    """The same KV with keys rotated to the positions of their tokens, as caches store them that do not relocate."""
    turned = []
    for index, (key, value) in enumerate(layers):
        tables = model.stack.rotary_tables(torch.arange(key.shape[1]))
        moved = model.stack.rotate(key.float()[None], tables, index % model.geometry.layers)
        turned.append((moved[0].bfloat16(), value))
    return turned


def best_of(work: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit into so many seconds."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def speed_of(codec: Codec, layers: list[Layer], seconds: float) -> dict[str, float]:
    """GB/s of one core on a layer of some thousand tokens, concatenated from real ones."""
    key, value = (torch.cat([layer[part] for layer in layers[1::4]][:80], 1) for part in (0, 1))
    shape = shape_of(key)
    pair = to_bytes(key), to_bytes(value)
    coded, out = memoryview(codec.encode(*pair, shape)), memoryview(bytearray(shape.num_bytes))
    encode_s = best_of(lambda: codec.encode(*pair, shape), seconds)
    decode_s = best_of(lambda: codec.decode(coded, shape, out), seconds)
    seconds_of = {"encode": encode_s, "decode": decode_s}
    if isinstance(codec, Quantizing):
        seconds_of["unpack"] = best_of(lambda: list(codec.pieces(coded, shape)), seconds)
        seconds_of["decode_torch"] = best_of(lambda: dequantized(codec, coded, shape, torch.bfloat16, CPU), seconds)
    return {name: shape.num_bytes / s / 1e9 for name, s in seconds_of.items()}


def measure(num_chunks: int, seconds: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = load_model(None, "cpu", "float32")
    layers = real_layers(model, num_chunks)
    turned = rotated(model, layers)
    rows = {}
    for name, codec in codecs().items():
        coded, plain = size_of(codec, layers)
        rows[name] = {
            "smaller": plain / coded,
            "gb_s": speed_of(codec, layers, seconds),
            "error": error_of(codec, layers),
            "error_rotated": error_of(codec, turned),
        }
        print(name, json.dumps(rows[name]))
    return {"model": model.name, "chunks": num_chunks, "cores": len(os.sched_getaffinity(0)), "codecs": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = measure(options.chunks, options.seconds)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
