"""The tensors that stay: KV of one prompt, rotary tables of its positions, and where layers of objects arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from pictool.runtime.memory import streams
from pictool.runtime.memory.caches import LayerKV, Projected
from pictool.runtime.rope import RotaryTables
from pictool.runtime.stack import LayerStack

NUM_STAGED = 2  # layers that are staged at a time: one arrives while the one before is put in its places


class Slab:
    """KV of one prompt of at most `capacity` tokens. The slot after the last is written by padding, and never read.

    Attributes:
        keys, values: of each layer, [1, heads, capacity + 1, width]. prompt: their slots for the prompt.
        tables: RoPE tables of every slot.
    """

    @torch.inference_mode(False)
    def __init__(self, stack: LayerStack, capacity: int) -> None:
        self._stack, self.capacity, layers = stack, capacity, range(stack.geometry.layers)
        of_keys, of_values = ((1, part.heads, capacity + 1, part.width) for part in stack.geometry.parts)
        self.keys = [torch.zeros(of_keys, dtype=stack.dtype, device=stack.device) for _ in layers]
        self.values = [torch.zeros(of_values, dtype=stack.dtype, device=stack.device) for _ in layers]
        keys, values = ([tensor[:, :, :capacity] for tensor in part] for part in (self.keys, self.values))
        self.prompt = keys, values
        made = stack.rotary_tables(torch.arange(capacity + 1, device=stack.device))
        self.tables = RotaryTables(made.positions, {k: tuple(p.clone() for p in t) for k, t in made.of_kind.items()})

    def of(self, layer: int) -> LayerKV:
        """Keys and values of a layer."""
        return self.keys[layer], self.values[layer]

    def rotate_for(self, start: int, end: int) -> None:
        """Where RoPE depends on the length: have the tables of [start, end) be those of a prompt that ends there."""
        if self._stack.depends_on_length:
            new = self._stack.rotary_tables(torch.arange(start, end, device=self._stack.device))
            for own, part in zip(self.tables.parts(), new.parts(), strict=True):
                own[:, start:end].copy_(part)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Copy rotated K and V [1, heads, n, width] to slots [n]."""
        self.keys[layer].index_copy_(2, slots, key)
        self.values[layer].index_copy_(2, slots, value)


class SlabCache:
    """The fresh K and V of rows are written to their slots; the rows attend to the first `num_keys` of them.

    Args:
        slots: of the rows, int64 [rows]; None: their K and V are there already.
        num_keys: 0: the layer ends once they are written, by raising `Projected`.
    """

    takes_rotated = True

    def __init__(self, slab: Slab, slots: Tensor | None, num_keys: int = 0) -> None:
        self._slab, self._slots, self._num_keys = slab, slots, num_keys

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> LayerKV:
        if self._slots is not None:
            self._slab.write(layer, self._slots, key, value)
        if not self._num_keys:
            raise Projected(key, value)
        return self._slab.keys[layer][:, :, : self._num_keys], self._slab.values[layer][:, :, : self._num_keys]


class StaticTables:
    """RoPE tables of some slots of a slab, in tensors that stay."""

    @torch.inference_mode(False)
    def __init__(self, slab: Slab, slots: Tensor) -> None:
        self._slab, self._slots, like = slab, slots, slab.tables.of_kind
        shape = (1, len(slots))
        self.tables = RotaryTables(
            slots, {k: tuple(p.new_zeros(*shape, *p.shape[2:]) for p in table) for k, table in like.items()}
        )

    def take(self) -> None:
        """Have them be those of the slots."""
        for own, whole in zip(self.tables.parts(), self._slab.tables.parts(), strict=True):
            torch.index_select(whole, 1, self._slots, out=own)


class Numbers:
    """Whole numbers [fields, n] that the host sends: all in one copy, which it does not wait for."""

    @torch.inference_mode(False)
    def __init__(self, fields: int, count: int, device: torch.device) -> None:
        self.tensor = torch.zeros(fields, count, dtype=torch.int64, device=device)
        self._host = streams.host_buffer(8 * fields * count, device).view(torch.int64).view(fields, count)
        self.host = self._host.numpy()
        self._sent: torch.Event | None = None

    def wait(self) -> None:
        """Before `host` is written to."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        self.tensor.copy_(self._host, non_blocking=True)
        self._sent = streams.event_now(self.tensor.device)


class Staging:
    """Where the layers of a prompt's objects arrive, `NUM_STAGED` at a time, each of at most `num_tokens` tokens.

    Attributes:
        buffers: of each layer that is staged, uint8; numbers: the same. placed: when each may be overwritten.
    """

    @torch.inference_mode(False)
    def __init__(self, stack: LayerStack, num_tokens: int) -> None:
        self.num_tokens, self.num_bytes = num_tokens, num_tokens * stack.geometry.width * stack.dtype.itemsize
        self.buffers = [torch.zeros(self.num_bytes, dtype=torch.uint8, device=stack.device) for _ in range(NUM_STAGED)]
        self.numbers = [buffer.view(stack.dtype) for buffer in self.buffers]
        self.placed: list[torch.Event | None] = [None] * NUM_STAGED
