"""Prompts of a log that are measured together, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, Indices, Rolling
from pictool.estimate.segments import LoggedPrompt

Mask = NDArray[np.bool_]
Sums = NDArray[np.float64]


@dataclass
class LogBatch:
    """Prompts that are measured together. Arrays are by blocks, in units, if nothing else is said.

    Fields:
        first: the number of the first prompt. ends: [prompts] in units.
        blocks: [5, blocks] their numbers, lengths, the numbers of the parts that they are in, lengths of these, kinds.
        prompts: from 0 on. texts: the message that each block is in.
        text: of all prompts; None: the log has hashes only.
        prefix: [prompts]. again: [prompts] tokens that legolink-16 computes of what is linked.
        beyond: of a block, what is after the prefix.
        is_linked: an earlier prompt has this block, or its part, which is long enough, and it is beyond the prefix.
    """

    logged: Sequence[LoggedPrompt]
    first: int
    blocks: Indices
    prompts: Indices
    texts: Indices
    seeds: Hashes
    text: Rolling | None

    def __post_init__(self) -> None:
        self.numbers, self.lengths, self.parts, self.part_sizes, self.kinds = self.blocks
        count = len(self.logged)
        self.block_ends = np.cumsum(self.lengths)
        self.sizes = self.sum(self.lengths).astype(np.int64)
        self.ends = np.cumsum(self.sizes)
        self.bounds = np.searchsorted(self.prompts, np.arange(count + 1))  # [prompts + 1] of blocks
        self.prefix, self.again = np.zeros(count, dtype=np.int64), self.sum(0 * self.lengths)
        self.beyond = np.zeros(len(self.lengths), dtype=np.int64)
        self.is_linked = np.zeros(len(self.lengths), dtype=np.bool_)

    def sum(self, values: NDArray[Any]) -> Sums:
        """Sums over the blocks of each prompt."""
        return np.bincount(self.prompts, values, len(self.logged)).astype(np.float64)

    def after_prefix(self) -> Indices:
        """Of each block, what is after its prompt's prefix."""
        starts = self.ends - self.sizes
        found: Indices = np.clip(self.block_ends - (starts + self.prefix)[self.prompts], 0, self.lengths)
        return found

    def slices(self) -> Iterator[slice]:
        """The blocks of each prompt."""
        return itertools.starmap(slice, itertools.pairwise(self.bounds.tolist()))
