"""Attention sinks: how much of a chunk's attention its first tokens draw when it is compiled alone (EPIC §4.1).

A profile can be read without torch, which only `sink_profile` imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.runtime.image import Image
    from pictool.runtime.model import Model

FIRST = 4  # tokens that count as initial, if nobody says otherwise
OFFSETS = 16  # of a profile, at least
_BLOCK_FLOATS = 1 << 26  # of one layer's attention that is in memory at once
_MOST_HEADS = 128


@dataclass(frozen=True)
class SinkProfile:
    """The mean over a chunk's rows behind its first `first` tokens, compiled as the object was.

    Attributes:
        share: float64 [layers, heads]. What the first tokens draw.
        dummies: float64 [layers, heads]. What the dummy tokens in front of the chunk draw (they are not in the object).
        by_offset: float64 [layers, heads, offsets]. What each of the chunk's first tokens draws.
        if_even: what the first tokens would draw of rows that attend to all they see alike.
    """

    first: int
    num_rows: int
    share: NDArray[np.float64]
    dummies: NDArray[np.float64]
    by_offset: NDArray[np.float64]
    if_even: float


def sink_profile(model: Model, tokens: Sequence[int], dummies: Sequence[int] = (), first: int = FIRST) -> SinkProfile:
    """Read a chunk alone, behind its dummy tokens, and see what its rows attend to.

    Raises:
        InputError: no row is behind the first tokens.
    """
    if not 1 <= first < len(tokens):
        raise InputError(f"the first {first} of {len(tokens)} tokens leave none behind them; name fewer with --first")
    from pictool.runtime.activations import image_of_tokens

    image = image_of_tokens(model, [*dummies, *tokens])
    offset, end = len(dummies), image.num_tokens
    rows = np.arange(offset + first, end)
    shown = offset + min(max(OFFSETS, first), len(tokens))
    mean = _columns(image, rows, shown) / len(rows)
    by_offset = mean[..., offset:]
    share, drawn_by_dummies = by_offset[..., :first].sum(-1), mean[..., :offset].sum(-1)
    return SinkProfile(first, len(rows), share, drawn_by_dummies, by_offset, float((first / (rows + 1)).mean()))


def _columns(image: Image, rows: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """What the first `count` columns draw of all rows together; float64 [layers, heads, count]."""
    from pictool.runtime.activations import attention_of_rows

    step, total = max(1, _BLOCK_FLOATS // (image.num_tokens * _MOST_HEADS)), None
    for start in range(0, len(rows), step):
        block = attention_of_rows(image, rows[start : start + step])
        found = np.stack([seen[:, :, :count].double().sum(1).cpu().numpy() for seen in block])
        total = found if total is None else total + found
    assert total is not None
    return total
