"""What signatures cost an object, and how well stored KV tells its text.

    OMP_NUM_THREADS=1 python -m benchmarks.trust --out benchmarks/results/trust.json

Cost: objects of 32 layers are opened with and without `require_signed`, and written with and without a signing key, in
turns. Inversion: for each token of held-out documents, the stored keys (not rotated) of a layer are compared with those
that the model gives each token of its vocabulary alone; the nearest one is the guess.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write_results
from pictool import Model, Store, load_model
from pictool.compiler.compile import compile_chunks
from pictool.core import CompileOptions, Geometry, Target
from pictool.runtime.tensors import from_bytes
from pictool.store.codecs import codecs
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.signatures import Signers, SigningKey, Trust, sign_object_file
from training.score import HELD_OUT
from training.world.generate import PageShape, write_prompt

TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "bfloat16", Geometry(layers=32, kv_heads=8, head_dim=128))
TOKENS = 16


def make_chunk(seed: int) -> CompiledChunk:
    tokens = np.arange(TOKENS, dtype=np.int32) + seed
    part = bytes(2 * TOKENS * TARGET.geometry.kv_heads * TARGET.geometry.head_dim)
    meta = ObjectMeta(TARGET.key(tokens, "none"), TARGET, TOKENS, "none")
    return CompiledChunk(meta, f"text {seed}", tokens, [(part, part)] * TARGET.geometry.layers)


def measure_cost(root: Path, count: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds an object: of the processor, the median over repeats, and of the clock, the least."""
    key = SigningKey.new(root / "key")
    signers = Signers(root / "signers", {key.public: "me"}, {})
    plain, keys = Store(root / "st"), list[str]()
    chunks = [make_chunk(seed * TOKENS) for seed in range(count)]
    for chunk in chunks:
        path = plain.put(chunk, durable=False)
        sign_object_file(key, path)
        keys.append(path.stem)
    signing = Store(root / "st", trust=Trust(None, key))

    def reading(store: Store) -> Callable[[], object]:
        def run() -> None:
            for name in keys:
                store.peek(name).close()

        return run

    def writing(store: Store) -> Callable[[], object]:
        return lambda: [store.put(chunk, durable=False) for chunk in chunks]

    ways = {
        "open": reading(plain), "open_signed": reading(Store(root / "st", trust=Trust(signers))),
        "write": writing(plain), "write_signing": writing(signing),
    }  # fmt: skip
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            started, cpu = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - started))
    return {
        name: {
            "cpu_ms": 1e3 * statistics.median(cpu for cpu, _ in times) / count,
            "least_ms": 1e3 * min(wall for _, wall in times) / count,
        }
        for name, times in seconds.items()
    }


def vocabulary_keys(model: Model) -> list[torch.Tensor]:
    """The keys of each token alone, not rotated, by layer: [vocabulary, kv_heads · head_dim]."""
    count = model.config.vocab_size
    rows: list[list[torch.Tensor]] = [[] for _ in range(model.geometry.layers)]
    found = dict(model.prefill([[token] for token in range(count)]))
    for token in range(count):
        for layer, (key, _) in enumerate(found[token]):
            rows[layer].append(key.flatten())
    return [torch.stack(keys).float() for keys in rows]


def measure_inversion(root: Path, name: str, documents: int) -> list[dict[str, Any]]:
    """The share of tokens that the nearest key tells, by codec and layer."""
    model = load_model(name, "cpu", "float32")
    table, texts = vocabulary_keys(model), list[str]()
    while len(texts) < documents:
        texts += write_prompt(random.Random(f"{HELD_OUT}-inversion-{len(texts)}"), 8, PageShape()).pages
    rows = []
    for codec in sorted(codecs()):
        store = Store(root / name / codec)
        right, count = np.zeros(len(table)), 0
        for done in compile_chunks(model, store, texts[:documents], CompileOptions(codec=codec)):
            with store.peek(done.key) as file:
                tokens = torch.tensor(file.tokens().astype(np.int64))
                for layer, known in enumerate(table):
                    shape = file.meta.shape.part_dims[0]
                    keys = from_bytes(memoryview(bytearray(file.layer(layer)[0])), torch.float32, shape)
                    guess = torch.cdist(keys.transpose(0, 1).flatten(1), known).argmin(1)
                    right[layer] += int((guess == tokens).sum())
            count += len(tokens)
        rows.append({"model": name, "codec": codec, "tokens": count, "found_by_layer": (right / count).tolist()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        cost = measure_cost(root, options.objects, options.repeats)
        inversion = measure_inversion(root, "embedded-small", options.documents)
    for name, value in cost.items():
        print(f"{name}: {value['cpu_ms']:.3f} ms of the processor, {value['least_ms']:.3f} ms at least, an object")
    for row in inversion:
        print(row["codec"], row["tokens"], " ".join(f"{share:.1%}" for share in row["found_by_layer"]))
    if options.out:
        write_results(options.out, {"cost": cost, "inversion": inversion})


if __name__ == "__main__":
    main()
