"""The states of linear layers: what such a layer has read before a token, and what a stored chunk makes of it.

A linear layer (linear attention, Mamba2, a short convolution) keeps no K and V. Over given inputs its recurrent state
after some tokens is an affine map of the one before them, S_out = A · S_in + B (docs/design.md §8). So what is
stored of a chunk's tokens from its cut on is A and B, and the last inputs of its convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pictool.core import StateShape


@dataclass(frozen=True)
class LinearState:
    """What a linear layer has read before a token. Nobody writes to its tensors.

    `tail` [batch, channels, columns] are the last inputs of its convolution; `recurrent` float32
    [batch, heads, rows, width] is its state, None of a convolution alone.
    """

    tail: Tensor
    recurrent: Tensor | None = None

    @classmethod
    def zero(cls, shape: StateShape, like: Tensor) -> LinearState:
        """Before the first token of a prompt; in the dtype and on the device of `like`."""
        tail, recurrent = like.new_zeros(1, shape.channels, shape.columns), None
        if shape.heads:
            recurrent = like.new_zeros(1, shape.heads, shape.rows, shape.width, dtype=torch.float32)
        return cls(tail, recurrent)


@dataclass(frozen=True)
class StateMap:
    """What `length` stored tokens make of the state before them.

    `tail` [channels, columns] are the last inputs of the chunk they are in, zero before its first token; `operator`
    float32 [heads, rows, rows] or [heads, 1, 1], and `state` float32 [heads, rows, width]. Without an operator `state`
    is the one after the tokens, whatever precedes them.
    """

    length: int
    tail: Tensor
    operator: Tensor | None = None
    state: Tensor | None = None

    def apply(self, before: LinearState) -> LinearState:
        """The state after the tokens: S_out = A · S_in + B. Of few tokens the tail has inputs from before them, too."""
        columns = self.tail.shape[1]
        tail = torch.cat([before.tail[0], self.tail[:, max(0, columns - self.length) :]], 1)[None, :, -columns:]
        if self.state is None or before.recurrent is None:
            return LinearState(tail)
        if self.operator is None:
            return LinearState(tail, self.state[None])
        is_number, old = self.operator.shape[-1] == 1, before.recurrent
        return LinearState(tail, (self.operator * old if is_number else self.operator @ old) + self.state)


class ImageStates:
    """The states of an image's linear layers, each moved over the prompt from left to right: computed, or by a map.

    Attributes:
        inputs: gets what the mixers of computed layers are called with, [1, rows, hidden] each; None: is not kept.
    """

    def __init__(self, zero: LinearState, layers: Sequence[int]) -> None:
        self._now = dict.fromkeys(layers, (0, zero))  # position, and the state before it
        self._maps: dict[int, list[tuple[int, StateMap]]] = {layer: [] for layer in layers}
        self._prompt: dict[int, tuple[int, LinearState]] | None = None
        self.inputs: list[Tensor] | None = None
        self._block, self._borders = 0, dict[int, list[LinearState]]()

    def place(self, layer: int, start: int, stored: StateMap) -> None:
        """Take the map of stored tokens from `start` on; in ascending order."""
        self._maps[layer].append((start, stored))

    def before(self, layer: int, position: int) -> LinearState:
        """The state of a layer before a position that it has not passed, once over all maps until there."""
        at, state = self._now[layer]
        maps = self._maps[layer]
        while at < position:
            assert maps and maps[0][0] == at, f"layer {layer} has no state at {at}"
            _, stored = maps.pop(0)
            at, state = at + stored.length, stored.apply(state)
        assert at == position, f"layer {layer} is at {at}, after {position}"
        return state

    def move(self, layer: int, position: int, state: LinearState) -> None:
        """Set the state of a layer before a position, once all before it was computed."""
        self._now[layer] = position, state
        if self._block and not position % self._block:
            self._borders.setdefault(position, []).append(state)

    def keep_borders(self, block: int) -> None:
        """Keep the states at multiples of `block` tokens from now on, so that they can be stored."""
        self._block = block

    def stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) after each of which a layer's state is needed."""
        step = self._block or end
        return list(pairwise([start, *range(start - start % step + step, end, step), end]))

    def take_borders(self) -> dict[int, list[LinearState]]:
        """The states of all layers that were kept, by position; no more are kept then."""
        borders, self._borders, self._block = self._borders, {}, 0
        return borders

    def keep(self) -> None:
        """Keep the states as they are, for `rewind`."""
        self._prompt = dict(self._now)

    def rewind(self) -> None:
        """Go back to the states that were kept, if there are any."""
        self._now = dict(self._prompt) if self._prompt is not None else self._now
