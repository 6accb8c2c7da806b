"""Matrix products of linear layers in float32 on a CPU: by oneDNN, where that is faster there than torch's default.

`torch` multiplies float32 matrices by its BLAS. On some CPUs oneDNN, which it has as well, is much faster (than MKL on
AMD's with AVX-512; `pic doctor` tells how much), on others about the same. So both are measured once per CPU and
version of torch, and the answer is kept in the user's cache. The numbers are the same but for the order of sums.

$XDG_CACHE_HOME/pictool/products/<what>-<sha256 of what it holds for>.json
{"default_s": …, "onednn_s": …}: the best times of torch's default and of oneDNN, of a linear layer or of attention; or
of float32 and of bfloat16
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
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
MIN_GAIN = 1.05  # with less, torch's default is taken
_PROBE_ROWS, _PROBE_SIZE, _PROBE_RUNS = 64, 1024, 15
_TIMES = ("default_s", "onednn_s")
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
    return gain is not None and gain >= MIN_GAIN


@cache
def onednn_gain() -> float | None:
    """How many times as fast as torch's default oneDNN is here. None if torch lacks it."""
    return gain_of("linear", measure_products) if has_onednn() else None


def gain_of(what: str, measure: Callable[[], tuple[float, float]]) -> float:
    """How many times as fast another way is at something: measured once per CPU and version of torch, then known.

    Args:
        measure: returns the seconds of the default, and of the other way.
    """
    of = [cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.__version__]
    path = cache_dir() / "products" / f"{what}-{hashlib.sha256(json.dumps(of).encode()).hexdigest()}.json"
    times = _kept(path)
    if times is None:
        times = measure()
        write_cache_file(path, json.dumps(dict(zip(_TIMES, times, strict=True))).encode())
    return times[0] / times[1]


def _kept(path: Path) -> tuple[float, float] | None:
    """The times that were kept; None if there are none, or the file is damaged: they are measured again."""
    try:
        times = parse_json(read_file(path, _MAX_BYTES))
        default, onednn = (_seconds(times[name]) for name in _TIMES)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
    return default, onednn


def _seconds(value: object) -> float:
    if not isinstance(value, float) or value <= 0:
        raise ValueError
    return value


@torch.inference_mode()
def measure_products() -> tuple[float, float]:
    """The best seconds of one product by torch's default, and by oneDNN; by as many threads as torch uses."""
    weight, rows = torch.randn(_PROBE_SIZE, _PROBE_SIZE), torch.randn(1, _PROBE_ROWS, _PROBE_SIZE)
    return best_seconds(lambda: linear(rows, weight), lambda: onednn_linear(rows, weight))


@torch.inference_mode()
def best_seconds(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """The best seconds of either, of runs in turn."""
    ways, best = (first, second), [inf, inf]
    for _ in range(_PROBE_RUNS):
        for index, run in enumerate(ways):
            started = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - started)
    return best[0], best[1]
