"""Relocation: RoPE applied by us, with the model's own function, so that keys can be kept without a position.

The decoder layers are run with the identity rotation (cos 1, sin 0). Keys then leave the layer before rotation:
that is what an object stores. The real rotation, by the model's own `apply_rotary_pos_emb` and its own tables, is
applied when a key is put into a prompt and when a query attends. Base, scaling, partial rotary and the pairing of
dimensions are therefore the model's, whatever they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RotaryTable = tuple["Tensor", "Tensor"]  # cos and sin, each [1, positions, rotary_dim]
RotaryTables = dict[str | None, RotaryTable]  # by layer type: Gemma 3 has two


class Rope:
    """The rotary embedding of one model."""

    def __init__(self, decoder: Any) -> None:
        self._embedding = decoder.rotary_emb
        self._apply = sys.modules[type(decoder.layers[0].self_attn).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        takes_layer_type = "layer_type" in inspect.signature(type(self._embedding).forward).parameters
        num_layers = len(decoder.layers)
        self.layer_types: list[str | None] = (
            list(decoder.config.layer_types)[:num_layers] if takes_layer_type else [None] * num_layers
        )

    def tables(self, positions: Tensor, like: Tensor) -> RotaryTables:
        """Tables of the prompt positions `positions` (int64 [n]) in the dtype of `like`.

        The frequencies are those of a prompt that ends at the last of the positions: dynamic and long RoPE depend on
        that, and on no earlier call.
        """
        self._forget(like)
        return self.next_tables(positions, like)

    def next_tables(self, positions: Tensor, like: Tensor) -> RotaryTables:
        """As `tables`, for positions that continue those of the last call (a decoding step)."""
        return {kind: self._embed(like, positions, kind) for kind in dict.fromkeys(self.layer_types)}

    def rotate(self, x: Tensor, table: RotaryTable) -> Tensor:
        """Rotate `x` [batch, heads, positions, head_dim] to the table's positions; returns a new tensor."""
        rotated: Tensor = self._apply(x, x[:, :0], *table)[0]
        return rotated

    def _embed(self, like: Tensor, positions: Tensor, kind: str | None) -> RotaryTable:
        more = {} if kind is None else {"layer_type": kind}
        cos, sin = self._embedding(like, position_ids=positions[None], **more)
        return cos, sin

    def _forget(self, like: Tensor) -> None:
        """Dynamic RoPE keeps the longest length seen; position 0 resets it (a prompt of one token)."""
        self.next_tables(like.new_zeros(1, dtype=_int64()), like)


def _int64() -> torch.dtype:
    import torch

    return torch.int64


def identity_table(table: RotaryTable) -> RotaryTable:
    """The table that rotates nothing, of the same shape."""
    cos, sin = table
    return cos.new_ones(cos.shape), sin.new_zeros(sin.shape)


def tables_at(tables: RotaryTables, positions: Tensor | slice) -> RotaryTables:
    """The entries of `tables` at some of their positions."""
    return {kind: (cos[:, positions], sin[:, positions]) for kind, (cos, sin) in tables.items()}


def joined_tables(parts: Sequence[RotaryTables]) -> RotaryTables:
    """Tables one after the other."""
    import torch

    def join(kind: str | None, index: int) -> Tensor:
        return torch.cat([tables[kind][index] for tables in parts], 1)

    return {kind: (join(kind, 0), join(kind, 1)) for kind in parts[0]}
