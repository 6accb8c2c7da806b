"""An image: a linked prompt, its KV of every layer, and the logits of the first token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pictool.core import Layout
from pictool.runtime.attention import Rows, Run
from pictool.runtime.stack import LayerStack, Tables

_GROWTH = 256


class Image:
    """KV of a prompt, filled layer by layer; position j of the prompt is row j of every buffer.

    Keys in the buffers are rotated to their positions. What is put in is copied: sources are never written to.
    """

    def __init__(self, stack: LayerStack, layout: Layout) -> None:
        self.stack, self.layout = stack, layout
        self.num_tokens = layout.num_tokens
        positions = torch.arange(self.num_tokens, device=stack.device)
        self._tables = stack.tables(positions)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.logits: Tensor | None = None  # float32 [vocab], at the last prompt token

    def key(self, layer: int) -> Tensor:
        """Rotated keys of a layer, [1, kv_heads, n, head_dim]."""
        return self._keys[layer][:, :, : self.num_tokens]

    def value(self, layer: int) -> Tensor:
        """Values of a layer, [1, kv_heads, n, head_dim]."""
        return self._values[layer][:, :, : self.num_tokens]

    def place(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Relocate a chunk's un-rotated `key` and its `value` [kv_heads, tokens, head_dim] to position `start`."""
        self._require_layer(layer, key.shape[0], key.shape[2])
        end = start + key.shape[1]
        cos, sin = self.stack.table(self._tables, layer)
        rotated = self.stack.rope.rotate(key[None], (cos[:, start:end], sin[:, start:end]))
        self._keys[layer][:, :, start:end] = rotated
        self._values[layer][:, :, start:end] = value

    def compute(self, layer: int, hidden: Tensor, rows: Rows) -> Tensor:
        """Run a layer on the hidden states [1, rows, hidden] of `rows`; their K and V replace what stood there."""
        tables = {kind: (cos[:, rows.positions], sin[:, rows.positions]) for kind, (cos, sin) in self._tables.items()}
        return self._run(layer, hidden, tables, rows.runs)

    def append(self, token: int) -> Tensor:
        """Put one token behind the prompt and compute it through all layers; returns its logits, float32 [vocab]."""
        position = self.num_tokens
        self.num_tokens += 1
        at = torch.tensor([position], device=self.stack.device)
        tables, runs = self.stack.next_tables(at), (Run(0, position, position + 1),)
        hidden = self.stack.embed(torch.tensor([[token]], device=self.stack.device))
        for layer in range(self.stack.num_layers):
            hidden = self._run(layer, hidden, tables, runs)
        return self.stack.logits(hidden[0])[0]

    def _run(self, layer: int, hidden: Tensor, tables: Tables, runs: tuple[Run, ...]) -> Tensor:
        cache = _ImageCache(self, tables, runs)
        return self.stack.layer(layer, hidden, cache, tables, runs)

    def _require_layer(self, layer: int, kv_heads: int, head_dim: int) -> None:
        """Allocate the buffers of a layer, or let them grow by whole steps when decoding has filled them."""
        if layer == len(self._keys):
            shape = (1, kv_heads, self.num_tokens + _GROWTH, head_dim)
            for buffers in (self._keys, self._values):
                buffers.append(torch.zeros(shape, dtype=self.stack.dtype, device=self.stack.device))
        elif self._keys[layer].shape[2] < self.num_tokens:
            for buffers in (self._keys, self._values):
                old = buffers[layer]
                step = max(_GROWTH, old.shape[2] // 4)
                buffers[layer] = torch.cat([old, old.new_zeros(1, kv_heads, step, head_dim)], dim=2)


class _ImageCache:
    """The cache interface of a decoder layer over an image's buffers, for one set of rows."""

    def __init__(self, image: Image, tables: Tables, runs: tuple[Run, ...]) -> None:
        self._image, self._tables, self._runs = image, tables, runs

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        image = self._image
        image._require_layer(layer, key.shape[1], key.shape[3])
        key = image.stack.rope.rotate(key, image.stack.table(self._tables, layer))
        for run in self._runs:
            rows = slice(run.row, run.row + run.end - run.start)
            image._keys[layer][:, :, run.start : run.end] = key[:, :, rows]
            image._values[layer][:, :, run.start : run.end] = value[:, :, rows]
        return image.key(layer), image.value(layer)
