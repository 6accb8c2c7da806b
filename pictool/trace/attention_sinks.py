"""Attention sinks: how much attention a chunk's initial tokens draw when it is compiled alone (EPIC §4.1).

The result can be read without torch, which only `attention_sinks` imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.memory.image import Image
    from pictool.runtime.model import Model

NUM_INITIAL = 4  # tokens that count as initial
NUM_OFFSETS = 16  # first tokens of a chunk that are measured one by one
_BLOCK_FLOATS = 1 << 26  # of one layer's attention that is in memory at once
_MAX_HEADS = 128


@dataclass(frozen=True)
class AttentionSinks:
    """Shares of attention, the mean over the rows that follow a chunk's initial tokens.

    Attributes:
        num_rows: how many rows follow the initial tokens.
        initial_share: float64 [layers, heads], what the initial tokens draw together.
        dummy_share: float64 [layers, heads], what the dummy tokens before the chunk draw (they are not in the object).
        share_by_offset: float64 [layers, heads, offsets], what each of the chunk's first tokens draws.
        uniform_share: what the initial tokens would draw of rows that attend uniformly.
    """

    num_rows: int
    initial_share: NDArray[np.float64]
    dummy_share: NDArray[np.float64]
    share_by_offset: NDArray[np.float64]
    uniform_share: float


def attention_sinks(model: Model, tokens: Sequence[int], dummies: Sequence[int] = ()) -> AttentionSinks:
    """Prefill a chunk alone, after its dummy tokens, and measure what its rows attend to.

    Raises:
        InputError: no row follows the initial tokens. ModelError: a GGUF file.
    """
    if len(tokens) <= NUM_INITIAL:
        raise InputError(f"the chunk has {len(tokens)} tokens, but the measurement needs more than {NUM_INITIAL}")
    from pictool.runtime.activations import image_of_tokens

    _ = model.module  # raises for a GGUF file: llama.cpp shows no keys
    image = image_of_tokens(model, [*dummies, *tokens])
    offset, end = len(dummies), image.num_tokens
    rows = np.arange(offset + NUM_INITIAL, end)
    num_columns = offset + min(NUM_OFFSETS, len(tokens))
    mean = _sum_over_rows(image, rows, num_columns) / len(rows)
    by_offset = mean[..., offset:]
    return AttentionSinks(
        num_rows=len(rows),
        initial_share=by_offset[..., :NUM_INITIAL].sum(-1),
        dummy_share=mean[..., :offset].sum(-1),
        share_by_offset=by_offset,
        uniform_share=float((NUM_INITIAL / (rows + 1)).mean()),
    )


def _sum_over_rows(image: Image, rows: NDArray[np.int64], num_columns: int) -> NDArray[np.float64]:
    """Sum the attention of all rows to the first columns; float64 [layers, heads, num_columns]."""
    from pictool.runtime.activations import attention_of_rows

    step, total = max(1, _BLOCK_FLOATS // (image.num_tokens * _MAX_HEADS)), None
    for start in range(0, len(rows), step):
        layers = attention_of_rows(image, rows[start : start + step])
        block = np.stack([weights[:, :, :num_columns].double().sum(1).cpu().numpy() for weights in layers])
        total = block if total is None else total + block
    assert total is not None
    return total
