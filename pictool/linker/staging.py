"""How an accelerator puts a layer of many objects to its places: few launches, whatever the number of objects.

Each object's keys, and its values, are one copy to rows beside those of the others. One gather then makes of the rows
what stands in the prompt, one token after the other, by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pictool.runtime.tensors import to_device


@dataclass(frozen=True)
class StagedObject:
    """An object's layer: of `heads` heads, `length` tokens, of which `tokens` are wanted."""

    heads: int
    length: int
    tokens: slice

    @property
    def num_rows(self) -> int:
        return self.heads * self.length

    def wanted(self, first: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The rows that are wanted, int64 [heads, tokens], if its own begin at `first`."""
        by_head = first + np.arange(self.heads)[:, None] * self.length
        return by_head + np.arange(self.tokens.start, self.tokens.stop)


class StagedRows:
    """The rows of all objects, in their order."""

    def __init__(self, objects: Sequence[StagedObject], device: torch.device) -> None:
        ends = [*accumulate((each.num_rows for each in objects), initial=0)]
        wanted = np.concatenate([each.wanted(first) for each, first in zip(objects, ends, strict=False)], 1)
        self._rows = [slice(first, first + each.num_rows) for each, first in zip(objects, ends, strict=False)]
        self._num_rows, self._heads, self._index = ends[-1], len(wanted), to_device(wanted.ravel(), device)

    def buffer(self, width: int, dtype: torch.dtype) -> Tensor:
        """Room for a part of a layer, [rows, width]."""
        return torch.empty(self._num_rows, width, dtype=dtype, device=self._index.device)

    def of_object(self, buffer: Tensor, which: int) -> Tensor:
        """Where an object's numbers [heads, length, width] are to be copied to, as [heads · length, width]."""
        return buffer[self._rows[which]]

    def gather(self, buffer: Tensor) -> Tensor:
        """What is wanted of a part, [heads, tokens, width]: the tokens of the first object, then those of the next."""
        return buffer[self._index].view(self._heads, -1, buffer.shape[1])
