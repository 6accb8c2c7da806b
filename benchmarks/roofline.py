"""The roofline of a link: no link is faster than its bytes by the copy rate, or its FLOPs by the matmul rate.

    OMP_NUM_THREADS=2 python -m benchmarks.roofline --shape qwen2.5-0.5b --dtype bfloat16    # the floors of `pic bench`

Both rates are measured. Bytes are those that the loader reads from objects; the copy is one into the device's memory
(on a CPU, from memory to memory). FLOPs are those of the target's rows, without what selects rows (a small model,
comparing).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import linear

from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt, with_speculative
from pictool.bench.shapes import random_model, save_speculative
from pictool.bench.single_request import link_prompt
from pictool.core import RowMask
from pictool.linker.grid import parse_grid
from pictool.linker.policies.base import Policy
from pictool.runtime import architectures
from pictool.runtime.device import is_accelerator, synchronize
from pictool.runtime.memory.streams import host_buffer
from pictool.runtime.products import onednn_linear, onednn_wins

if TYPE_CHECKING:
    from pictool.runtime.model import Model

POLICIES = ("full", "naive", "legolink-16", "cacheblend-15", "speccache-15")
_COPY_BYTES = 1 << 28
_ALL_EXPERTS = (
    "llama4_text",
)  # of these `transformers` computes a row by all experts, and adds up those that were chosen
_SIZE, _SIZE_ON_ACCELERATOR = 2048, 8192  # of the square matrices that are multiplied
_RUNS, _LONG_S = 5, 3.0


@dataclass(frozen=True)
class Rates:
    """The best that was measured: bytes per second into the device's memory, FLOPs per second of a large matmul."""

    copy_bytes_s: float
    flops_s: float

    def roofline_s(self, num_bytes: float, flops: float) -> float:
        """The least seconds of so many bytes and FLOPs: copying and computing overlap, so the longer of the two."""
        return max(num_bytes / self.copy_bytes_s, flops / self.flops_s)


def measure_rates(device: str, dtype: str) -> Rates:
    """Measure both rates: a copy from host memory (pinned, on an accelerator), and the matmul of the models' layers."""
    host = host_buffer(_COPY_BYTES, torch.device(device)).fill_(1)
    copied = torch.empty_like(host, device=device)
    copy_s = _best_s(lambda: copied.copy_(host, non_blocking=True), device)
    return Rates(_COPY_BYTES / copy_s, measure_matmul(device, dtype))


def measure_matmul(device: str, dtype: str) -> float:
    """FLOPs per second of a large matmul, the fastest way that the models' layers have it."""
    size = _SIZE_ON_ACCELERATOR if is_accelerator(device) else _SIZE
    rows, weight = torch.randn(2, size, size, device=device).to(getattr(torch, dtype))
    seconds = _best_s(lambda: linear(rows, weight), device)
    if (device, dtype) == ("cpu", "float32") and onednn_wins():
        seconds = min(seconds, _best_s(lambda: onednn_linear(rows, weight), device))
    return 2 * size**3 / seconds


def _best_s(run: Callable[[], Any], device: str) -> float:
    """The seconds of the fastest run, after a warm-up. A run that takes long is repeated only once."""
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _RUNS and sum(seconds) < _LONG_S):
        started = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def link_flops(model: Model, rows: RowMask, checked: Sequence[int]) -> float:
    """FLOPs of the rows [layers, n] of a link: 2 per weight and row, 4 · heads · head_dim per row and key.

    At a checked layer K and V are computed for all its rows, and the rest only for the rows that are kept: those of the
    next layer. Of the last layer nothing needs more than K and V, but of the last row.
    """
    sizes = _Sizes.of(model)
    flops = 2.0 * sizes.vocab * sizes.hidden  # the logits of one row
    is_last = np.arange(rows.shape[1]) == rows.shape[1] - 1
    for layer, on in enumerate(rows):
        kept = is_last if layer + 1 == len(rows) else rows[layer + 1] if layer in checked else on
        flops += 2.0 * sizes.kv * on.sum() + 2.0 * (sizes.layer - sizes.kv) * kept.sum()
        flops += 4.0 * sizes.query * _keys(kept, window_of(model.config, layer))
    return float(flops)


def _keys(rows: RowMask, window: int | None) -> float:
    """The number of keys that all rows attend to: p + 1 for a row at position p, at most the window."""
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
    """Weights that a row is multiplied with at a layer (the mean), those of K and V, and the width of its queries."""

    layer: int
    kv: int
    query: int
    hidden: int
    vocab: int

    @classmethod
    def of(cls, model: Model) -> _Sizes:
        config, layers = model.config, architectures.decoder_of(model.module).layers
        computed = count_weights(model.module, config)
        kv, query = config.hidden_size * model.geometry.width, query_width(config)
        return cls(computed // len(layers), kv, query, config.hidden_size, config.vocab_size)


def query_width(config: Any) -> int:
    """Numbers in a row's queries, of all heads."""
    key, *_ = parts = architectures.architecture_of(config).parts(config)
    rotated = next(part for part in parts if part.rotated)
    width = key.width if key is rotated else config.qk_nope_head_dim + rotated.width
    return int(config.num_attention_heads * width)


def chosen_experts(config: Any) -> int:
    """How many experts compute a row; 1 of a dense model."""
    names = ("num_experts_per_tok", "moe_k", "top_k")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 1)


def count_weights(module: Any, config: Any) -> int:
    """The weights that a row is multiplied with in all layers."""
    architectures.require_no_states(config, "forecasts of speed")
    layers = architectures.decoder_of(module).layers
    weights = (pair for layer in layers for pair in layer.named_parameters())
    return sum(computed_with(name, weight, config) for name, weight in weights)


def computed_with(name: str, weight: torch.Tensor, config: Any) -> int:
    """How many numbers of a weight a row is multiplied with: of a stack of experts those that compute it."""
    if weight.dim() < 2 or name.endswith("bias"):
        return 0
    is_chosen = weight.dim() == 3 and config.model_type not in _ALL_EXPERTS
    return round(weight.numel() * (chosen_experts(config) / len(weight) if is_chosen else 1))


def prompt_flops(model: Model, prompt: BenchPrompt, policy: Policy) -> float:
    """The FLOPs of linking a prompt."""
    rows = link_prompt(model, prompt, policy, is_cold=False).rows
    return link_flops(model, rows, policy.check_layers(len(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    model = random_model(options.shape, dtype=options.dtype)
    rates = measure_rates(model.device, model.dtype)
    print(f"copy {rates.copy_bytes_s / 1e9:.1f} GB/s, matmul {rates.flops_s / 1e12:.3g} TFLOP/s ({model.dtype})")
    with tempfile.TemporaryDirectory() as inside:
        small = save_speculative(options.shape, f"{inside}/speculative")
        policies = with_speculative(parse_grid(POLICIES), small)
        prompt = make_prompt(model, policies, PromptOptions(), Path(inside))
        for labelled in policies:
            linked = link_prompt(model, prompt, labelled.policy, is_cold=False)
            floor_s = rates.roofline_s(linked.bytes_read, prompt_flops(model, prompt, labelled.policy))
            print(f"{labelled.label:<16} floor {floor_s:.3f} s")


if __name__ == "__main__":
    main()
