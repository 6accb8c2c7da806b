"""What else could be done to a decoder layer on a CPU, from end to end: packed weights, joined products, fusions.

    python -m benchmarks.layer_variants --out benchmarks/results/layer_variants.json

Each variant is a model of its own with the same random weights, changed in place; requests of `pic bench`'s form
go to one after another, so that a slow moment of the machine meets all. Ratios are the model as it is ÷ the variant,
medians of the repeats' ratios: above 1 the variant is faster.

- packed: weights of large linear layers in oneDNN's own order, in place of the plain ones. What is packed cannot be
  read any more, and is as large; how long packing takes is told.
- joined: one product for queries, keys and values, and one for the gate and what it gates.
- fused: `torch.nn.functional.rms_norm`, and the gate's product in place.
- compiled: `torch.compile` of norms and of the gate, as functions of any number of rows; the first request
  compiles them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.output import write_results
from pictool.bench.options import PromptOptions
from pictool.bench.prompts import BenchPrompt, make_prompt
from pictool.bench.repeats import MedianRange, interleave, median_ratio
from pictool.bench.shapes import random_model
from pictool.bench.single_request import Measurement, run_linked
from pictool.linker.grid import LabelledPolicy, parse_grid
from pictool.runtime.model import Model

ALGOS = ("legolink-16", "naive")
PLAIN = "as it is"
_PACKED_ROWS = 144  # that oneDNN is told to expect
_MIN_WEIGHTS = 1 << 18


class PackedLinear(nn.Module):
    """A linear layer whose weight is in oneDNN's order."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _PACKED_ROWS)
        self.bias = plain.bias

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return product


class JoinedLinear(nn.Module):
    """Several linear layers of the same input as one product; the first is called first, the others take its rest."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        self.weight = torch.cat([part.weight.detach() for part in parts])
        biases = [part.bias for part in parts]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.sizes, self.rest = [part.out_features for part in parts], list[Tensor]()

    def forward(self, rows: Tensor) -> Tensor:
        product: Tensor = linear(rows, self.weight, self.bias)
        first, *self.rest = torch.split(product, self.sizes, dim=-1)
        return first

    def rest_of(self) -> list[Tensor]:
        return self.rest


class Rest(nn.Module):
    """A part of a `JoinedLinear` that is not its first."""

    def __init__(self, joined: JoinedLinear) -> None:
        super().__init__()
        self._rest = joined.rest_of

    def forward(self, rows: Tensor) -> Tensor:
        return self._rest().pop(0)


Normed = Callable[[Tensor, tuple[int, ...], Tensor, float], Tensor]
Gated = Callable[[Tensor, Tensor], Tensor]


def gated_in_place(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate, inplace=True).mul_(up)


def pack(module: nn.Module) -> None:
    """Pack the large linear layers, but for the head, whose weights are the embedding's."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head" and child.weight.numel() >= _MIN_WEIGHTS:
                setattr(parent, name, PackedLinear(child))


def join(module: nn.Module) -> None:
    for layer in module.model.layers:  # type: ignore[union-attr]
        for parent, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
            joined = JoinedLinear([getattr(parent, name) for name in names])
            for name in names:
                setattr(parent, name, joined if name == names[0] else Rest(joined))


def fuse(module: nn.Module, normed: Normed = rms_norm, gated: Gated = gated_in_place) -> None:
    for part in module.modules():
        kind = type(part).__name__
        if kind.endswith("RMSNorm"):
            part.forward = partial(_normed, part, normed)
        elif kind.endswith("MLP"):
            part.forward = partial(_gated, part, gated)


def _normed(norm: Any, normed: Normed, rows: Tensor) -> Tensor:
    return normed(rows, (rows.shape[-1],), norm.weight, norm.variance_epsilon)


def _gated(mlp: Any, gated: Gated, rows: Tensor) -> Tensor:
    product: Tensor = mlp.down_proj(gated(mlp.gate_proj(rows), mlp.up_proj(rows)))
    return product


def compile_parts(module: nn.Module) -> None:
    fuse(module, torch.compile(plain_norm, dynamic=True), torch.compile(lambda gate, up: silu(gate) * up, dynamic=True))


def plain_norm(rows: Tensor, shape: tuple[int, ...], weight: Tensor, epsilon: float) -> Tensor:
    """As the norms of `transformers`."""
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(rows.dtype)


VARIANTS: dict[str, Callable[[nn.Module], None]] = {
    "packed": pack, "joined": join, "fused": fuse, "compiled": compile_parts
}  # fmt: skip


def measure(
    models: dict[str, Model], prompt: BenchPrompt, policy: LabelledPolicy, repeats: int
) -> dict[str, dict[str, float]]:
    """Seconds and ratios of each variant, under one policy."""
    runs: dict[str, Callable[[], Measurement]] = {
        name: partial(run_linked, model, prompt, policy.policy, 0) for name, model in models.items()
    }
    samples = {name: [one.ttft_s for one in several] for name, several in interleave(runs, repeats).items()}
    return {
        name: {
            "ttft_ms": 1e3 * MedianRange.of(seconds).median,
            "ratio": median_ratio(samples[PLAIN], seconds),
        }
        for name, seconds in samples.items()
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--out", type=Path, help="the results file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models = {PLAIN: random_model(options.shape, "cpu", options.dtype)}
    with tempfile.TemporaryDirectory() as directory:
        policies = parse_grid(list(ALGOS))
        prompt = make_prompt(models[PLAIN], policies, PromptOptions(chunks=options.chunks), Path(directory))
        changed_s, first_s = dict[str, float](), dict[str, float]()
        for name in options.variants:
            models[name] = random_model(options.shape, "cpu", options.dtype)
            assert models[name].target == models[PLAIN].target  # taken of plain weights, so objects are shared
            began = time.perf_counter()
            VARIANTS[name](models[name].module)
            changed_s[name] = time.perf_counter() - began
            began = time.perf_counter()
            run_linked(models[name], prompt, policies[-1].policy, 0)
            first_s[name] = time.perf_counter() - began
        found = {policy.label: measure(models, prompt, policy, options.repeats) for policy in policies}
    print(changed_s, first_s, found, sep="\n")
    if options.out is not None:
        settings = {name: getattr(options, name) for name in ("shape", "dtype", "threads", "repeats", "chunks")}
        write_results(options.out, {**settings, "changed_s": changed_s, "first_s": first_s, "policies": found})


if __name__ == "__main__":
    main()
