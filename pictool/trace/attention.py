"""Attention of the tail and the generated tokens of a linked prompt, per layer and head (EPIC fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.core import Layout
    from pictool.runtime.memory.image import Image

MAX_BYTES = 1 << 30  # of a map
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AttentionMap:
    """Attention of the last rows of a prompt over all its positions.

    The rows are the tail's, then the generated tokens'; the columns are the positions of the prompt and of those.

    Attributes:
        scores: float32 [layers, heads, rows, columns], QKᵀ before the softmax; -inf where a row does not attend.
        layers: the layers that the map has.
        starts: of the head, each chunk and the tail.
        num_prompt: tokens of the prompt.
    """

    scores: NDArray[np.float32]
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    num_prompt: int

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """Attention probabilities, shaped like `scores`. Every row sums to 1."""
        weights = self.scores - self.scores.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        return np.asarray(weights)

    @property
    def positions(self) -> NDArray[np.int64]:
        """The position of each row, int64 [rows]."""
        return self.starts[-1] + np.arange(self.scores.shape[2])

    def share(self, layer: int | None = None, head: int | None = None) -> Floats:
        """Return attention probabilities, averaged over the layers and heads that are not given.

        float64 [rows, columns]; every row sums to 1.

        Raises:
            InputError: a layer or head that the map does not have.
        """
        self.require(layer, head)
        of_layer = self.weights if layer is None else self.weights[[self.layers.index(layer)]]
        return np.asarray((of_layer if head is None else of_layer[:, [head]]).mean((0, 1), dtype=np.float64))

    def require(self, layer: int | None, head: int | None) -> None:
        """Check that the map has a layer and a head.

        Raises:
            InputError: it does not; the message names those that it has.
        """
        num_heads = self.scores.shape[1]
        if layer is not None and layer not in self.layers:
            raise InputError(f"layer {layer}: the map has the layers {', '.join(map(str, self.layers))}")
        if head is not None and not 0 <= head < num_heads:
            raise InputError(f"head {head}: the model has the heads 0 to {num_heads - 1}")


@dataclass(frozen=True)
class DecodedTokens:
    """Tokens that were decoded after a prompt by teacher forcing.

    Attributes:
        logits: float32 [tokens, vocab], the logits that each token was chosen by.
        scores: attention scores of every token but the last, which no layer reads: float32 [layers, heads, n] each,
            where n grows by one from token to token.
    """

    logits: NDArray[np.float32]
    scores: tuple[NDArray[np.float32], ...]


def decode_tokens(image: Image, tokens: Sequence[int], keep_scores: bool = True) -> DecodedTokens:
    """Decode generated tokens again after a linked prompt (teacher forcing). The image grows by all but the last.

    Call it before any other image of the model is made: dynamic RoPE remembers the longest prompt that it saw.
    """
    from pictool.runtime.activations import decode_with_scores

    assert image.logits is not None and image.num_tokens == image.layout.num_tokens
    logits, scores = [image.logits.cpu().numpy()], []
    for next_logits, layer_scores in decode_with_scores(image, tokens[:-1]):
        logits.append(next_logits.cpu().numpy())
        if keep_scores:
            scores.append(np.stack([score.cpu().numpy() for score in layer_scores]))
    return DecodedTokens(np.stack(logits), tuple(scores))


def attention_map(image: Image, decoded: DecodedTokens, layer: int | None = None) -> AttentionMap:
    """Compute the attention of an image's tail and of the tokens decoded after it, at all layers or one.

    Raises:
        InputError: no such layer, or a map that is too large for memory.
    """
    from pictool.runtime.activations import scores_of_rows

    layout, num_layers = image.layout, image.stack.num_layers
    if layer is not None and not 0 <= layer < num_layers:
        raise InputError(f"layer {layer}: the model has the layers 0 to {num_layers - 1}")
    layers = tuple(range(num_layers)) if layer is None else (layer,)
    scores: NDArray[np.float32] | None = None
    for index, tail_scores in enumerate(scores_of_rows(image, np.arange(*layout.tail))):
        if scores is None:
            scores = _empty_scores(len(layers), tail_scores.shape[0], layout, len(decoded.scores))
        if index in layers:
            scores[layers.index(index), :, : tail_scores.shape[1], : layout.num_tokens] = tail_scores.cpu().numpy()
    assert scores is not None
    for row, token_scores in enumerate(decoded.scores, layout.num_tokens - layout.num_context):
        scores[:, :, row, : token_scores.shape[2]] = token_scores[list(layers)]
    return AttentionMap(scores, layers, layout.starts, layout.num_tokens)


def _empty_scores(num_layers: int, num_heads: int, layout: Layout, num_decoded: int) -> NDArray[np.float32]:
    rows, columns = layout.num_tokens - layout.num_context + num_decoded, layout.num_tokens + num_decoded
    if 4 * num_layers * num_heads * rows * columns > MAX_BYTES:
        raise InputError(
            f"the attention of {rows} rows over {columns} tokens in {num_layers} layers of {num_heads} heads would "
            f"take more than {MAX_BYTES >> 30} GiB; choose one layer with --layer"
        )
    return np.full((num_layers, num_heads, rows, columns), -np.inf, dtype=np.float32)
