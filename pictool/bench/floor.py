"""What no link can be faster than on a machine: its bytes over the measured copy rate, its FLOPs over the matmul rate.

Bytes are those that the loader reads from objects; the rate is that of a copy into the device's memory (on a CPU, of
memory to memory). FLOPs are those of the target's rows; what chooses rows (a small model, comparing) is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import linear

from pictool.core import RowMask

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_COPY_BYTES = 1 << 28
_SIZE = {"cpu": 2048, "cuda": 8192}  # of the square matrices that are multiplied
_RUNS, _LONG_S = 5, 3.0


@dataclass(frozen=True)
class Rates:
    """The best that was measured: bytes per second into the device's memory, FLOPs per second of a large matmul."""

    copy_bytes_s: float
    flops_s: float

    def or_better(self, other: Rates) -> Rates:
        """The better of each: what the machine can do at its best moment bounds every other."""
        return Rates(max(self.copy_bytes_s, other.copy_bytes_s), max(self.flops_s, other.flops_s))

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """Copying and computing may go on at once: the longer of the two."""
        return max(num_bytes / self.copy_bytes_s, flops / self.flops_s)


def measure_rates(device: str, dtype: str) -> Rates:
    """Measure both rates now; on CUDA the copy starts in pinned memory. The matmul is that of the models' layers."""
    on_cuda = device.startswith("cuda")
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=on_cuda)
    there = torch.empty_like(host, device=device)
    size = _SIZE["cuda" if on_cuda else "cpu"]
    rows, weight = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
    copy_s = _best_s(lambda: there.copy_(host, non_blocking=True), device)
    matmul_s = _best_s(lambda: linear(rows, weight), device)
    return Rates(_COPY_BYTES / copy_s, 2 * size**3 / matmul_s)


def _best_s(run: Callable[[], Any], device: str) -> float:
    """The seconds of the fastest run; the first is a warm-up. What takes long is run once more only."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _RUNS and sum(seconds) < _LONG_S):
        started = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def link_flops(model: Model, rows: RowMask, checked: Sequence[int], num_context: int) -> float:
    """FLOPs that the rows [layers, n] of a link need: 2 per weight and row, 4 · heads · head_dim per row and key.

    At a checked layer all its rows need K and V, and only those that go on, which are the rows of the next layer, need
    the rest. Of the last layer only the tail's are known to go on.
    """
    sizes = _Sizes.of(model)
    tail = np.arange(rows.shape[1]) >= num_context
    flops = 2.0 * sizes.vocab * sizes.hidden  # the logits of one row
    for layer, on in enumerate(rows):
        goes_on = on if layer not in checked else rows[layer + 1] if layer + 1 < len(rows) else on & tail
        flops += 2.0 * sizes.kv * on.sum() + 2.0 * (sizes.layer - sizes.kv) * goes_on.sum()
        flops += 4.0 * sizes.query * _keys(goes_on, window_of(model.config, layer))
    return float(flops)


def _keys(rows: RowMask, window: int | None) -> float:
    """The keys that the rows attend to, all together: a row at p has p + 1, or the window's."""
    keys = np.flatnonzero(rows) + 1
    return float((np.minimum(keys, window) if window else keys).sum())


def window_of(config: Any, layer: int) -> int | None:
    """The sliding window of a layer, if it has one."""
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    if types and types[layer] == "full_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window


@dataclass(frozen=True)
class _Sizes:
    """Weights of a layer's matrices, of its K and V projections; heads · head_dim of the queries."""

    layer: int
    kv: int
    query: int
    hidden: int
    vocab: int

    @classmethod
    def of(cls, model: Model) -> _Sizes:
        config, geometry = model.config, model.geometry
        matrices = [p.numel() for p in model.module.model.layers[0].parameters() if p.dim() == 2]
        kv = 2 * config.hidden_size * geometry.kv_heads * geometry.head_dim
        query = config.num_attention_heads * geometry.head_dim
        return cls(sum(matrices), kv, query, config.hidden_size, config.vocab_size)
