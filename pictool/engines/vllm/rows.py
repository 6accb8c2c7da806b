"""Rows of several prompts as virtual sequences: every run of consecutive positions [a, b) is one, of length b."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.core import RowMask

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Rows that are computed in one pass. `index` says which rows of the set, run by run; each array is per run."""

    index: Ints  # [rows]
    owner: Ints  # [runs]
    start: Ints
    end: Ints


@dataclass(frozen=True)
class RowSet:
    """Rows by prompt (`owner`), then by position."""

    owner: Ints  # [rows]
    position: Ints  # [rows]

    def __len__(self) -> int:
        return len(self.owner)

    @classmethod
    def of(cls, masks: Sequence[RowMask]) -> RowSet:
        """The rows of prompt i are where masks[i] is true."""
        rows = [np.flatnonzero(mask) for mask in masks]
        owner = np.repeat(np.arange(len(rows)), [len(one) for one in rows])
        return cls(owner, np.concatenate([np.zeros(0, dtype=np.int64), *rows]))

    def pieces(self, limit: int) -> Iterator[Piece]:
        """The rows in passes of at most `limit`.

        Within a prompt they go by position, so that whatever a row attends to is in place when its pass begins, or
        is computed in the same. Within a pass short runs stand first, as some backends want.
        """
        for first in range(0, len(self), limit):
            yield self._piece(first, min(first + limit, len(self)))

    def _piece(self, first: int, last: int) -> Piece:
        owner, position = self.owner[first:last], self.position[first:last]
        is_new = np.concatenate([[True], (np.diff(owner) != 0) | (np.diff(position) != 1)])
        begin = np.flatnonzero(is_new)
        length = np.diff(np.append(begin, last - first))
        order = np.argsort(length, kind="stable")
        begin, length = begin[order], length[order]
        index = first + np.repeat(begin - np.cumsum(length) + length, length) + np.arange(length.sum())
        return Piece(index, owner[begin], position[begin], position[begin] + length)
