"""Whether scattered rows are computed faster if runs with small gaps between them are one virtual sequence.

    .venv-vllm/bin/python -m benchmarks.vllm_runs --out benchmarks/results/vllm_runs.json

vLLM's attention on this CPU, one layer, over a prompt of random KV: random rows of it, as runs of consecutive ones.
Runs whose gap is at most `gap` rows are merged; the rows in the gap are computed too. Merged runs read the KV of their
prompt once. Medians of repeats that take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.output import write_results

TOKENS, HEAD_DIM, BLOCK = 10_240, 64, 32
GAPS = (0, 1, 2, 4, 8, 16, 64)


def merged_runs(positions: np.ndarray[Any, Any], gap: int) -> np.ndarray[Any, Any]:
    """[runs, 2]: starts and ends, short ones first."""
    is_new = np.concatenate([[True], np.diff(positions) > gap + 1])
    first = np.flatnonzero(is_new)
    runs = np.stack([positions[first], positions[np.append(first[1:], len(positions)) - 1] + 1], 1)
    return runs[np.argsort(runs[:, 1] - runs[:, 0], kind="stable")]


def attention(heads: int, kv_heads: int) -> Callable[[np.ndarray[Any, Any]], float]:
    """A function that computes the attention of runs; returns its ms."""
    import torch
    from vllm import _custom_ops as ops

    num_blocks = TOKENS // BLOCK
    cache = torch.randn(num_blocks, kv_heads, 2 * BLOCK, HEAD_DIM)
    key_cache, value_cache = cache.chunk(2, dim=2)
    table = torch.arange(num_blocks, dtype=torch.int32)

    def run(runs: np.ndarray[Any, Any]) -> float:
        lengths = runs[:, 1] - runs[:, 0]
        query_start = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ends = torch.from_numpy(runs[:, 1].astype(np.int32))
        query = torch.randn(int(lengths.sum()), heads, HEAD_DIM)
        output, tables = torch.empty_like(query), table[None].repeat(len(runs), 1)
        started = time.perf_counter()
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(runs), num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, seq_lens=ends,
            dtype=torch.float32, query_start_loc=query_start, causal=True, sliding_window_size=-1, isa="vec",
            enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key_cache, value_cache=value_cache, output=output, query_start_loc=query_start,
            seq_lens=ends, scale=0.125, causal=True, alibi_slopes=None, sliding_window=-1, block_table=tables,
            softcap=0, scheduler_metadata=metadata, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype="auto",
        )  # fmt: skip
        return (time.perf_counter() - started) * 1e3

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_runs.json"))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    draw, rows = np.random.default_rng(0), []
    for heads, kv_heads in ((8, 8), (32, 8)):
        run = attention(heads, kv_heads)
        for ratio in (0.05, 0.15, 0.3):
            positions = np.flatnonzero(draw.random(TOKENS) < ratio)
            runs = {gap: merged_runs(positions, gap) for gap in GAPS}
            times = [{gap: run(runs[gap]) for gap in GAPS} for _ in range(options.repeats)]
            for gap in GAPS:
                computed = int((runs[gap][:, 1] - runs[gap][:, 0]).sum())
                row: dict[str, float] = {"heads": heads, "kv_heads": kv_heads, "rows": len(positions), "gap": gap}
                row |= {"runs": len(runs[gap]), "computed": computed}
                row |= {"ms": round(float(np.median([measured[gap] for measured in times])), 1)}
                rows.append(row)
                print(row, flush=True)
    write_results(options.out, {"unit": "ms of one layer's attention", "rows": rows})


if __name__ == "__main__":
    main()
