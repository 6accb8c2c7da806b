"""The JSON of `pic bench`: its keys and their order are a contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pictool.bench.context import bench_context
from pictool.bench.options import ContextOptions, PromptOptions
from pictool.bench.roofline import Rates
from pictool.bench.sync import bench_sync
from pictool.linker.grid import parse_grid
from pictool.runtime.model import Model

POLICIES = parse_grid(["naive"])
PROMPT = PromptOptions(chunks=2, chunk_tokens=9, tail_tokens=4, new_tokens=1, repeats=1)
MEASUREMENT = (
    "ttft_s rows bytes_read flops decode_tokens_per_s peak_bytes tokens load_s select_s recompute_s fetch_s".split()
)


def keys(*values: dict[str, Any]) -> list[list[str]]:
    return [list(value) for value in values]


def test_sync(model: Model, rates: Rates, tmp_path: Path) -> None:
    report = bench_sync(model, POLICIES, PROMPT, tmp_path).report()
    method = report["methods"][1]
    assert keys(report, report["rates"], method, method["ttft"], method["median"], method["samples"][0]) == [
        ["prompt_tokens", "object_bytes", "rates", "methods"],
        ["copy_bytes_s", "flops_s", "bfloat16_flops_s"],
        ["label", "params", "ttft", "median", "speedup", "row_floor", "floor_s", "samples", "ttft_by_floor"],
        ["median", "low", "high"],
        [name for name in MEASUREMENT if name != "tokens"],
        MEASUREMENT,
    ]


def test_context(model: Model, rates: Rates, tmp_path: Path) -> None:
    options = ContextOptions(start=32, stop=64, chunk_tokens=16, tail_tokens=6, repeats=1)
    report = bench_context(model, POLICIES, options, tmp_path).report()
    curve = report["curves"][1]
    point, growth = curve["points"][0], curve["growth"]
    assert keys(report, curve, point, point["samples"][0], growth, growth["ttft"]) == [
        ["lengths", "rates", "curves"],
        ["label", "params", "points", "out_of_memory", "growth"],
        ["tokens", "ttft", "recompute_s", "rows", "bytes_read", "peak_bytes", "speedup", "floor_s", "samples"],
        MEASUREMENT,
        ["ttft", "long_ttft", "recompute"],
        ["exponent", "error"],
    ]
