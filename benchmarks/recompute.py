"""Honest objects computed again: the noise of packs, threads, dtypes, codecs, processor flags; planted ones, found.

    python -m benchmarks.recompute --objects 1008 --out benchmarks/results/recompute.json
    python -m benchmarks.recompute --model smollm2 --objects 96 --planted 10 --dtypes float32,bfloat16

Objects of a model are compiled in processes with other processor flags (`FLAGS`), each dtype, with one thread and two,
alone and in packs, under each of `CODECS` in turn; then all are computed again here, alone, with this process's flags.
A planted object is an honest one, of which one layer's values are 1 % larger; or in which the KV of 1, 4 or 16 tokens
is that of the same text with other tokens in their place. All checksums hold.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write_results
from pictool import Chunk, Model, Store, load_model
from pictool.compiler.compile import compile_chunks, compute_chunks
from pictool.compiler.recompute import LIMITS, Difference, choose, differences
from pictool.core import CompileOptions
from pictool.store.codecs.base import Buffer
from pictool.store.codecs.numbers import array_dtype
from pictool.store.objects.format import CompiledChunk
from training.world.generate import PageShape, write_prompt

CODECS = ("none", "int8", "int4", "fp8")
REPLACED = (1, 4, 16)  # tokens
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


def write_objects(root: Path, options: argparse.Namespace, flags: str, count: int) -> None:
    """Compile `count` objects in every way of every dtype, each way to a store of its own."""
    for dtype in options.dtypes:
        model = load_model(options.model, "cpu", dtype)
        for threads, alone in WAYS:
            torch.set_num_threads(threads)
            store = Store(root / dtype / f"{threads}-{alone}")
            chunks = chunks_of(model, f"{flags} {dtype} {threads} {alone}", count)
            for at, codec in enumerate(CODECS):
                compile_chunks(model, store, chunks[at :: len(CODECS)], CompileOptions(codec=codec), alone=alone)


def compare(root: Path, options: argparse.Namespace, flags: str) -> list[dict[str, Any]]:
    """Compute all again: a row for each way, with the largest differences."""
    rows, torch_threads = [], torch.get_num_threads()
    for dtype in options.dtypes:
        model = load_model(options.model, "cpu", dtype)
        for threads, alone in WAYS:
            store = Store(root / dtype / f"{threads}-{alone}")
            for codec in CODECS:
                found, alarms, raised = list[list[Difference]](), 0, 0
                for key in store.keys():
                    with store.peek(key) as file:
                        if file.meta.codec == codec:
                            found.append(differences(model, file))
                if found:
                    alarms = sum(not all(part.is_noise for part in parts) for parts in found)
                    raised = sum(max(part.limits.scale for part in parts) > LIMITS[dtype].scale for parts in found)
                    rows.append({
                        "flags": flags, "dtype": dtype, "threads": threads, "pack": "alone" if alone else "together",
                        "codec": codec, "objects": len(found), "alarms": alarms, "limits_raised": raised,
                        "most": largest(part for parts in found for part in parts),
                        "first_layer": max(part.apart.token for parts in found for part in parts[:2]),
                        "threads_here": torch_threads,
                    })  # fmt: skip
    return rows


def largest(parts: Iterable[Difference]) -> dict[str, float]:
    """The largest of each number."""
    found = [asdict(part.apart) for part in parts]
    return {name: max(apart[name] for apart in found) for name in found[0]}


def enlarged(chunk: CompiledChunk, layer: int, dtype: str) -> CompiledChunk:
    """A chunk whose values in one layer are 1 % larger."""
    layers = list(chunk.layers)
    values = np.frombuffer(layers[layer][1], dtype=array_dtype(dtype)).astype(np.float32) * 1.01
    layers[layer] = (layers[layer][0], values.astype(array_dtype(dtype)).tobytes())
    return replace(chunk, layers=layers)


def replaced(model: Model, chunk: CompiledChunk, count: int, draw: random.Random, others: list[int]) -> CompiledChunk:
    """A chunk with the KV of the same text, in which `count` tokens that follow one another are others."""
    count = min(count, len(chunk.tokens))
    lie, start = [int(token) for token in chunk.tokens], draw.randrange(len(chunk.tokens) - count + 1)
    rows = slice(start, start + count)
    lie[rows] = [draw.choice([token for token in others if token != lie[at]]) for at in range(start, start + count)]
    (other,) = compute_chunks(model, {chunk.meta.key: Chunk("", tuple(lie), "lie")}, CompileOptions())
    layers = []
    for index, parts in enumerate(chunk.layers):
        shapes = zip(chunk.meta.shape.part_dims, parts, other.layers[index], strict=True)
        layers.append(tuple(with_rows(own, theirs, dims, rows, chunk.meta.shape.width) for dims, own, theirs in shapes))
    return replace(chunk, layers=layers)


def with_rows(own: Buffer, theirs: Buffer, dims: tuple[int, int, int], rows: slice, width: int) -> bytes:
    """A part [heads, tokens, width], in which some tokens have the numbers of another."""
    arrays = [np.frombuffer(data, dtype=f"V{width}").reshape(dims).copy() for data in (own, theirs)]
    arrays[0][:, rows] = arrays[1][:, rows]
    return arrays[0].tobytes()


def plant(root: Path, options: argparse.Namespace, dtype: str, kind: int) -> dict[str, Any]:
    """Of planted objects among as many honest ones: how many a recompute of all, and of a share, finds.

    `kind`: how many tokens are replaced; 0: values are enlarged.
    """
    model = load_model(options.model, "cpu", dtype)
    store, draw, bad = Store(root / f"planted-{dtype}-{kind}"), random.Random(f"{dtype} {kind}"), set[str]()
    listed = chunks_of(model, f"planted {dtype} {kind}", 2 * options.planted)
    chunks = {model.key(chunk.tokens, "none"): chunk for chunk in listed}
    counts = Counter(token for chunk in listed for token in chunk.tokens)
    others = [token for token, count in counts.items() if count < counts.total() / 200]  # names rather than grammar
    for number, computed in enumerate(compute_chunks(model, chunks, CompileOptions())):
        if number % 2:
            bad.add(computed.meta.key)
            if kind:
                computed = replaced(model, computed, kind, draw, others)
            else:
                computed = enlarged(computed, draw.randrange(len(computed.layers)), dtype)
        store.put(computed, durable=False)
    found, distances = set(), list[float]()
    for key in store.keys():
        with store.peek(key) as file:
            parts = differences(model, file)
        found |= set() if all(part.is_noise for part in parts) else {key}
        distances += [max(part.apart.token for part in parts)] if key in bad else []
    keys = store.keys()
    at_share = [len(bad & found & set(choose(keys, options.share))) / len(bad) for _ in range(1000)]
    return {
        "dtype": dtype, "planted": len(bad), "replaced_tokens": kind, "found": len(found & bad),
        "least_token": min(distances), "honest": len(chunks) - len(bad), "alarms": len(found - bad),
        "share": options.share, "found_at_share": sum(at_share) / len(at_share),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--objects", type=int, default=1008)
    parser.add_argument("--planted", type=int, default=50, help="of each dtype and kind")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(LIMITS))
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--write", nargs=2, metavar=("DIR", "FLAGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    each = -(-options.objects // (len(FLAGS) * len(options.dtypes) * len(WAYS)))
    if options.write:
        write_objects(Path(options.write[0]), options, options.write[1], each)
        return
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as root:
        for flags, variables in FLAGS.items():
            place = Path(root, flags.replace(" ", "-"))
            command = [sys.executable, "-m", "benchmarks.recompute", "--write", str(place), flags]
            command += ["--model", options.model, "--dtypes", ",".join(options.dtypes)]
            subprocess.run([*command, "--objects", str(options.objects)], env=os.environ | variables, check=True)
            rows += compare(place, options, flags)
        found = [plant(Path(root), options, dtype, kind) for dtype in options.dtypes for kind in (0, *REPLACED)]
    most = {
        dtype: {name: max(row["most"][name] for row in rows if row["dtype"] == dtype) for name in rows[0]["most"]}
        for dtype in options.dtypes
    }
    results = {
        "objects": sum(row["objects"] for row in rows), "alarms": sum(row["alarms"] for row in rows),
        "limits": {dtype: asdict(limits) for dtype, limits in LIMITS.items()}, "most": most,
        "first_layer": max(row["first_layer"] for row in rows), "planted": found, "rows": rows,
    }  # fmt: skip
    for name in ("objects", "alarms", "most", "first_layer", "planted"):
        print(name, results[name])
    if options.out:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
