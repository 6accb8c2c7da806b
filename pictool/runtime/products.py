"""Matrix products of linear layers in float32 on a CPU: by oneDNN, where that is faster there than torch's default.

`torch` multiplies float32 matrices by its BLAS. On some CPUs oneDNN, which it has as well, is much faster (than MKL on
AMD's with AVX-512; `pic doctor` tells how much), on others about the same. So both are measured once per CPU and
version of torch, and the answer is kept in the user's cache. The numbers are the same but for the order of sums.

$XDG_CACHE_HOME/pictool/products/<sha256 of what it holds for>.json
{"blas_s": …, "onednn_s": …}: the best times of one product
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import cache
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from pictool.reading import parse_json, read_file
from pictool.runtime.machine import cpu_name
from pictool.runtime.memory.user_cache import cache_dir, write_cache_file

_MIN_WEIGHTS, _MANY_WEIGHTS = 1 << 18, 1 << 21  # of a layer; with many even a single row is faster
_MIN_ROWS = 4
_MIN_GAIN = 1.05
_PROBE_ROWS, _PROBE_SIZE, _PROBE_RUNS = 64, 1024, 15
_MAX_BYTES = 1000  # of the file


class OneDnnLinear(nn.Linear):
    """A linear layer whose products of some size oneDNN computes. Weights are torch's, and nothing is held twice."""

    def forward(self, input: Tensor) -> Tensor:
        num_weights = self.weight.numel()
        if num_weights < _MANY_WEIGHTS and input.numel() < _MIN_ROWS * self.in_features:
            return linear(input, self.weight, self.bias)
        return onednn_linear(input, self.weight, self.bias)


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by oneDNN, for float32 on a CPU: the operator of torch's own compiled models.

    A weight with gaps between its rows is copied: oneDNN has no kernel for it, and takes a thousand times as long.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight.contiguous(), bias, "none", [], "")
    return product


def use_fastest(module: nn.Module) -> None:
    """Let oneDNN compute the large linear layers of a model in place, if they are on a CPU and that is faster."""
    large = [layer for layer in module.modules() if _is_large(layer)]
    if large and onednn_wins():
        for layer in large:
            layer.__class__ = OneDnnLinear


def _is_large(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.float32
        and layer.weight.numel() >= _MIN_WEIGHTS
    )


def has_onednn() -> bool:
    """Whether this build of torch has it, with the operator that is used here."""
    has: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_wins() -> bool:
    """Whether oneDNN's products are faster on this machine."""
    gain = onednn_gain()
    return gain is not None and gain >= _MIN_GAIN


@cache
def onednn_gain() -> float | None:
    """How many times as fast as torch's default oneDNN is here; measured once, then known. None if torch lacks it."""
    if not has_onednn():
        return None
    of = [cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    path = cache_dir() / "products" / f"{hashlib.sha256(json.dumps(of).encode()).hexdigest()}.json"
    times = _kept(path)
    if times is None:
        times = measure_products()
        write_cache_file(path, json.dumps(times).encode())
    return times["blas_s"] / times["onednn_s"]


def _kept(path: Path) -> dict[str, float] | None:
    """The times that were kept; None if there are none, or the file is damaged: they are measured again."""
    try:
        times = parse_json(read_file(path, _MAX_BYTES))
        return {name: _seconds(times[name]) for name in ("blas_s", "onednn_s")}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _seconds(value: object) -> float:
    if not isinstance(value, float) or value <= 0:
        raise ValueError
    return value


@torch.inference_mode()
def measure_products() -> dict[str, float]:
    """The best seconds of one product by either, in turn; by as many threads as torch uses."""
    weight, rows = torch.randn(_PROBE_SIZE, _PROBE_SIZE), torch.randn(1, _PROBE_ROWS, _PROBE_SIZE)
    ways, best = {"blas_s": linear, "onednn_s": onednn_linear}, {"blas_s": inf, "onednn_s": inf}
    for _ in range(_PROBE_RUNS):
        for name, multiply in ways.items():
            started = time.perf_counter()
            multiply(rows, weight)
            best[name] = min(best[name], time.perf_counter() - started)
    return best
