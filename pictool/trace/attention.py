"""What the tail and the generated tokens of a linked prompt attend to, per layer and head (EPIC fig. 4 and 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.core import Layout
    from pictool.runtime.image import Image

MOST_BYTES = 1 << 30  # of a map
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Decoded:
    """Given tokens, decoded behind a prompt.

    Attributes:
        logits: float32 [tokens, vocab], those that each token was chosen by.
        scores: of every token but the last, which no layer reads: float32 [layers, heads, n], its own n.
    """

    logits: NDArray[np.float32]
    scores: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True)
class AttentionMap:
    """Attention of rows over a prompt.

    Attributes:
        scores: QKᵀ as the softmax takes it, float32 [layers, heads, rows, columns]; -inf at what a row does not see.
            The rows are the tail's, then the generated tokens'; columns are positions of the prompt and of those.
        layers: which layers these are.
        starts: of the head, each chunk and the tail.
        num_prompt: tokens of the prompt.
    """

    scores: NDArray[np.float32]
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    num_prompt: int

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """Probabilities, like `scores`. Every row sums to 1, and is 0 at what it does not see."""
        weights = self.scores - self.scores.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        return np.asarray(weights)

    @property
    def num_tail(self) -> int:
        """How many of the rows, the first ones, are the tail's."""
        return self.num_prompt - self.starts[-1]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where the rows stand, int64 [rows]."""
        return self.starts[-1] + np.arange(self.scores.shape[2])

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """`[start, end)` of the head and every chunk."""
        return tuple(pairwise(self.starts))

    def share(self, layer: int | None = None, head: int | None = None) -> Floats:
        """Attention of one layer and head, or averaged over all; float64 [rows, columns], rows sum to 1.

        Raises:
            InputError: a layer that the map does not have, or no such head.
        """
        return np.asarray(self._picked(self.weights, layer, head).mean((0, 1), dtype=np.float64))

    def scaled(self, layer: int | None = None, head: int | None = None) -> Floats:
        """Scores scaled to [0, 1] from the least to the most that a row sees (EPIC fig. 4), then averaged over heads.

        float64 [rows, columns]; nan at what a row does not see. Every row of a head is scaled on its own.
        """
        picked = self._picked(self.scores, layer, head).astype(np.float64)
        is_seen = np.isfinite(picked)
        low = np.where(is_seen, picked, np.inf).min(-1, keepdims=True)
        width = np.where(is_seen, picked, -np.inf).max(-1, keepdims=True) - low
        level = np.where(is_seen, picked - low, 0.0) / np.where(width > 0, width, 1.0)
        count = is_seen.sum((0, 1))
        return np.asarray(np.divide(level.sum((0, 1)), count, out=np.full(count.shape, np.nan), where=count > 0))

    def initial(self, first: int) -> Floats:
        """What the first `first` tokens of the head and of every chunk draw of each row.

        float64 [layers, heads, rows, chunks + 1].
        """
        ends = [min(start + first, end) for start, end in self.spans]
        parts = [
            self.weights[..., start:end].sum(-1, dtype=np.float64)
            for (start, _), end in zip(self.spans, ends, strict=True)
        ]
        return np.stack(parts, -1)

    def initial_if_even(self, first: int) -> Floats:
        """The same for rows that attend to all that they see alike; float64 [rows, chunks + 1]."""
        counts = np.asarray([min(first, end - start) for start, end in self.spans])
        return np.asarray(counts / (self.positions[:, None] + 1.0))

    def by_offset(self, count: int) -> Floats:
        """Mean attention to the j-th token of the chunks (without the head) that have one; float64 [layers, count].

        nan where no chunk is as long.
        """
        rows = self.weights.mean((1, 2), dtype=np.float64)  # [layers, columns]
        found = np.full((len(self.layers), count), np.nan)
        for offset in range(count):
            columns = [start + offset for start, end in self.spans[1:] if start + offset < end]
            if columns:
                found[:, offset] = rows[:, columns].mean(1)
        return found

    def require(self, layer: int | None, head: int | None) -> None:
        """Refuse a layer that the map does not have, and a head that the model does not have.

        Raises:
            InputError: names those that there are.
        """
        num_heads = self.scores.shape[1]
        if layer is not None and layer not in self.layers:
            raise InputError(f"layer {layer}: the map has the layers {', '.join(map(str, self.layers))}")
        if head is not None and not 0 <= head < num_heads:
            raise InputError(f"head {head}: the model has the heads 0 to {num_heads - 1}")

    def _picked(self, of: NDArray[np.float32], layer: int | None, head: int | None) -> NDArray[np.float32]:
        self.require(layer, head)
        of_layer = of if layer is None else of[[self.layers.index(layer)]]
        return of_layer if head is None else of_layer[:, [head]]


def decode_tokens(image: Image, tokens: Sequence[int], keep_scores: bool = True) -> Decoded:
    """Decode given tokens behind a linked prompt, as they were generated. The image grows by all but the last.

    To be called before any other image of the model is made: dynamic RoPE remembers the longest prompt it saw.
    """
    from pictool.runtime.activations import decode_with_scores

    assert image.logits is not None and image.num_tokens == image.layout.num_tokens
    logits, scores = [image.logits.cpu().numpy()], []
    for behind, seen in decode_with_scores(image, tokens[:-1]):
        logits.append(behind.cpu().numpy())
        if keep_scores:
            scores.append(np.stack([one.cpu().numpy() for one in seen]))
    return Decoded(np.stack(logits), tuple(scores))


def attention_map(image: Image, decoded: Decoded, layer: int | None = None) -> AttentionMap:
    """The attention of an image's tail and of what was decoded behind it, at all layers or one.

    Raises:
        InputError: no such layer, or a map that is too large for memory.
    """
    from pictool.runtime.activations import scores_of_rows

    layout, num_layers = image.layout, image.stack.num_layers
    if layer is not None and not 0 <= layer < num_layers:
        raise InputError(f"layer {layer}: the model has the layers 0 to {num_layers - 1}")
    kept = tuple(range(num_layers)) if layer is None else (layer,)
    scores: NDArray[np.float32] | None = None
    for index, seen in enumerate(scores_of_rows(image, np.arange(*layout.tail))):
        if scores is None:
            scores = _empty(len(kept), seen.shape[0], layout, len(decoded.scores))
        if index in kept:
            scores[kept.index(index), :, : seen.shape[1], : layout.num_tokens] = seen.cpu().numpy()
    assert scores is not None
    for row, seen_by in enumerate(decoded.scores, layout.num_tokens - layout.num_context):
        scores[:, :, row, : seen_by.shape[2]] = seen_by[list(kept)]
    return AttentionMap(scores, kept, layout.starts, layout.num_tokens)


def _empty(num_layers: int, heads: int, layout: Layout, num_decoded: int) -> NDArray[np.float32]:
    rows, columns = layout.num_tokens - layout.num_context + num_decoded, layout.num_tokens + num_decoded
    if 4 * num_layers * heads * rows * columns > MOST_BYTES:
        raise InputError(
            f"the attention of {rows} rows over {columns} tokens in {num_layers} layers of {heads} heads is more than "
            f"{MOST_BYTES >> 30} GiB; choose one layer with --layer"
        )
    return np.full((num_layers, heads, rows, columns), -np.inf, dtype=np.float32)
