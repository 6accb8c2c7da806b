"""What the host does before a link's first layer: resolving, laying out, choosing rows, opening objects.

    OMP_NUM_THREADS=1 python -m benchmarks.prepare_costs --against 1a4179e8 --out benchmarks/results/prepare_costs.json

A random model of 32 layers links objects of short chunks that it linked before, from host memory, as chunks with tokens
and as texts; medians and best of CPU time, since other work on the machine takes more than half of the clock's.
`--against` runs the same in a worktree of another revision, by turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.against import worktree
from benchmarks.output import write_results

COUNTS = (8, 16, 32, 64)
_LAYERS, _WIDTH, _REPEATS, _TURNS = 32, 64, 25, 3
LIMIT_MS = {count: round(0.15 + 0.01 * count, 2) for count in COUNTS}  # what is aimed at


def measure(tokens: int) -> dict[str, dict[str, list[float]]]:
    """CPU ms of `prepare` by what documents are given as, and how many there are."""
    import torch
    from transformers import AutoConfig

    from pictool.bench.prompts import compile_for, random_chunks, random_tail
    from pictool.bench.shapes import random_module
    from pictool.core import Text
    from pictool.linker.grid import parse_grid
    from pictool.linker.link import link
    from pictool.linker.spec import Spec
    from pictool.runtime.model import load_model, wrap_model
    from pictool.store.store import Store

    torch.set_num_threads(1)
    tokenizer = load_model("embedded", "cpu", "float32").tokenizer
    config = AutoConfig.for_model(
        model_type="llama", vocab_size=len(tokenizer), hidden_size=_WIDTH, intermediate_size=2 * _WIDTH,
        num_hidden_layers=_LAYERS, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    model, grid = wrap_model(random_module(config, "cpu", "float32", 0), tokenizer), parse_grid(("legolink-16",))
    took: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "objects", memory_bytes=1 << 32)
        chunks, tail = random_chunks(model, max(COUNTS), tokens), random_tail(model, 8)
        compile_for(model, store, chunks, grid)
        documents: dict[str, list[Any]] = {"chunks": chunks, "texts": [Text(each.text, each.source) for each in chunks]}
        for kind, given in documents.items():
            for count in COUNTS:
                spec = Spec.raw(given[:count], tail, grid[0].policy)
                link(model, store, spec)
                took.setdefault(kind, {})[str(count)] = [prepare_ms(model, store, spec) for _ in range(_REPEATS)]
    return took


def prepare_ms(model: Any, store: Any, spec: Any) -> float:
    """CPU ms of the passes of a link before it has an image."""
    from pictool.linker.link import prepare, start_link

    run = start_link(model, store, spec)
    with ExitStack() as opened:
        started = time.thread_time()
        prepare(run, opened)
        return 1e3 * (time.thread_time() - started)


def measured_in(directory: Path, tokens: int) -> dict[str, dict[str, list[float]]]:
    """`measure` of the package in a directory, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{directory}:{Path(__file__).parents[1]}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--tokens", str(tokens), "--raw"]
    done = subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarised(turns: list[dict[str, dict[str, list[float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Median and best of all turns."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for kind, counts in turns[0].items():
        for count in counts:
            times = [ms for turn in turns for ms in turn[kind][count]]
            result.setdefault(kind, {})[count] = {
                "median_ms": round(statistics.median(times), 3), "best_ms": round(min(times), 3)
            }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="of a chunk")
    parser.add_argument("--against", help="a revision to measure as well")
    parser.add_argument("--turns", type=int, default=_TURNS)
    parser.add_argument("--raw", action="store_true", help="print the times of this package alone, as JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.raw:
        print(json.dumps(measure(options.tokens)))
        return
    root = Path(__file__).parents[1]
    with ExitStack() as resources:
        trees = {"now": root}
        if options.against:
            trees["before"] = resources.enter_context(worktree(options.against))
        turns: dict[str, list[Any]] = {name: [] for name in trees}
        for _ in range(options.turns):
            for name, directory in trees.items():
                turns[name].append(measured_in(directory, options.tokens))
    results = {"limit_ms": LIMIT_MS, **{name: summarised(own) for name, own in turns.items()}}
    results |= {"tokens_of_a_chunk": options.tokens, "load": os.getloadavg()}
    print(json.dumps(results, indent=1))
    if options.out is not None:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
