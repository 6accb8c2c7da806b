"""Activations of a model while it runs: what rows attend to, and how large hidden states are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.errors import InputError
from pictool.runtime.memory.caches import PassThroughCache
from pictool.runtime.memory.image import Image, ReadOnlyCache
from pictool.runtime.prefill import last_hidden
from pictool.runtime.rope import tables_at
from pictool.runtime.rows import Rows, Run

if TYPE_CHECKING:
    from pictool.runtime.model import Model

Positions = Sequence[int] | NDArray[np.integer[Any]]


def scores_of_rows(image: Image, positions: Positions) -> Iterator[Tensor]:
    """Attention scores of rows of a linked prompt, layer by layer: QKᵀ as the softmax takes it.

    The rows are run through the model once more, over the K and V that the image holds; the image is not written to.
    That repeats what the link did only for rows that it computed at every layer, as the tail's are.

    Args:
        image: linked. Tokens that were decoded since are left out.
        positions: of the rows, [rows], ascending.

    Yields:
        Per layer the scores, float32 [heads, rows, n], on the model's device. Column j is prompt position j; -inf
        after a row's own position and outside the layer's window.

    Raises:
        InputError: no positions, positions that are not ascending, or that are not of the prompt.
    """
    at = np.asarray(positions, dtype=np.int64)
    num_tokens = image.layout.num_tokens
    if not at.size or at[0] < 0 or at[-1] >= num_tokens or (np.diff(at) <= 0).any():
        raise InputError(f"the rows to look at must be ascending positions of the prompt, from 0 to {num_tokens - 1}")
    return _scores(image, Rows.of(torch.from_numpy(at)).to(image.stack.device))


def attention_of_rows(image: Image, positions: Positions) -> Iterator[Tensor]:
    """Attention weights of rows, layer by layer: CacheBlend's forward attention matrix (§3.3, §4.1).

    As `scores_of_rows`, after the softmax: a row sums to 1 and is 0 at what it does not see.
    """
    return (scores.softmax(-1) for scores in scores_of_rows(image, positions))


def _scores(image: Image, rows: Rows) -> Iterator[Tensor]:
    stack, layout = image.stack, image.layout
    tables = tables_at(stack.rotary_tables(torch.arange(layout.num_tokens, device=stack.device)), rows.positions)
    tokens = torch.from_numpy(layout.tokens.astype(np.int64)).to(stack.device)
    hidden, cache = stack.embed(tokens[None, rows.positions]), ReadOnlyCache(image)
    for layer in range(stack.num_layers):
        scores: list[Tensor] = []
        hidden = stack.layer(layer, hidden, cache, tables, rows.bounds, scores.append)
        yield scores[0][0]


def decode_with_scores(image: Image, tokens: Sequence[int]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Decode known tokens after a linked prompt (teacher forcing). The image grows by them.

    Yields:
        for each token the logits after it, float32 [vocab], and per layer its attention scores, float32 [heads, n], of
        which its own is the last.
    """
    for token in tokens:
        scores: list[Tensor] = []
        logits = image.append(token, scores.append)
        yield logits, [layer[0, :, 0] for layer in scores]


def image_of_tokens(model: Model, tokens: Sequence[int]) -> Image:
    """Prefill tokens alone, from position 0 on, to an image; all of them are its tail.

    Raises:
        InputError: no tokens, or more than the model has positions.
    """
    model.require_readable(len(tokens))
    return last_hidden(model.stack, tokens)[0]


def hidden_norms(model: Model, tokens: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """L2 norms of the hidden states of a text, what SpecCache scores tokens by (§2.2, eq. 1 before the mean).

    One causal prefill of `tokens` (int [n]); no K, V or hidden state outlives its layer.

    Returns:
        float32 [layers, n]: the norm of each layer's output, the residual stream before any final norm.

    Raises:
        InputError: no tokens, or more than the model has positions.
    """
    model.require_readable(len(tokens))
    stack, length = model.stack, len(tokens)
    tables = stack.rotary_tables(torch.arange(length, device=stack.device))
    hidden = stack.embed(torch.from_numpy(tokens.astype(np.int64))[None].to(stack.device))
    cache, runs, norms = PassThroughCache(stack, tables), (Run(0, 0, length),), []
    for layer in range(stack.num_layers):
        hidden = stack.layer(layer, hidden, cache, tables, runs)
        norms.append(torch.linalg.vector_norm(hidden[0], dim=-1, dtype=torch.float32))
    result: NDArray[np.float32] = torch.stack(norms).cpu().numpy()
    return result
