"""TTFT of legolink-16 against full, by kind of attention: random models of one size, which differ in that kind.

    python -m benchmarks.attention_kinds --out benchmarks/results/attention_kinds.json

The shapes `small*` of `pictool/bench/shapes.yaml`, by `pic bench`'s own measurement. `object_bytes` is what the
prompt's objects take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.output import write_results
from benchmarks.roofline import count_weights
from pictool.bench.options import PromptOptions
from pictool.bench.shapes import random_model
from pictool.bench.sync import bench_sync
from pictool.linker.grid import parse_grid

KINDS = {
    "keys and values of all tokens": "small",
    "sliding windows": "small-window",
    "experts": "small-experts",
    "learned sinks, windows, experts": "small-sinks",
    "latents, experts": "small-latents",
}
POLICY = "legolink-16"


def measure(shape: str, options: PromptOptions, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """One shape: TTFT in seconds (of every run), speedup, bytes of objects, weights that a row passes."""
    model = random_model(shape, device, dtype)
    with tempfile.TemporaryDirectory() as directory:
        result = bench_sync(model, parse_grid([POLICY]), options, Path(directory))
    methods = {method.label: method for method in result.methods}
    return {
        "shape": shape, "model_type": model.config.model_type, "prompt_tokens": result.prompt_tokens,
        "object_bytes": result.object_bytes, "weights_a_row": count_weights(model.module, model.config),
        "full_ttft_s": [sample.ttft_s for sample in methods["full"].samples],
        "linked_ttft_s": [sample.ttft_s for sample in methods[POLICY].samples],
        "speedup": methods[POLICY].speedup, "row_floor": methods[POLICY].row_floor,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    options = PromptOptions(
        chunks=arguments.chunks, chunk_tokens=arguments.chunk_tokens, repeats=arguments.repeats, new_tokens=0
    )
    load_before, rows = os.getloadavg(), {}
    for kind, shape in KINDS.items():
        rows[kind] = measure(shape, options)
        print(f"{kind}: {rows[kind]['speedup']:.1f}x", flush=True)
    write_results(arguments.out, {"load_average": [load_before, os.getloadavg()], "policy": POLICY, "kinds": rows})


if __name__ == "__main__":
    main()
