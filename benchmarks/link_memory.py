"""Peak memory of a link over N, each in a process of its own: it must grow like N, with no N×N mask.

    python -m benchmarks.link_memory --out benchmarks/results

A random model of the shape `tiny`, chunks of 512 tokens. Reported is how far a link raises the peak resident set of a
process that has done everything before (model loaded, objects compiled, a short prompt linked). In one process, as in
`benchmarks.context`, the allocator would reuse the memory of earlier links.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import write_results
from pictool import Model
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import make_prompt
from pictool.bench.shapes import random_model
from pictool.bench.single_request import link_prompt
from pictool.linker.grid import parse_grid

CHUNK_TOKENS = 512


def tiny_model() -> Model:
    torch.set_num_threads(1)
    return random_model("tiny", "cpu", "float32")


def compile_prompt(name: str, length: int, directory: str) -> None:
    make_prompt(tiny_model(), parse_grid([name]), PromptOptions(length // CHUNK_TOKENS, CHUNK_TOKENS), Path(directory))


def measure(name: str, length: int, directory: str) -> int:
    """Bytes by which a link of `length` tokens of context raises this process's peak."""
    model, (labelled,) = tiny_model(), parse_grid([name])
    options = PromptOptions(length // CHUNK_TOKENS, CHUNK_TOKENS)
    prompt = make_prompt(model, [labelled], options, Path(directory))  # compiled already
    link_prompt(model, replace(prompt, chunks=prompt.chunks[:1]), labelled.policy, is_cold=False)
    before = peak_bytes()
    link_prompt(model, prompt, labelled.policy, is_cold=False)
    return peak_bytes() - before


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_own_process(function: Callable[[], Any]) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for link_memory.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    options = parser.parse_args()
    peaks: dict[str, dict[str, int]] = {}
    for name in ("full", "naive", "legolink-16", "legolink-128"):
        peaks[name] = {}
        for length in options.lengths:
            with tempfile.TemporaryDirectory() as directory:
                in_own_process(partial(compile_prompt, name, length, directory))
                peaks[name][str(length)] = in_own_process(partial(measure, name, length, directory))
            print(f"{name:14} N={length:6d}  {peaks[name][str(length)] / 2**20:8.1f} MiB", flush=True)
    masks = {str(length): 4 * length**2 for length in options.lengths}
    write_results(
        options.out / "link_memory.json", {"peak_growth_bytes": peaks, "an_n_by_n_mask_would_be_bytes": masks}
    )


if __name__ == "__main__":
    main()
