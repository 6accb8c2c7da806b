"""How an accelerator puts a layer of many objects to its places: few launches, whatever the number of objects.

The device gets each object's layer as it is in its file, one after the other. One gather of each part then makes of
these what stands in the prompt, one token after the other, by head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pictool.runtime.tensors import to_device


@dataclass(frozen=True)
class StagedObject:
    """An object's layer: parts [heads, length, width] of these dimensions, of which `tokens` are wanted."""

    dims: tuple[tuple[int, int, int], ...]
    tokens: slice

    @property
    def count(self) -> int:
        """Numbers in all parts."""
        return sum(map(math.prod, self.dims))

    def wanted(self, part: int, first: int, unit: int) -> NDArray[np.int64]:
        """Which pieces of `unit` numbers are wanted of a part, if those of the object begin at the number `first`.

        Returns:
            int64 [heads, tokens, width / unit].
        """
        heads, length, width = self.dims[part]
        before = first + sum(map(math.prod, self.dims[:part]))
        rows = np.arange(heads)[:, None] * length + np.arange(self.tokens.start, self.tokens.stop)
        return before // unit + rows[..., None] * (width // unit) + np.arange(width // unit)


class StagedLayer:
    """A layer of all objects, in their order, in one buffer of the device."""

    def __init__(self, objects: Sequence[StagedObject], device: torch.device) -> None:
        dims, firsts = objects[0].dims, [*accumulate((each.count for each in objects), initial=0)]
        self._count, self._device = firsts.pop(), device
        self._unit = math.gcd(*(width for _, _, width in dims))  # pieces of all parts begin at a multiple of it
        self._shapes = [(heads, -1, width) for heads, _, width in dims]
        self._pieces = [self._pieces_of(part, objects, firsts) for part in range(len(dims))]

    def _pieces_of(self, part: int, objects: Sequence[StagedObject], firsts: Sequence[int]) -> Tensor:
        wanted = [each.wanted(part, first, self._unit) for each, first in zip(objects, firsts, strict=True)]
        return to_device(np.concatenate(wanted, 1).ravel(), self._device)

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """Room for a layer of all objects, 1-dimensional."""
        return torch.empty(self._count, dtype=dtype, device=self._device)

    def gather(self, buffer: Tensor, part: int) -> Tensor:
        """What is wanted of a part, [heads, tokens, width]: the tokens of the first object, then those of the next."""
        return buffer.view(-1, self._unit)[self._pieces[part]].view(self._shapes[part])
