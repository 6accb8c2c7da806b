"""Probes: prefixes that a model wrote itself, behind which chunks are measured (`fixups.py`).

Text of the model's own distribution names what its documents name, so a chunk that goes on from something finds what it
goes on from; behind random tokens it rarely does. Probes depend on the model only, are made once, and kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from blake3 import blake3
from torch import Tensor

from pictool.runtime.attention import Run
from pictool.runtime.fingerprint import cache_dir
from pictool.runtime.prefill import prefill_padded
from pictool.runtime.stack import LayerStack, Tables

if TYPE_CHECKING:
    from pictool.runtime.model import Model

_WRITTEN = 3  # times a probe's length is written, so that it can be cut where a line ends
_DIGEST = 32

KV = list[tuple[Tensor, Tensor]]  # per layer un-rotated key and value, [probes, kv_heads, length, head_dim]


@dataclass(frozen=True)
class Probes:
    """Prefixes [probes, length] (int64) of one model, and their KV. Each ends with a line break if one was written."""

    tokens: Tensor
    layers: KV

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def spread(self) -> list[Tensor]:
        """Per layer the variance of keys over the probes' tokens, float32 [kv_heads]: by how much keys differ at all.

        Less each probe's first token, an outlier.
        """
        each = [key[:, :, 1:].float().transpose(0, 1).flatten(1, 2) for key, _ in self.layers]
        smallest = torch.finfo(torch.float32).tiny
        return [key.var(1, correction=0).sum(-1).clamp_min(smallest) for key in each]


_kept: WeakKeyDictionary[Model, dict[tuple[int, int], Probes]] = WeakKeyDictionary()


def probes_of(model: Model, count: int, length: int) -> Probes:
    """The model's `count` probes of `length` tokens: of this process, kept on disk, or made now and kept."""
    kept = _kept.setdefault(model, {})
    if (count, length) not in kept:
        path = _path(model, count, length)
        found = _read(path, model)
        if found is None:
            found = make_probes(model, count, length)
            _write(path, found)
        kept[count, length] = found
    return kept[count, length]


def make_probes(model: Model, count: int, length: int) -> Probes:
    """Let the model write `count` texts, sampled with a seed that is its fingerprint, and cut them where lines end."""
    seed = int.from_bytes(hashlib.sha256(f"probes {model.fingerprint}".encode()).digest()[:8], "little", signed=True)
    written = min(_WRITTEN * length, model.max_positions)
    texts = write_texts(model, count, written, torch.Generator().manual_seed(seed))
    return probes_from(model, cut_at_lines(model, texts, length))


def probes_from(model: Model, tokens: Tensor) -> Probes:
    """Probes of given prefixes, int64 [probes, length]."""
    tokens = tokens.to(model.stack.device)
    return Probes(tokens, prefill_padded(model.stack, tokens))


@torch.inference_mode()
def write_texts(model: Model, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts of the model itself, int64 [count, length]: sampled at temperature 1 from its first token on."""
    stack, first = model.stack, _first_token(model)
    tokens = torch.full((count, 1), first)
    cache = _Growing(stack)
    while tokens.shape[1] < length:
        logits = cache.append(tokens[:, -1:].to(stack.device)).cpu()
        logits[:, sorted({first, *model.eos_ids})] = float("-inf")
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)
    return tokens


def cut_at_lines(model: Model, texts: Tensor, length: int) -> Tensor:
    """Of every text its first token and the `length` - 1 that end with a line; its last ones, if no line ends there."""
    cut = []
    for text in texts.tolist():
        ends = (at for at in range(length - 1, len(text)) if _is_line_end(model, text[at]))
        end = next(ends, len(text) - 1) + 1
        cut.append([text[0], *text[end - length + 1 : end]])
    return torch.tensor(cut)


def _first_token(model: Model) -> int:
    """BOS; what ends a text, for models that begin with none (Qwen2)."""
    return model.bos_id if model.bos_id is not None else min(model.eos_ids, default=0)


def _is_line_end(model: Model, token: int) -> bool:
    return str(model.tokenizer.decode([token])).endswith("\n")


class _Growing:
    """The cache interface of a decoder layer over texts that grow by a token at a time."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack, self._length = stack, 0
        self._tables: Tables = {}
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, tokens: Tensor) -> Tensor:
        """Compute one token of every text, int64 [texts, 1]; returns the logits behind it, float32 [texts, vocab]."""
        stack, at = self._stack, torch.tensor([self._length], device=self._stack.device)
        self._tables = stack.next_tables(at) if self._length else stack.tables(at)
        runs, hidden = (Run(0, self._length, self._length + 1),), stack.embed(tokens)
        for layer in range(stack.num_layers):
            hidden = stack.layer(layer, hidden, self, self._tables, runs)
        self._length += 1
        return stack.logits(hidden[:, -1])

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        key = self._stack.rope.rotate(key, self._stack.table(self._tables, layer))
        if layer in self._layers:
            old_key, old_value = self._layers[layer]
            key, value = torch.cat([old_key, key], 2), torch.cat([old_value, value], 2)
        self._layers[layer] = key, value
        return key, value


def _path(model: Model, count: int, length: int) -> Path:
    name = f"{model.target} {model.device} {count} {length} 1"
    return cache_dir() / "probes" / f"{hashlib.sha256(name.encode()).hexdigest()}.safetensors"


def _read(path: Path, model: Model) -> Probes | None:
    """What was kept; None if there is nothing whole."""
    from safetensors.torch import load

    try:
        data = path.read_bytes()
    except OSError:
        return None
    if blake3(data[_DIGEST:]).digest() != data[:_DIGEST]:
        return None
    held = {name: tensor.to(model.device) for name, tensor in load(data[_DIGEST:]).items()}
    layers = [(held[f"{layer}.key"], held[f"{layer}.value"]) for layer in range(model.geometry.layers)]
    return Probes(held["tokens"], layers)


def _write(path: Path, probes: Probes) -> None:
    """Keep probes; a cache directory that cannot be written only costs time."""
    from safetensors.torch import save

    held = {"tokens": probes.tokens.cpu()}
    for layer, (key, value) in enumerate(probes.layers):
        held |= {f"{layer}.key": key.cpu().contiguous(), f"{layer}.value": value.cpu().contiguous()}
    data = save(held)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False, suffix=".tmp") as file:
            file.write(blake3(data).digest() + data)
        os.replace(file.name, path)
    except OSError:
        return
