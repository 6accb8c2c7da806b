"""Prompts of a log that are measured together, as arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, HashIndex, Indices, Rolling, mixed
from pictool.estimate.repeats import merged
from pictool.estimate.segments import LoggedPrompt

Mask = NDArray[np.bool_]
Sums = NDArray[np.float64]


@dataclass
class LogBatch:
    """Prompts that are measured together. Arrays are by blocks, in units, if nothing else is said.

    Fields:
        first: the number of the first prompt. ends: [prompts] in units.
        blocks: [5, blocks] their numbers, lengths, the numbers of the parts that they are in, lengths of these, kinds.
        prompts: from 0 on. texts: the message that each block is in. is_old_text: an earlier prompt has it.
        text: of all prompts; None: the log has hashes only.
        prefix: [prompts]. again: [prompts] tokens that legolink-16 computes of what is linked.
        beyond: of a block, what is after the prefix. most: of a block, what is in repeats.
        is_whole: an earlier prompt has this block, which is long enough. is_linked: it, or its part, beyond the prefix.
    """

    logged: Sequence[LoggedPrompt]
    first: int
    blocks: Indices
    prompts: Indices
    texts: Indices
    is_old_text: Mask
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
        self.beyond, self.most = np.zeros(len(self.lengths), dtype=np.int64), np.zeros(len(self.lengths))
        self.is_whole = self.is_linked = np.zeros(len(self.lengths), dtype=np.bool_)

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

    def regions(self, pairs: HashIndex, window: int) -> tuple[Indices, Indices]:
        """Where windows are that no earlier prompt is known to have: around new blocks, and known ones anew together.

        Adds these prompts' pairs of neighbours.
        """
        prompts, ends = self.prompts, self.block_ends
        is_inner = (self.texts[:-1] == self.texts[1:]) & self.is_old_text[1:]
        asked = np.flatnonzero(~is_inner & (prompts[:-1] == prompts[1:]))
        left, right = self.numbers[asked].astype(np.uint64), self.numbers[asked + 1].astype(np.uint64)
        _, first = pairs.number(mixed(left << np.uint64(32) | right))
        apart = asked[(first >= 0) & (prompts[asked[first]] == prompts[asked])]
        apart = apart[self.is_whole[apart] & self.is_whole[apart + 1]]
        new = np.flatnonzero(~self.is_whole)
        groups = prompts[np.concatenate((new, apart))]
        lows = np.concatenate((ends[new] - self.lengths[new], ends[apart])) - (window - 1)
        highs = np.concatenate((ends[new], ends[apart])) + window - 1
        lows, highs = np.maximum(lows, (self.ends - self.sizes)[groups]), np.minimum(highs, self.ends[groups])
        order = np.argsort(groups, kind="stable")
        return merged(lows[order], highs[order], groups[order])
