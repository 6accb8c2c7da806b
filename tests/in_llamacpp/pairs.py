"""Tiny models as GGUF files, each beside the same weights on `transformers`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf_files
import tiny
import torch

from pictool.engines.llamacpp.model import GgufModel, open_gguf
from pictool.store.store import Store

TOLERANCE, GELU = 5e-5, 3e-3  # of logits; ggml reads GELU from a table of float16 numbers
NAMES = [*gguf_files.CONFIGS, "gemma3-attention"]


@dataclass(frozen=True)
class Pair:
    """A model as a GGUF file, and on transformers. `tolerance` is of logits."""

    model: GgufModel
    module: Any
    store: Store
    tolerance: float


def make_pair(directory: Path, name: str) -> Pair:
    module = gguf_files.random_module(name.removesuffix("-attention"))
    if name.endswith("-attention"):  # without what is not float32 in llama.cpp itself
        for layer in module.model.layers:
            torch.nn.init.zeros_(layer.mlp.gate_proj.weight)
    path = gguf_files.write_gguf(directory / f"{name}.gguf", module, tiny.tokenizer())
    model = open_gguf(str(path), dtype="float32")
    return Pair(
        model, gguf_files.reference_module(module), Store(directory / "store"), GELU if name == "gemma3" else TOLERANCE
    )
