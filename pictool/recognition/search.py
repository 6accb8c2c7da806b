"""Where sequences of tokens occur in a prompt, whatever surrounds them: a rolling hash finds, a comparison decides.

A tokenizer may join the first and last tokens of a text with what is next to it (`.` and `\\n\\n` to one token, `▁The`
to `The`), so a sequence occurs where its *interior* does: all of it but its edges, `edge_of` tokens at either end. Each
sequence is hashed over a window in the middle of its interior, which a prompt is searched for, and over its interior as
a whole, by which a place is confirmed without reading tokens.

The hash of tokens t is Σ (t_j + 1) · base^j modulo 2^64. The base is drawn for each process, so that nobody can write
texts that collide. All work is bounded by the length of the prompt, whatever it and the sequences are.
"""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pictool.core import TokenIds

MAX_EDGE = 16  # tokens at either end of a sequence that may differ
MAX_WINDOW = 64
MAX_RUNS = 1024  # that are chosen in one prompt
MAX_REFUTED = 256  # candidates whose hash promises what closer inspection denies, in one prompt
_CANDIDATES_PER_TOKEN, _LEAST_CANDIDATES = 2, 4096  # for each width of window
_BASE = secrets.randbits(61) << 3 | 5  # 5 modulo 8: its powers repeat after 2^62
_INVERSE = pow(_BASE, -1, 1 << 64)

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]


def edge_of(length: int) -> int:
    """How many tokens at either end of a sequence may differ: a quarter, `MAX_EDGE` at most, none of a short one."""
    return min(MAX_EDGE, length // 8 * 2)


@dataclass(frozen=True)
class TokenRun:
    """Tokens [start, end) of a prompt that are those of sequence `which` from its token `offset` on."""

    which: int
    start: int
    end: int
    offset: int


class HashedTokens:
    """Token ids, of which the hash of any part is one subtraction and one product."""

    def __init__(self, tokens: TokenIds) -> None:
        self.tokens = tokens
        self._sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
        np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, len(tokens)), out=self._sums[1:])
        self._windows: dict[int, Hashes] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def windows(self, width: int) -> Hashes:
        """The hash of tokens[i : i + width] for every i, uint64 [n - width + 1]; nothing if there is no such window."""
        if width not in self._windows:
            count = max(0, len(self) - width + 1)
            sums = self._sums[width : width + count] - self._sums[:count]
            self._windows[width] = sums * _powers(_INVERSE, count)
        return self._windows[width]

    def parts(self, starts: Ints, ends: Ints) -> Hashes:
        """The hash of every tokens[start:end]."""
        inverse = _powers(_INVERSE, len(self) + 1)
        parts: Hashes = (self._sums[ends] - self._sums[starts]) * inverse[starts]
        return parts

    def has(self, starts: Ints, ends: Ints, hashes: Hashes) -> NDArray[np.bool_]:
        """Whether every [start, end) is within these tokens and has its hash."""
        is_right = (starts >= 0) & (ends <= len(self))
        is_right[is_right] = self.parts(starts[is_right], ends[is_right]) == hashes[is_right]
        return is_right


def _powers(base: int, count: int) -> Hashes:
    return _power_table(base, count.bit_length())[:count]


@lru_cache(maxsize=64)
def _power_table(base: int, bits: int) -> Hashes:
    powers = np.full(1 << bits, base, dtype=np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    powers.flags.writeable = False
    return powers


@dataclass(frozen=True)
class _Columns:
    """What is known of every sequence [s]: its length and edge, its window's width and start, and its hashes."""

    length: Ints
    edge: Ints
    width: Ints
    start: Ints
    window: Hashes
    interior: Hashes
    whole: Hashes

    @classmethod
    def of(cls, sequences: Sequence[TokenIds]) -> _Columns:
        sizes, hashes = np.zeros((len(sequences), 4), np.int64), np.zeros((len(sequences), 3), np.uint64)
        for i, tokens in enumerate(sequences):
            length, edge = len(tokens), edge_of(len(tokens))
            width = min(MAX_WINDOW, 1 << ((length - 2 * edge).bit_length() - 1))
            start = (length - width) // 2
            sizes[i] = length, edge, width, start
            parts = np.array([start, edge, 0]), np.array([start + width, length - edge, length])
            hashes[i] = HashedTokens(tokens).parts(*parts)
        return cls(*sizes.T, *hashes.T)

    def joined(self, other: _Columns) -> _Columns:
        names = [field.name for field in fields(self)]
        return _Columns(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in names))

    def rows(self, index: NDArray[np.bool_] | Ints) -> _Columns:
        return _Columns(*(getattr(self, field.name)[index] for field in fields(self)))


class _Lookup:
    """The sequences whose window has one width, by its hash; of equal hashes the longest sequence first."""

    def __init__(self, columns: _Columns, width: int) -> None:
        self.width = width
        which = np.flatnonzero(columns.width == width)
        which = which[np.lexsort((-columns.length[which], columns.window[which]))]
        self._which = which
        self._hashes, first = np.unique(columns.window[which], return_index=True)
        self._first = np.append(first, len(which))
        self._shift = np.uint64(64 - max(10, min(24, (16 * len(which)).bit_length())))
        self._is_known = np.zeros(1 << (64 - int(self._shift)), dtype=bool)  # by the hash's first bits
        self._is_known[self._hashes >> self._shift] = True

    def find(self, prompt: HashedTokens) -> tuple[Ints, Ints]:
        """Sequences and the positions of their windows in a prompt, [pairs] each; a bounded number."""
        hashes = prompt.windows(self.width)
        at = np.flatnonzero(self._is_known[hashes >> self._shift])
        index = np.searchsorted(self._hashes, hashes[at])
        is_hit = self._hashes[np.minimum(index, len(self._hashes) - 1)] == hashes[at]
        at, index = at[is_hit], index[is_hit]
        limit = (_CANDIDATES_PER_TOKEN * len(prompt) + _LEAST_CANDIDATES) // max(1, len(at))
        count = np.minimum(self._first[index + 1] - self._first[index], max(1, limit))
        nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return self._which[np.repeat(self._first[index], count) + nth], np.repeat(at, count)


@dataclass(frozen=True)
class Candidates:
    """Places where a sequence's interior has the right hash: its token i is at position `shift` + i of the prompt.

    Sorted: the longest sequences first, then those that are there as a whole, then by position.
    """

    which: Ints  # [candidates]
    shift: Ints
    length: Ints
    is_whole: NDArray[np.bool_]

    def of(self, is_kept: NDArray[np.bool_]) -> Candidates:
        """Those of them that are kept."""
        return Candidates(self.which[is_kept], self.shift[is_kept], self.length[is_kept], self.is_whole[is_kept])

    def groups(self) -> Iterator[tuple[Ints, Ints, int]]:
        """Candidates of one length, all of them whole or none: sequences, shifts, and the length."""
        is_new = (np.diff(self.length) != 0) | (np.diff(self.is_whole) != 0)
        borders = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(self.which)]
        for first, last in itertools.pairwise(borders):
            if first < last:
                yield self.which[first:last], self.shift[first:last], int(self.length[first])


class SearchTable:
    """Sequences, each of at least one token, that prompts are searched for. Immutable."""

    def __init__(self, columns: _Columns) -> None:
        self._columns = columns
        self._lookups = [_Lookup(columns, width) for width in np.unique(columns.width).tolist()]

    @classmethod
    def of(cls, sequences: Sequence[TokenIds]) -> SearchTable:
        return cls(_Columns.of(sequences))

    def changed(self, is_kept: NDArray[np.bool_], new: Sequence[TokenIds]) -> SearchTable:
        """The table of the kept sequences and, after them, the new ones. Only these are hashed."""
        return SearchTable(self._columns.rows(is_kept).joined(_Columns.of(new)))

    def candidates(self, prompt: HashedTokens) -> Candidates:
        """Where the sequences may be in a prompt."""
        found = [lookup.find(prompt) for lookup in self._lookups]
        empty, columns = np.zeros(0, dtype=np.int64), self._columns
        which = np.concatenate([empty, *(which for which, _ in found)])
        shift = np.concatenate([empty, *(at for _, at in found)]) - columns.start[which]
        edge, length = columns.edge[which], columns.length[which]
        is_right = prompt.has(shift + edge, shift + length - edge, columns.interior[which])
        which, shift, length = which[is_right], shift[is_right], length[is_right]
        is_whole = prompt.has(shift, shift + length, columns.whole[which])
        order = np.lexsort((shift, ~is_whole, -length))
        return Candidates(which[order], shift[order], length[order], is_whole[order])


def run_at(prompt: TokenIds, tokens: TokenIds, shift: int, low: int, high: int, which: int = 0) -> TokenRun | None:
    """The longest run within [low, high) in which a prompt has a sequence's tokens, from token 0 at `shift` on.

    None if the interior differs or does not fit. A run at position 0 begins with the sequence's first token, else it
    begins at 1: what is computed after dropped tokens is not what position 0 has.
    """
    edge = edge_of(len(tokens))
    start, end = shift + edge, shift + len(tokens) - edge
    if start < low or end > high or not np.array_equal(prompt[start:end], tokens[edge : len(tokens) - edge]):
        return None
    while start > max(low, shift) and prompt[start - 1] == tokens[start - 1 - shift]:
        start -= 1
    while end < min(high, shift + len(tokens)) and prompt[end] == tokens[end - shift]:
        end += 1
    if start == 0 and shift < 0:
        start = 1
    return TokenRun(which, start, end, start - shift) if start < end else None


class TakenRuns:
    """Runs of a prompt that do not overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int) -> None:
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)

    def conflict(self, start: int, end: int) -> int | None:
        """Where a run that overlaps [start, end) ends; None if there is none."""
        at = bisect_right(self._starts, start)
        if at and self._ends[at - 1] > start:
            return self._ends[at - 1]
        return self._ends[at] if at < len(self) and self._starts[at] < end else None

    def gap(self, position: int, length: int) -> tuple[int, int]:
        """The free tokens [low, high) around a free position of a prompt of `length` tokens."""
        at = bisect_right(self._starts, position)
        return (self._ends[at - 1] if at else 0), (self._starts[at] if at < len(self) else length)


Place = Callable[[int, int, int, int], TokenRun | None]  # which, shift, low, high → the run, if it is one


def choose_runs(candidates: Candidates, length: int, place: Place) -> list[TokenRun]:
    """Runs that do not overlap in a prompt of `length` tokens, in its order; the longest sequences are chosen first.

    Where edges of two sequences claim the same token, the one that is chosen first has it.

    Args:
        place: returns the run of a candidate within [low, high), or None if it turns out to be none.
    """
    taken, runs, num_refuted = TakenRuns(), list[TokenRun](), 0
    for which, shift, tokens in candidates.groups():
        edge, i = edge_of(tokens), 0
        while i < len(which) and len(runs) < MAX_RUNS and num_refuted < MAX_REFUTED:
            first, last = int(shift[i]) + edge, int(shift[i]) + tokens - edge
            end = taken.conflict(first, last)
            if end is None:
                run = place(int(which[i]), int(shift[i]), *taken.gap(first, length))
                if run is None:
                    num_refuted, i = num_refuted + 1, i + 1
                    continue
                taken.add(run.start, run.end)
                runs.append(run)
                end = run.end
            i = max(i + 1, int(np.searchsorted(shift, end - edge)))
    return sorted(runs, key=lambda run: run.start)
