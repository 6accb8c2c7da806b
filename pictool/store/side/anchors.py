"""Text that a prompt shares with sequences of tokens without having any of them as a whole.

Of all windows of `WIDTH` tokens one in eight is sampled, by its tokens: the same ones wherever a text is, in every
process. A sequence is found by the samples that it shares with a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.core import TokenIds
from pictool.store.side.search import HashedTokens, Hashes, Ints, TokenRun

WIDTH = 8
_TOP = np.uint64(61)  # the highest three bits of a hash, which all of its tokens decide
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def _samples(tokens: HashedTokens) -> tuple[Hashes, Ints]:
    """The sampled windows of tokens: hashes in ascending order, each once, and where each is first."""
    hashes, at = tokens.windows(WIDTH), _sampled(tokens.tokens)
    found, first = np.unique(hashes[at], return_index=True)
    return found, at[first]


def _sampled(tokens: TokenIds) -> Ints:
    """Where the sampled windows begin. What tells windows apart is another hash, which nobody can foresee."""
    values = (tokens.astype(np.uint64) + np.uint64(1)) * _MULTIPLIER
    values ^= values >> np.uint64(32)
    sums = np.zeros(max(0, len(values) - WIDTH + 1), dtype=np.uint64)
    for place in range(WIDTH):
        sums = sums * _MULTIPLIER + values[place : place + len(sums)]
    return np.flatnonzero(sums >> _TOP == 0)


@dataclass(frozen=True)
class Shared:
    """Samples of a prompt that sequences have too [shared]: which sequence, where in it, and where in the prompt."""

    which: Ints
    at: Ints
    position: Ints

    def of(self, which: int) -> Shared:
        """Those of one sequence, in its order."""
        index = np.flatnonzero(self.which == which)
        index = index[np.argsort(self.at[index], kind="stable")]
        return Shared(self.which[index], self.at[index], self.position[index])


class AnchorTable:
    """The samples of sequences, by hash. Immutable."""

    def __init__(self, counts: Ints, hashes: Hashes, which: Ints, at: Ints) -> None:
        order = np.argsort(hashes, kind="stable")
        self.counts, self._hashes, self._which, self._at = counts, hashes[order], which[order], at[order]

    @classmethod
    def of(cls, sequences: Sequence[TokenIds], first: int = 0) -> AnchorTable:
        """The samples of sequences, the first of which is number `first`."""
        found = [_samples(HashedTokens(tokens)) for tokens in sequences]
        counts = np.array([len(hashes) for hashes, _ in found], dtype=np.int64)
        hashes = np.concatenate([np.zeros(0, np.uint64), *(hashes for hashes, _ in found)])
        at = np.concatenate([np.zeros(0, np.int64), *(at for _, at in found)])
        return cls(counts, hashes, np.repeat(np.arange(len(found)) + first, counts), at)

    def changed(self, is_kept: NDArray[np.bool_], new: Sequence[TokenIds]) -> AnchorTable:
        """The table of the kept sequences and, after them, the new ones. Only these are hashed."""
        number, rows = np.cumsum(is_kept) - 1, is_kept[self._which]
        added = AnchorTable.of(new, int(is_kept.sum()))
        return AnchorTable(
            np.concatenate([self.counts[is_kept], added.counts]),
            np.concatenate([self._hashes[rows], added._hashes]),
            np.concatenate([number[self._which[rows]], added._which]),
            np.concatenate([self._at[rows], added._at]),
        )

    def shared(self, prompt: HashedTokens) -> Shared:
        """What a prompt shares with the sequences: at most as much as the table has."""
        hashes, position = _samples(prompt)
        first = np.searchsorted(self._hashes, hashes)
        count = np.searchsorted(self._hashes, hashes, side="right") - first
        rows = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        return Shared(self._which[rows], self._at[rows], np.repeat(position, count))


def run_around(prompt: TokenIds, tokens: TokenIds, shift: int, position: int, low: int, high: int) -> TokenRun:
    """The longest run within [low, high) around a position of a prompt at which it has a sequence's tokens, whose token
    0 is at `shift`. Empty if it has another token there. One at position 0 that is not the sequence's beginning starts
    at 1: nothing can be linked there.
    """
    low, high = max(low, shift, int(shift < 0)), min(high, shift + len(tokens))
    differs = low + np.flatnonzero(prompt[low:high] != tokens[low - shift : high - shift])
    after = int(np.searchsorted(differs, position))
    start = int(differs[after - 1]) + 1 if after else low
    end = int(differs[after]) if after < len(differs) else high
    return TokenRun(0, start, max(start, end), start - shift)
