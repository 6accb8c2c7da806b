"""Relocation: RoPE applied by us, with the model's own function, so that keys can be kept without a position.

Where keys are to be kept, the decoder layers are run with the identity rotation (cos 1, sin 0). Keys then leave the
layer before rotation: that is what an object stores. The real rotation, by the model's own `apply_rotary_pos_emb` and
its own tables, is applied when a key is put into a prompt and when a query attends. Base, scaling, partial rotary and
the pairing of dimensions are therefore the model's, whatever they are. Where no key is kept, the layer rotates itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.runtime.architectures import architecture_of, rotary_of
from pictool.runtime.support import depends_on_length

if TYPE_CHECKING:
    from torch import Tensor

RotaryTable = tuple["Tensor", ...]  # cos and sin, each [1, positions, rotary_dim], or both as one complex tensor
UNROTATED = "unrotated"  # the kind of layers without RoPE: their table rotates nothing


@dataclass(frozen=True)
class RotaryTables:
    """The rotary tables of positions, int64 [n], by kind of layer: Gemma 3 has two."""

    positions: Tensor
    of_kind: dict[str | None, RotaryTable]

    def parts(self) -> list[Tensor]:
        """The tensors of all kinds, each [1, positions, …]."""
        return [part for table in self.of_kind.values() for part in table]


class Rope:
    """The rotary embedding of one model."""

    def __init__(self, decoder: Any) -> None:
        self._embedding = rotary_of(decoder)  # some hybrids rotate nothing
        self._depends_on_length = depends_on_length(decoder.config)
        self._modeling = sys.modules[type(decoder.layers[0]).__module__]
        architecture = architecture_of(decoder.config)
        self._rotation = architecture.rotation
        # Queries are rotated in their last dimensions, if only a part of a key is (latent attention).
        key, *_ = parts = architecture.parts(decoder.config)
        self._query_width: int | None = None if key.rotated else next(part.width for part in parts if part.rotated)
        forward = None if self._embedding is None else type(self._embedding).forward
        takes_layer_type = forward is not None and "layer_type" in inspect.signature(forward).parameters
        labels: list[str | None] = decoder.config.layer_types if takes_layer_type else [None] * len(decoder.layers)
        known = decoder.config.rope_parameters if takes_layer_type else labels  # a layer without attention has no table
        self.kinds: list[str | None] = [
            UNROTATED
            if self._embedding is None or not architecture.is_rotated(getattr(layer, "self_attn", None))
            else label if label in known else next(other for other in labels if other in known)
            for layer, label in zip(decoder.layers, labels, strict=True)
        ]  # fmt: skip

    def tables(self, positions: Tensor, like: Tensor) -> RotaryTables:
        """Tables of the prompt positions `positions` (int64 [n]) in the dtype of `like`.

        The frequencies are those of a prompt that ends at the last of the positions: dynamic and long RoPE depend on
        that, and on no earlier call.
        """
        kinds = dict.fromkeys(self.kinds)
        if self._depends_on_length:  # dynamic RoPE keeps the longest length seen, until it sees a prompt of one token
            for kind in kinds:
                self._embed(like, positions.new_zeros(1), kind)
        return RotaryTables(positions, {kind: self._embed(like, positions, kind) for kind in kinds})

    def rotate(self, x: Tensor, table: RotaryTable) -> Tensor:
        """Rotate `x` [batch, heads, positions, head_dim] to the table's positions; returns a new tensor."""
        return x.clone() if self._embedding is None else self._rotation(self._modeling, x, table)

    def rotate_query(self, query: Tensor, table: RotaryTable) -> Tensor:
        """Rotate queries [batch, heads, rows, head_dim], as `rotate`."""
        if self._query_width is None:
            return self.rotate(query, table)
        from torch import cat

        passed, rotated = query[..., : -self._query_width], query[..., -self._query_width :]
        return cat([passed, self.rotate(rotated, table)], -1)

    def _embed(self, like: Tensor, positions: Tensor, kind: str | None) -> RotaryTable:
        if self._embedding is None:
            return (like.new_empty(1, len(positions), 0),) * 2
        from torch import inference_mode

        more = {} if kind in (None, UNROTATED) else {"layer_type": kind}
        position_ids = positions[None]
        if hasattr(self._embedding, "mrope_section"):  # takes those of time, height and width, which texts have alike
            position_ids = position_ids.expand(3, 1, -1)
        with inference_mode():  # long RoPE writes to its frequencies, which may be of a model that was made so
            embedded = self._embedding(like, position_ids=position_ids, **more)
        table = embedded if isinstance(embedded, tuple) else (embedded,)
        return identity_table(table) if kind == UNROTATED else table


def identity_table(table: RotaryTable) -> RotaryTable:
    """The table that rotates nothing, of the same shape."""
    first, *others = table
    return first.new_ones(first.shape), *(part.new_zeros(part.shape) for part in others)


def tables_at(tables: RotaryTables, positions: Tensor | slice) -> RotaryTables:
    """The entries of `tables` at some of their positions."""
    return RotaryTables(
        tables.positions[positions],
        {kind: tuple(part[:, positions] for part in table) for kind, table in tables.of_kind.items()},
    )


def tables_between(first: RotaryTables, second: RotaryTables) -> RotaryTables:
    """The tables, in float32, that rotate what `first` rotated to the positions of `second`.

    They are quotients: what the model's own tables scale by (YaRN) cancels out, and what they were rounded to is undone
    and done as it was. Of equal positions they rotate nothing, to the bit.
    """
    pairs = {kind: (table, second.of_kind[kind]) for kind, table in first.of_kind.items()}
    return RotaryTables(second.positions, {kind: _table_between(*pair) for kind, pair in pairs.items()})


def _table_between(first: RotaryTable, second: RotaryTable) -> RotaryTable:
    (from_cos, from_sin), (to_cos, to_sin) = (
        [part.float() for part in (table if len(table) > 1 else (table[0].real, table[0].imag))]
        for table in (first, second)
    )
    scale = from_cos * from_cos + from_sin * from_sin
    cos, sin = (to_cos * from_cos + to_sin * from_sin) / scale, (to_sin * from_cos - to_cos * from_sin) / scale
    if len(first) > 1:
        return cos, sin
    from torch import complex

    return (complex(cos, sin),)


def joined_tables(parts: Sequence[RotaryTables]) -> RotaryTables:
    """Tables one after the other."""
    from torch import cat

    def join(kind: str | None) -> RotaryTable:
        return tuple(cat(same, 1) for same in zip(*(tables.of_kind[kind] for tables in parts), strict=True))

    positions = cat([tables.positions for tables in parts])
    return RotaryTables(positions, {kind: join(kind) for kind in parts[0].of_kind})
