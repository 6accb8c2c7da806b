"""Tables of fixups: how much every token's KV depends on what precedes its chunk, measured at compile time.

A chunk is prefilled behind each of a model's probes. A token's score is

    (1 - p) · the highest, over layers and KV heads, of var(key) / spread(key)

var is the variance of the token's un-rotated key over the probes. spread is that of the head's keys over tokens, a
constant of the model, so that heads, layers and chunks are comparable. p is the probability that the model gives the
token where it stands, the mean over the probes: what can be predicted is looked up by no reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.runtime.attention import Run
from pictool.runtime.prefill import batch_tokens, plan_batches
from pictool.runtime.probes import Probes
from pictool.runtime.stack import LayerStack, Tables
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from pictool.runtime.model import Model

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
