"""The caches that decoder layers are run with: where fresh K and V go, and what K and V the rows attend to.

A layer of `transformers` projects its rows to Q, K and V, calls its cache's `update` with K and V, and attends to what
that returns. Layers are run with the identity rotation (`rope.py`), so a key arrives before rotation, and the cache
rotates it. A layer that keeps other parts than keys and values (`Geometry.parts`), as a latent and a rotated key, hands
these to `update` in their order, and expands what it returns. "K" and "V" below are the first and the second part.
The class says what the rows attend to:

    PassThroughCache   each other                                     (a prefill; nothing is kept)
    CapturingCache     each other; un-rotated K and V are kept        (compiling)
    ImageCache         the image, which their K and V are written to  (linking; `image.py`)
    ReadOnlyCache      the image, which stays as it is                (measuring attention; `image.py`)
    ProjectionCache    nothing: the layer ends at its projections     (comparing K and V)
    CountingCache      what another cache says; it knows positions    (Llama 4)
    StatefulCache      what another cache says; it has a state        (linear layers)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from pictool.runtime.memory.states import LinearState

if TYPE_CHECKING:
    from pictool.runtime.rope import RotaryTables

LayerKV = tuple[Tensor, Tensor]  # key and value of one layer, each [batch, kv_heads, tokens, head_dim]


class LayerCache(Protocol):
    """What a decoder layer needs of a cache (the part of transformers' `Cache` that it calls)."""

    @property
    def takes_rotated(self) -> bool:
        """Whether the layer rotates keys itself, as the model does alone; else they come un-rotated."""
        ...

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        """Receive the rows' fresh `key` and `value`, [batch, kv_heads, rows, head_dim].

        Returns:
            Rotated K and V that the rows attend to, [batch, kv_heads, n, head_dim]; column j is position j.
        """
        ...


class Rotating(Protocol):
    """What the caches need of a `LayerStack`."""

    def rotate_parts(self, parts: LayerKV, tables: RotaryTables, layer: int) -> LayerKV: ...


class PassThroughCache:
    """Rows attend to each other only. No K or V outlives its layer.

    `tables` are the rotary tables of the rows' positions.
    """

    takes_rotated = False

    def __init__(self, stack: Rotating, tables: RotaryTables) -> None:
        self.tables = tables
        self._stack = stack

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        return self._stack.rotate_parts((key, value), self.tables, layer)


class CapturingCache(PassThroughCache):
    """Rows attend to each other only. `layers` keeps the un-rotated K and V of every layer."""

    def __init__(self, stack: Rotating, tables: RotaryTables) -> None:
        super().__init__(stack, tables)
        self.layers: list[LayerKV] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        self.layers.append((key, value))
        return super().update(key, value, layer)


class ProjectionCache:
    """Ends a layer as soon as its K and V are known, by raising `Projected`."""

    takes_rotated = False

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        raise Projected(key, value)


class CountingCache:
    """Another cache, for layers that take the positions of their rows from the number of tokens in it (Llama 4)."""

    def __init__(self, cache: LayerCache, positions: Tensor) -> None:
        self._cache, self._offsets = cache, positions - torch.arange(len(positions), device=positions.device)
        self.takes_rotated = cache.takes_rotated

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        return self._cache.update(key, value, layer)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """By how much each row's position is larger than its index, int64 [rows]: rows may be scattered."""
        return self._offsets


class StatefulCache:
    """Another cache, for a layer that has a state. The layer writes to clones; `state` is the state after it ran.

    `inputs`, if given, gets what the layer's mixer is called with, [1, rows, hidden].
    """

    def __init__(
        self, cache: LayerCache | None, layer: int, before: LinearState, inputs: list[Tensor] | None = None
    ) -> None:
        from transformers.cache_utils import LinearAttentionLayer

        self._cache, self._layer, self.inputs = cache, LinearAttentionLayer(), inputs
        self.takes_rotated = cache is not None and cache.takes_rotated
        # Theirs has one column more, of the input that the next token's convolution does not read any more.
        self._layer.conv_states[0] = pad(before.tail, (1, 0))
        self._layer.conv_kernel_size[0] = before.tail.shape[-1] + 1
        self._layer.has_previous_state[0] = self._layer.is_conv_states_initialized[0] = True
        if before.recurrent is not None:
            self._layer.recurrent_states[0] = before.recurrent.clone()
            self._layer.is_recurrent_states_initialized[0] = True
        self.layers = {layer: self._layer}

    @property
    def state(self) -> LinearState:
        return LinearState(self._layer.conv_states[0][..., 1:], self._layer.recurrent_states[0])

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> LayerKV:
        assert self._cache is not None
        return self._cache.update(key, value, layer)

    # What layers ask: `has_previous_state` up to transformers 5.20, else the states themselves.

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self.layers[layer_idx].conv_states[state_idx]
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        state: Tensor | None = self.layers[layer_idx].recurrent_states[state_idx]
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, inputs: Tensor, layer_idx: int, **more: Any) -> Tensor:
        full: Tensor = self.layers[layer_idx].update_conv_state(inputs, **more)
        return full

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **more: Any) -> Tensor:
        kept: Tensor = self.layers[layer_idx].update_recurrent_state(state, **more)
        return kept


class Projected(Exception):
    """Carries un-rotated K and V out of a layer (`ProjectionCache`)."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key, self.value = key, value
