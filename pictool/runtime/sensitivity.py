"""Probes: prefixes that a model wrote itself, behind which chunks are measured (`fixups.py`).

Text of the model's own distribution names what its documents name, so a chunk that goes on from something finds what it
goes on from; behind random tokens it rarely does. Probes depend on the model only, are made once, and kept.

Tables of fixups: how much every token's KV depends on what precedes its chunk, measured at compile time.

A chunk is prefilled behind each of a model's probes. A token's score is

    (1 - p) · the highest, over layers and KV heads, of var(key) / spread(key)

var is the variance of the token's un-rotated key over the probes. spread is that of the head's keys over tokens, a
constant of the model, so that heads, layers and chunks are comparable. p is the probability that the model gives the
token where it stands, the mean over the probes: what can be predicted is looked up by no reader.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from pictool.runtime.attention import Run
from pictool.runtime.fingerprint import cache_dir
from pictool.runtime.prefill import batch_tokens, plan_batches, prefill_padded
from pictool.runtime.stack import LayerStack, Tables
from pictool.runtime.support import depends_on_length

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


Table = NDArray[np.float16]
_LOGIT_ROWS = 256  # rows whose logits are in memory at once


def fixup_tables(
    model: Model, probes: Probes, chunks: Sequence[Sequence[int]], alone: bool = False
) -> Iterator[tuple[int, Table]]:
    """Measure chunks; yields (index of the chunk, its table, float16 [n]) as they get ready. All probes share a batch.

    `alone`: no two chunks do.
    """
    # Padding would change the frequencies of a RoPE that depends on the length: such chunks go alone.
    budget = 1 if alone or depends_on_length(model.config) else max(1, batch_tokens(model) // len(probes.tokens))
    for batch in plan_batches([len(chunk) for chunk in chunks], budget):
        scores = _measure(model.stack, probes, [chunks[index] for index in batch])
        for row, index in zip(scores, batch, strict=True):
            yield index, row[: len(chunks[index])].clamp_max(torch.finfo(torch.float16).max).numpy().astype("<f2")


@torch.inference_mode()
def _measure(stack: LayerStack, probes: Probes, chunks: Sequence[Sequence[int]]) -> Tensor:
    """Scores, float32 [chunks, longest], on the CPU. The probes' last token is run again: it predicts the first."""
    count, before, longest = len(probes.tokens), probes.length - 1, max(map(len, chunks))
    padded = torch.tensor([[*chunk, *[chunk[-1]] * (longest - len(chunk))] for chunk in chunks], device=stack.device)
    tokens = torch.cat([probes.tokens[:, before:].repeat(len(chunks), 1), padded.repeat_interleave(count, 0)], 1)
    positions = torch.arange(before + 1 + longest, device=stack.device)
    behind = _Behind(stack, probes, stack.tables(positions), len(chunks))
    runs, hidden = (Run(0, before, len(positions)),), stack.embed(tokens)
    for layer in range(stack.num_layers):
        hidden = stack.layer(layer, hidden, behind, behind.tables, runs)
    return (behind.dependence() * _novelty(stack, hidden, tokens, count)).cpu()


def _novelty(stack: LayerStack, hidden: Tensor, tokens: Tensor, count: int) -> Tensor:
    """1 - p of every chunk's tokens, float32 [chunks, longest]; p is the mean over the `count` probes."""
    rows, wanted = hidden[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    parts = zip(torch.split(rows, _LOGIT_ROWS), torch.split(wanted, _LOGIT_ROWS), strict=True)
    surprise = [torch.nn.functional.cross_entropy(stack.logits(part), to, reduction="none") for part, to in parts]
    return 1 - torch.exp(-torch.cat(surprise)).view(-1, count, tokens.shape[1] - 1).mean(1)


class _Behind:
    """The cache interface of a decoder layer for [chunks · probes] sequences, whose probes' KV is there already."""

    def __init__(self, stack: LayerStack, probes: Probes, tables: Tables, chunks: int) -> None:
        self._stack, self._probes, self._chunks = stack, probes, chunks
        self._before = probes.length - 1
        self._all = tables
        self.tables = {kind: (cos[:, self._before :], sin[:, self._before :]) for kind, (cos, sin) in tables.items()}
        self._highest = torch.zeros(chunks, 1, device=stack.device)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer:  # layer 0 depends on no context
            self._highest = torch.maximum(self._highest, self._share(key, layer).amax(1))
        key = torch.cat([self._of_probes(self._probes.layers[layer][0]), key], 2)
        value = torch.cat([self._of_probes(self._probes.layers[layer][1]), value], 2)
        return self._stack.rope.rotate(key, self._stack.table(self._all, layer)), value

    def dependence(self) -> Tensor:
        """float32 [chunks, longest]."""
        return self._highest

    def _share(self, key: Tensor, layer: int) -> Tensor:
        """The variance over probes as a share of that over tokens, float32 [chunks, kv_heads, longest]."""
        fresh = key[:, :, 1:].float()
        each: Tensor = fresh.view(self._chunks, -1, *fresh.shape[1:]).var(1, correction=0).sum(-1)
        return each / self._probes.spread[layer][:, None]

    def _of_probes(self, held: Tensor) -> Tensor:
        return held[:, :, : self._before].repeat(self._chunks, 1, 1, 1)
