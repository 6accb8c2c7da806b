"""Rates of the matrix products of linear layers, by rows: torch's BLAS, oneDNN, and oneDNN with packed weights.

    python -m benchmarks.products --out benchmarks/results/products.json

Float32, Qwen2.5-0.5B's matrices; each product takes other weights than the one before, so that they come from memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.output import write_results
from pictool.runtime.products import onednn_linear

ROWS = (1, 32, 144, 512, 945)
SHAPES = ((896, 896), (896, 128), (896, 4864), (4864, 896))  # inputs, outputs
_BYTES = 300_000_000  # of weights of a shape: more than caches hold
_MOST_WEIGHTS = 24


def packed_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """As `onednn_linear`, of a weight in oneDNN's own order."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
    return product


def rate(multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: list[Tensor], repeats: int) -> float:
    """GFLOP/s, the median of the repeats; `weights` have `rows.shape[1]` inputs."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        for weight in weights:
            multiply(rows, weight)
        seconds.append(time.perf_counter() - began)
    return 2e-9 * rows.shape[0] * sum(weight.numel() for weight in weights) / statistics.median(seconds)


@torch.inference_mode()
def measure(count: int, inputs: int, outputs: int, repeats: int) -> dict[str, Any]:
    """The rates of one shape with `count` rows."""
    copies = min(_MOST_WEIGHTS, _BYTES // (4 * inputs * outputs))
    rows, weights = torch.randn(count, inputs), [torch.randn(outputs, inputs) for _ in range(copies)]
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, count) for weight in weights]
    return {
        "rows": count, "inputs": inputs, "outputs": outputs,
        "blas_gflops": rate(linear, rows, weights, repeats),
        "onednn_gflops": rate(onednn_linear, rows, weights, repeats),
        "packed_gflops": rate(packed_linear, rows, packed, repeats),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the results file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = [measure(count, *shape, options.repeats) for count in ROWS for shape in SHAPES]
    for one in found:
        print({name: round(value) for name, value in one.items()}, flush=True)
    if options.out is not None:
        write_results(options.out, {"threads": options.threads, "repeats": options.repeats, "products": found})


if __name__ == "__main__":
    main()
