"""An image: a linked prompt, its KV of every layer, and the logits of the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pictool.core import Layout, RowMask
from pictool.runtime.device import is_accelerator
from pictool.runtime.memory.caches import LayerKV, PassThroughCache, StatefulCache
from pictool.runtime.memory.staged import StagedLayers, StagedPart
from pictool.runtime.memory.states import ImageStates, LinearState
from pictool.runtime.rope import RotaryTables, tables_at
from pictool.runtime.rows import DeviceRows, Rows, Run
from pictool.runtime.stack import LayerStack

GROWTH = 256  # tokens that the buffers have room for after the prompt
_MANY_RUNS = 16  # scattered rows: one indexed copy is faster than a copy per run
# Rows that a CPU computes at a time. What is between two steps of a layer stays in its caches then, in memory that is
# used again; larger tensors are fresh pages of the system's for each step.
_AT_ONCE = 512


class Image:
    """KV of a prompt, filled layer by layer; position j of the prompt is row j of every buffer.

    A layer's buffers are its keys and values, or the other two parts that it keeps (`Geometry.parts`), which are then
    called so, too. What is rotated is rotated to its position. `fill` and `write` copy: they never write to their
    sources. Different layers may be filled by different threads. Of a hybrid, layers that are filled are counted among
    those with K and V, and `states` are those of its linear layers, which are computed in ascending order.
    """

    def __init__(self, stack: LayerStack, layout: Layout) -> None:
        self.stack, self.layout = stack, layout
        self.num_tokens = layout.num_tokens
        self._tables = self._all_tables()
        self._keys, self._values = self._buffers(self.num_tokens + GROWTH)
        self.states: ImageStates | None = None
        if stack.geometry.states is not None:
            zero = LinearState.zero(stack.geometry.states, torch.empty(0, dtype=stack.dtype, device=stack.device))
            self.states = ImageStates(
                zero, [layer for layer, index in enumerate(stack.state_index) if index is not None]
            )
        self.logits: Tensor | None = None  # float32 [vocab], at the last prompt token
        # Per layer, the keys (or the other rotated part) of the rows computed there as they were before rotation, if
        # `keep_keys` was called: [1, kv_heads, rows, head_dim]
        self.fresh_keys: list[Tensor] | None = None
        self._last_tables: tuple[Rows, RotaryTables] | None = None  # of the rows of the last pass

    def _all_tables(self) -> RotaryTables:
        """RoPE tables of the prompt's positions."""
        return self.stack.rotary_tables(torch.arange(self.layout.num_tokens, device=self.stack.device))

    def _buffers(self, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each layer, [1, kv_heads, tokens, head_dim]. No position is read before it is written."""
        stack = self.stack
        shapes = [(1, part.heads, tokens, part.width) for part in stack.geometry.parts]
        keys, values = (
            [torch.empty(shape, dtype=stack.dtype, device=stack.device) for _ in range(stack.geometry.layers)]
            for shape in shapes
        )
        return keys, values

    def key(self, layer: int) -> Tensor:
        """Rotated keys of a layer, [1, kv_heads, n, head_dim]."""
        return self._keys[layer][:, :, : self.num_tokens]

    def value(self, layer: int) -> Tensor:
        """Values of a layer, [1, kv_heads, n, head_dim]."""
        return self._values[layer][:, :, : self.num_tokens]

    @property
    def keeps_keys(self) -> bool:
        """Whether un-rotated keys are kept of the rows that are computed."""
        return self.fresh_keys is not None

    def keep_keys(self) -> None:
        """Keep the un-rotated keys of the rows that are computed from now on, so that they can be stored."""
        self.fresh_keys = []

    def take_fresh(self, layer: int, key: Tensor, rows: Rows) -> None:
        """Keep the un-rotated `key` [1, kv_heads, rows, head_dim] of rows that are computed, if that is asked for."""
        if self.fresh_keys is not None:
            self.fresh_keys.append(key)

    def places(self, layer: int, start: int, end: int) -> LayerKV:
        """Where a chunk's un-rotated key and its value [kv_heads, tokens, head_dim] are to be copied to."""
        return self._keys[layer][0, :, start:end], self._values[layer][0, :, start:end]

    def fill(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Copy rotated `key` and `value` [kv_heads, tokens, head_dim] to position `start`."""
        end = start + key.shape[1]
        self._keys[layer][0, :, start:end], self._values[layer][0, :, start:end] = key, value

    def relocate(self, layer: int, start: int, end: int) -> None:
        """Rotate the keys that were copied to places in [start, end) to their positions; to be called once."""
        keys = self.stack.by_rotation(self._keys[layer], self._values[layer])[0][:, :, start:end]
        tables = tables_at(self._tables, slice(start, end))
        keys.copy_(self.stack.rotate(keys, tables, self.stack.kv_layers[layer]))

    def stage(self, parts: Sequence[StagedPart]) -> StagedLayers | None:
        """What puts objects' layers to their places by one copy and one replay each; None: `places` and `relocate` do.

        The image must be ready to be written to by what the current stream does next.
        """
        return None

    def begin(self, on: RowMask) -> tuple[Rows, Tensor]:
        """The rows where `on` [n] is true, and what they begin with: hidden states [1, rows, hidden] of tokens."""
        at, device = np.flatnonzero(on), self.stack.device
        tokens = torch.from_numpy(self.layout.tokens[at].astype(np.int64)).to(device)
        return Rows.of(torch.from_numpy(at)).to(device), self.stack.embed(tokens[None])

    def finish(self, hidden: Tensor) -> None:
        """Set the logits of the prompt's last row, by the hidden states that `compute_last` returned."""
        self.logits = self.stack.logits(hidden[0, -1:])[0]

    def compute(
        self, layer: int, hidden: Tensor, rows: Rows, on_scores: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Run a layer on the hidden states [1, rows, hidden] of `rows`; their K and V replace what was there.

        Args:
            on_scores: called with the rows' attention scores, float32 [1, heads, rows, n].
        """
        if self.fresh_keys is None:
            return self._compute_parts(layer, hidden, rows, on_scores)
        earlier, self.fresh_keys = self.fresh_keys, []
        out = self._compute_parts(layer, hidden, rows, on_scores)
        # One of each layer that has keys, in however many parts it was computed.
        own = self.fresh_keys if len(self.fresh_keys) < 2 else [torch.cat(self.fresh_keys, 2)]
        self.fresh_keys = [*earlier, *own]
        return out

    def _compute_parts(
        self, layer: int, hidden: Tensor, rows: Rows, on_scores: Callable[[Tensor], None] | None
    ) -> Tensor:
        if len(rows.positions) <= _AT_ONCE or on_scores is not None or is_accelerator(self.stack.device):
            return self._compute(layer, hidden, rows, on_scores)
        # In ascending order: the K and V that a row attends to are those of its own part and of the ones before.
        apart = zip(torch.split(hidden, _AT_ONCE, 1), rows.split(_AT_ONCE), strict=True)
        return torch.cat([self._compute(layer, *part) for part in apart], 1)

    def _compute(
        self, layer: int, hidden: Tensor, rows: Rows, on_scores: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        if self.states is not None and self.stack.state_index[layer] is not None:
            spans = [span for run in rows.runs for span in self.states.stretches(run.start, run.end)]
            at = torch.split(rows.positions, [end - start for start, end in spans])
            runs = [Rows.one(positions, *span) for positions, span in zip(at, spans, strict=True)]
            apart = zip(torch.split(hidden, [len(run.positions) for run in runs], 1), runs, strict=True)
            return torch.cat(
                [self._advance(layer, *part, tables_at(self._tables, part[1].positions)) for part in apart], 1
            )
        tables = self._tables_of(rows)
        return self.stack.layer(layer, hidden, ImageCache(self, tables, rows), tables, rows.bounds, on_scores)

    def _tables_of(self, rows: Rows) -> RotaryTables:
        """The rotary tables of rows, which mostly are those of the layer before."""
        if self._last_tables is None or self._last_tables[0] is not rows:
            self._last_tables = rows, tables_at(self._tables, rows.positions)
        return self._last_tables[1]

    def _advance(self, layer: int, hidden: Tensor, rows: Rows, tables: RotaryTables) -> Tensor:
        """Run a linear layer on one run of rows, after the state of all that precedes them."""
        assert self.states is not None
        (run,) = rows.runs
        before = self.states.before(layer, run.start)
        cache = StatefulCache(ImageCache(self, tables, rows), layer, before, self.states.inputs)
        out = self.stack.layer(layer, hidden, cache, tables, rows.bounds)
        self.states.move(layer, run.end, cache.state)
        return out

    def compute_last(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Run the last layer: K and V of `rows` replace what was there, and only the prompt's last row goes on.

        Returns its hidden state [1, 1, hidden]; nothing needs those of the other rows. Of a hybrid the states go on.
        """
        if self.states is not None:
            out = self.compute(self.stack.num_layers - 1, hidden, rows)
            self.states.keep()
            return out[:, -1:]
        layer, tables = self.stack.num_layers - 1, self._tables_of(rows)
        fresh = self.stack.project(layer, hidden, tables)
        self.take_fresh(layer, self.stack.by_rotation(*fresh)[0], rows)
        self.write(layer, *self.stack.rotate_parts(fresh, tables, layer), rows)
        end, table = self.layout.num_tokens, tables_at(tables, slice(-1, None))
        return self.stack.layer(layer, hidden[:, -1:], ReadOnlyCache(self), table, (Run(0, end - 1, end),))

    def project(self, layer: int, hidden: Tensor, rows: Rows) -> LayerKV:
        """Fresh K (rotated) and V [1, kv_heads, rows, head_dim] of `rows` at a layer; the image stays as it is."""
        tables = self._tables_of(rows)
        return self.stack.rotate_parts(self.stack.project(layer, hidden, tables), tables, layer)

    def unrotated(self, layer: int, key: Tensor, start: int, end: int) -> LayerKV:
        """K and V of positions [start, end), [kv_heads, n, head_dim]; `key` is the rotated part before rotation."""
        of_image = (self._keys[layer][0, :, start:end], self._values[layer][0, :, start:end])
        return self.stack.by_rotation(key, self.stack.by_rotation(*of_image)[1])

    def deviation(self, layer: int, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Squared L2 over KV heads and dims between K, V of `rows` and what the image holds there; float32 [rows].

        Of latent attention K is the rotated key, and V the latent.
        """
        pairs = ((key, self._keys[layer]), (value, self._values[layer]))
        k, v = ((fresh.float() - old[:, :, rows.positions].float()).square().sum((0, 1, 3)) for fresh, old in pairs)
        return self.stack.by_rotation(k, v)

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Rows) -> None:
        """Copy rotated `key` and `value` [1, kv_heads, rows, head_dim] to the positions of `rows`."""
        if isinstance(rows, DeviceRows) or len(rows.bounds) > _MANY_RUNS:
            self._keys[layer][:, :, rows.positions] = key
            self._values[layer][:, :, rows.positions] = value
            return
        for run in rows.runs:
            fresh = slice(run.row, run.row + run.end - run.start)
            self._keys[layer][:, :, run.start : run.end] = key[:, :, fresh]
            self._values[layer][:, :, run.start : run.end] = value[:, :, fresh]

    def rewind(self) -> None:
        """Forget what was appended after the prompt, so that it can be continued another way."""
        self.num_tokens = self.layout.num_tokens
        if self.states is not None:
            self.states.rewind()

    def append(self, token: int, on_scores: Callable[[Tensor], None] | None = None) -> Tensor:
        """Append one token and compute it through all layers; returns the logits after it, float32 [vocab].

        Args:
            on_scores: called with each layer's attention scores, float32 [1, heads, 1, n].
        """
        if on_scores is not None:
            self.stack.require_attention()
        position = self.num_tokens
        self.num_tokens += 1
        self._require_room()
        at = torch.tensor([position], device=self.stack.device)
        tables, row = self.stack.rotary_tables(at), Rows.one(at, position, position + 1)
        hidden = self.stack.embed(torch.tensor([[token]], device=self.stack.device))
        if self.states is None:
            hidden = self.stack.layers(hidden, ImageCache(self, tables, row), tables, row.bounds, on_scores)
        else:
            hidden = self._append_stateful(hidden, row, tables)
        return self.stack.logits(hidden[0])[0]

    def _append_stateful(self, hidden: Tensor, row: Rows, tables: RotaryTables) -> Tensor:
        """Run all layers of a hybrid on one row that follows all others."""
        for layer, index in enumerate(self.stack.state_index):
            if index is None:
                hidden = self.stack.layer(layer, hidden, ImageCache(self, tables, row), tables, row.bounds)
            else:
                hidden = self._advance(layer, hidden, row, tables)
        return hidden

    def _require_room(self) -> None:
        """Grow the buffers by whole steps when decoding has filled them."""
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old.shape[2] < self.num_tokens:
                    step = max(GROWTH, old.shape[2] // 4)
                    buffers[layer] = torch.cat([old, old.new_empty(*old.shape[:2], step, old.shape[3])], dim=2)


class ImageCache(PassThroughCache):
    """The fresh K and V of `rows` are written to an image, and the rows attend to all that it holds."""

    def __init__(self, image: Image, tables: RotaryTables, rows: Rows) -> None:
        super().__init__(image.stack, tables)
        self._image, self._rows = image, rows
        self.takes_rotated = not image.keeps_keys

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        index = self._image.stack.kv_index[layer]
        assert index is not None
        if not self.takes_rotated:
            self._image.take_fresh(index, self._image.stack.by_rotation(key, value)[0], self._rows)
            key, value = super().update(key, value, layer)
        self._image.write(index, key, value, self._rows)
        return self._image.key(index), self._image.value(index)


class ReadOnlyCache:
    """Rows attend to the prompt of a finished image. Their own K and V are dropped; the image holds them already."""

    takes_rotated = True

    def __init__(self, image: Image) -> None:
        self._image, self._num_tokens = image, image.layout.num_tokens

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        return self._image.key(layer)[:, :, : self._num_tokens], self._image.value(layer)[:, :, : self._num_tokens]
