"""Looking at a model while it works: what rows attend to, how large hidden states are. Images stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.errors import InputError
from pictool.runtime.attention import Rows, Run
from pictool.runtime.stack import LayerStack, Tables

if TYPE_CHECKING:
    from pictool.runtime.image import Image
    from pictool.runtime.model import Model

Positions = Sequence[int] | NDArray[np.integer[Any]]


class _Held:
    """The cache interface of a decoder layer over a finished image: gives the prompt's K and V, takes nothing."""

    def __init__(self, image: Image) -> None:
        self._image = image

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        end = self._image.layout.num_tokens
        return self._image.key(layer)[:, :, :end], self._image.value(layer)[:, :, :end]


class _Passing:
    """The cache interface of a decoder layer in a plain prefill: K and V pass through, and nothing is kept."""

    def __init__(self, stack: LayerStack, tables: Tables) -> None:
        self._stack, self._tables = stack, tables

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._stack.rope.rotate(key, self._stack.table(self._tables, layer)), value


def scores_of_rows(image: Image, positions: Positions) -> Iterator[Tensor]:
    """What rows of a linked prompt score its tokens by, layer by layer: QKᵀ as the softmax takes it.

    The rows are run through the model once more, over the K and V that the image holds; the image is not written to.
    That repeats what the link did only for rows that it computed at every layer, as the tail's are.

    Args:
        image: finished; tokens that were decoded since are left out.
        positions: of the rows, [rows], ascending.

    Yields:
        Per layer the scores, float32 [heads, rows, n], on the model's device. Column j is prompt position j; -inf
        behind a row's own position and outside the layer's window.

    Raises:
        InputError: no positions, positions that are not ascending, or that are not of the prompt.
    """
    at = np.asarray(positions, dtype=np.int64)
    num_tokens = image.layout.num_tokens
    if not at.size or at[0] < 0 or at[-1] >= num_tokens or (np.diff(at) <= 0).any():
        raise InputError(f"the rows to look at must be ascending positions of the prompt, from 0 to {num_tokens - 1}")
    return _scores(image, Rows.of(torch.from_numpy(at)).to(image.stack.device))


def attention_of_rows(image: Image, positions: Positions) -> Iterator[Tensor]:
    """What rows attend to, layer by layer: CacheBlend's forward attention matrix (§3.3, §4.1).

    As `scores_of_rows`, after the softmax: a row sums to 1 and is 0 at what it does not see.
    """
    return (scores.softmax(-1) for scores in scores_of_rows(image, positions))


def _scores(image: Image, rows: Rows) -> Iterator[Tensor]:
    stack, layout = image.stack, image.layout
    prompt = stack.tables(torch.arange(layout.num_tokens, device=stack.device))
    tables = {kind: (cos[:, rows.positions], sin[:, rows.positions]) for kind, (cos, sin) in prompt.items()}
    tokens = torch.from_numpy(layout.tokens.astype(np.int64)).to(stack.device)
    hidden, cache = stack.embed(tokens[None, rows.positions]), _Held(image)
    for layer in range(stack.num_layers):
        seen: list[Tensor] = []
        hidden = stack.layer(layer, hidden, cache, tables, rows.runs, observe=seen.append)
        yield seen[0][0]


def decode_observed(image: Image, tokens: Sequence[int]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Decode given tokens behind a linked prompt. The image grows by them.

    Yields:
        for each token the logits behind it, float32 [vocab], and per layer its scores, float32 [heads, n], of
        which it is the last.
    """
    for token in tokens:
        seen: list[Tensor] = []
        logits = image.append(token, observe=seen.append)
        yield logits, [scores[0, :, 0] for scores in seen]


def read_tokens(model: Model, tokens: Sequence[int]) -> Image:
    """The image of tokens that are read on their own, from position 0 on; all of them are its tail.

    Raises:
        InputError: no tokens, or more than the model has positions.
    """
    from pictool.core import Layout
    from pictool.runtime.image import Image

    if not 0 < len(tokens) <= model.max_positions:
        raise InputError(f"{len(tokens)} tokens: {model.name} reads from 1 to {model.max_positions}")
    image = Image(model.stack, Layout.of([], [], tokens))
    rows = Rows.of(torch.arange(len(tokens))).to(model.stack.device)
    hidden = model.stack.embed(torch.tensor([list(tokens)], device=model.stack.device))
    for layer in range(model.stack.num_layers):
        hidden = image.compute(layer, hidden, rows)
    return image


def hidden_norms(model: Model, tokens: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """L2 norms of the hidden states of a text, what SpecCache scores tokens by (§2.2, eq. 1 before the mean).

    One causal prefill of `tokens` (int [n]); no K, V or hidden state outlives its layer.

    Returns:
        float32 [layers, n]: the norm of each layer's output, the residual stream before any final norm.

    Raises:
        InputError: no tokens, or more than the model has positions.
    """
    if not 0 < len(tokens) <= model.max_positions:
        raise InputError(f"{len(tokens)} tokens: {model.name} reads from 1 to {model.max_positions}")
    stack, length = model.stack, len(tokens)
    tables = stack.tables(torch.arange(length, device=stack.device))
    hidden = stack.embed(torch.from_numpy(tokens.astype(np.int64))[None].to(stack.device))
    cache, runs, norms = _Passing(stack, tables), (Run(0, 0, length),), []
    for layer in range(stack.num_layers):
        hidden = stack.layer(layer, hidden, cache, tables, runs)
        norms.append(torch.linalg.vector_norm(hidden[0], dim=-1, dtype=torch.float32))
    found: NDArray[np.float32] = torch.stack(norms).cpu().numpy()
    return found
