"""CPU seconds of links by the length of the context: where reuse begins to pay, and what it saves.

    python -m benchmarks.link_lengths MODEL --out benchmarks/results/link_lengths_smollm2.json

Eight documents of random tokens of the model and a short question, on one thread in float32, nothing of an earlier link
reused. `prophet-0.1` is little but prophet's scoring. Of each policy the median of the process's CPU time, which other
processes do not change as they do wall time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.output import write_results
from pictool import Chunk, Model, Store, load_model
from pictool.linker.grid import named_policy
from pictool.linker.link import link
from pictool.linker.spec import Spec

DOCUMENTS = 8
POLICIES = ("full", "naive", "legolink-16", "prophet-0.1", "prophet-10", "prophet-15", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 320, 384, 512, 1024, 3840])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model, "cpu", "float32")
    lines = []
    with tempfile.TemporaryDirectory() as directory:
        for length in options.lengths:
            seconds = measure(model, Store(directory), length, options.repeats)
            lines.append({"tokens": length, "cpu_s": seconds, "full_over": over(seconds)})
            print(length, *(f"{name} {value:.2f}x" for name, value in over(seconds).items()), flush=True)
    write_results(options.out, {"model": model.name, "repeats": options.repeats, "lines": lines})


def measure(model: Model, store: Store, length: int, repeats: int) -> dict[str, float]:
    """The median CPU seconds of each policy."""
    draw = np.random.default_rng(length)
    tokens = draw.integers(100, model.config.vocab_size, (DOCUMENTS, length // DOCUMENTS)).tolist()
    documents = [Chunk("", tuple(ids), f"document {i}") for i, ids in enumerate(tokens)]
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    for repeat in range(repeats + 1):  # the first one compiles
        for name, seconds in found.items():
            started = time.process_time()
            link(model, store, Spec("Which of them is it?", documents, named_policy(name)))
            if repeat:
                seconds.append(time.process_time() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def over(seconds: dict[str, float]) -> dict[str, float]:
    return {name: seconds["full"] / value for name, value in seconds.items()}


if __name__ == "__main__":
    main()
