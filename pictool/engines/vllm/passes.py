"""Passes over chosen rows through vLLM's model: all layers at once, or one by one with narrowing between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pictool.core import TokenIds
from pictool.engines.vllm.host import Host, Layer, positions_of
from pictool.engines.vllm.rows import Piece, RowSet

Hidden = tuple[Tensor, Tensor | None]  # hidden states and residual, [rows, hidden]


@dataclass(frozen=True)
class Sequences:
    """The prompts of a pass: token ids and blocks of each."""

    tokens: Sequence[TokenIds]
    blocks: Sequence[Sequence[int]]


class _Stopped(Exception):
    """Carries what a hook saw out of a forward that is not to go on."""

    def __init__(self, seen: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.seen = seen


class Passes:
    """Runs rows of prompts through the model; their K and V replace what stood in the blocks."""

    def __init__(self, host: Host, sequences: Sequences) -> None:
        self._host, self._sequences = host, sequences

    def run(self, rows: RowSet, on_piece: Callable[[Piece], None] | None = None) -> None:
        """All layers, for every row."""
        for piece in rows.pieces(self._host.limit):
            self._forward(piece)
            if on_piece is not None:
                on_piece(piece)

    def embed(self, rows: RowSet) -> Hidden:
        """What the model hands to its first decoder layer."""
        first = self._host.layers[0].decoder
        parts: list[tuple[Piece, Tensor]] = []
        for piece in rows.pieces(self._host.limit):
            _, hidden, residual = _stopping_at(first, partial(self._forward, piece))
            assert residual is None
            parts.append((piece, hidden))
        return _gather(parts, len(rows)), None

    def project(self, layer: Layer, rows: RowSet, hidden: Hidden) -> tuple[Tensor, Tensor]:
        """Fresh keys (rotated) and values, [rows, kv_heads, head_dim]; the layer is left at its attention."""
        keys, values = [], []
        for piece in rows.pieces(self._host.limit):
            _, key, value = _stopping_at(layer.attention, partial(self._layer, layer, piece, _rows(hidden, piece)))
            keys.append((piece, self._by_head(layer, key)))
            values.append((piece, self._by_head(layer, value)))
        return _gather(keys, len(rows)), _gather(values, len(rows))

    def layer(self, layer: Layer, rows: RowSet, hidden: Hidden) -> Hidden:
        """One decoder layer."""
        pieces = list(rows.pieces(self._host.limit))
        done = [self._layer(layer, piece, _rows(hidden, piece)) for piece in pieces]
        states, residuals = zip(*done, strict=True)
        return tuple(  # type: ignore[return-value]
            _gather(list(zip(pieces, parts, strict=True)), len(rows)) for parts in (states, residuals)
        )

    def _layer(self, layer: Layer, piece: Piece, hidden: Hidden) -> tuple[Tensor, Tensor]:
        positions = positions_of(piece).to(self._host.device)
        with self._host.passing(piece, self._sequences.blocks):
            return layer.decoder(positions, *hidden)  # type: ignore[no-any-return]

    def _forward(self, piece: Piece) -> None:
        positions, device = positions_of(piece), self._host.device
        tokens = [
            torch.from_numpy(self._sequences.tokens[owner][start:end].astype("int64"))
            for owner, start, end in zip(piece.owner.tolist(), piece.start.tolist(), piece.end.tolist(), strict=True)
        ]
        with self._host.passing(piece, self._sequences.blocks):
            self._host.model(torch.cat(tokens).to(device), positions.to(device), None, None)

    def _by_head(self, layer: Layer, flat: Tensor) -> Tensor:
        return flat.reshape(len(flat), layer.attention.num_kv_heads, -1).clone()


def _stopping_at(module: nn.Module, run: Callable[[], object]) -> tuple[Tensor, ...]:
    """What a module is called with in a forward, which goes no farther."""

    def stop(_: nn.Module, seen: tuple[Tensor, ...]) -> None:
        raise _Stopped(seen)

    handle = module.register_forward_pre_hook(stop)
    try:
        run()
    except _Stopped as stopped:
        return stopped.seen
    finally:
        handle.remove()
    raise AssertionError("a forward did not reach the module that it was to stop at")


def _rows(hidden: Hidden, piece: Piece) -> Hidden:
    index = torch.from_numpy(piece.index).to(hidden[0].device)
    return hidden[0][index], None if hidden[1] is None else hidden[1][index]


def _gather(parts: Sequence[tuple[Piece, Tensor]], count: int) -> Tensor:
    """The rows of all pieces in the set's own order."""
    out = parts[0][1].new_empty(count, *parts[0][1].shape[1:])
    for piece, tensor in parts:
        out[torch.from_numpy(piece.index).to(out.device)] = tensor
    return out
