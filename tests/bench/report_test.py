"""The JSON of `pic bench`: its keys and their order are a contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictool.bench.options import PromptOptions
from pictool.bench.sync import bench_sync
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model

POLICIES = parse_grid(["naive"])
PROMPT = PromptOptions(chunks=2, chunk_tokens=9, tail_tokens=4, new_tokens=1, repeats=1)
MEASUREMENT = "ttft_s rows bytes_read decode_tokens_per_s peak_bytes tokens load_s select_s recompute_s fetch_s".split()


def keys(*values: dict[str, Any]) -> list[list[str]]:
    return [list(value) for value in values]


def test_sync(model: Model, tmp_path: Path) -> None:
    report = bench_sync(model, POLICIES, PROMPT, tmp_path).report()
    method = report["methods"][1]
    assert keys(report, method, method["ttft"], method["median"], method["samples"][0]) == [
        ["prompt_tokens", "object_bytes", "methods"],
        ["label", "params", "ttft", "median", "speedup", "row_floor", "samples"],
        ["median", "low", "high"],
        [name for name in MEASUREMENT if name != "tokens"],
        MEASUREMENT,
    ]
