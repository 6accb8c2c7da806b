"""Which tokens of a prompt are in a repeat: a run of at least `window` units that an earlier prompt has, anywhere.

Every window of the text has one anchor: of its substrings of half its length, the one with the least hash, the leftmost
of several (winnowing; Schleimer et al. 2003). Equal windows have equal anchors in the same place. So a window was there
before only if its anchor was, and an index of anchors, a tenth of all positions, finds each repeat. What is around the
first occurrence of an anchor is compared unit by unit; anchors that occur in different surroundings keep the hashes of
all their windows, so that no number of occurrences makes a lookup slow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, HashIndex, Indices, Rolling, Units, grown

Regions = Sequence[tuple[int, int]]  # [start, end) of a prompt's units
Mask = NDArray[np.bool_]
_MOST = 1 << 19  # units that are scanned together; their positions take this many numbers
_PLACE = np.uint64((1 << 20) - 1)
_GROUPS = 32  # of windows, by whose differences the error of a sample is told


@dataclass(frozen=True)
class Gathered:
    """Regions of one prompt, one after the other, and the windows in each of them."""

    units: Units
    places: Indices  # [units] in the prompt
    ends: Indices  # [units] of the region that each is in
    starts: Indices  # of the windows that are within one region


def gather(units: Units, regions: Regions, window: int) -> Gathered:
    """Put regions together; those that are too short for a window are left out."""
    kept = [(start, end) for start, end in regions if end - start >= window]
    lengths = np.asarray([end - start for start, end in kept], dtype=np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)
    within = np.arange(len(ends), dtype=np.int64)
    places = within + np.repeat(np.asarray([start for start, _ in kept], dtype=np.int64), lengths)
    places -= ends - np.repeat(lengths, lengths)
    return Gathered(units[places], places, ends, within[within + window <= ends])


def split(regions: Regions, window: int) -> list[list[tuple[int, int]]]:
    """Regions in groups of a bounded size; parts of a longer region share all but one unit of a window."""
    groups: list[list[tuple[int, int]]] = [[]]
    room = _MOST
    for start, end in regions:
        while end - start >= window:
            if room < window:
                groups.append([])
                room = _MOST
            taken = min(room, end - start)
            groups[-1].append((start, start + taken))
            room -= taken
            start += taken - window + 1
    return groups


def cover(size: int, starts: Indices, ends: Indices) -> Mask:
    """The union of ranges [start, end) of `size` places."""
    steps = np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
    return np.cumsum(steps[:size]) > 0


class RepeatIndex(ABC):
    """Finds repeats of at least `window` units in prompts that come one after another."""

    def __init__(self, window: int) -> None:
        self.window = window

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that it takes."""

    @abstractmethod
    def scan(self, units: Units, regions: Regions, inner: Mask, seed: int) -> float:
        """Count the units of `inner` that are in repeats of earlier prompts, then remember this one.

        Args:
            regions: what to scan. Every other window must be in an earlier prompt.
            seed: that of the tenant; tenants have no repeats in common.
        """

    @abstractmethod
    def error(self) -> float:
        """By how many units the sum of all counts may be wrong."""


class ExactRepeats(RepeatIndex):
    """All repeats. Memory grows with the different text that was scanned: about 3 bytes for a byte of it."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self._part = max(1, window // 2)  # units of an anchor
        self._anchors, self._windows = HashIndex(), HashIndex()
        self._positions = np.zeros(0, dtype=np.int64)  # [anchors] of their first occurrences in the text
        self._is_varied = np.zeros(0, dtype=np.uint8)  # [anchors] whether the windows are kept
        self._text: Units = np.zeros(0, dtype=np.uint8)
        self._length = 0
        self._bounds = np.zeros(16, dtype=np.int64)  # [pieces + 1] of the text
        self._num_bounds = 1

    @property
    def num_bytes(self) -> int:
        arrays = (self._positions, self._is_varied, self._text, self._bounds)
        return sum(array.nbytes for array in arrays) + self._anchors.num_bytes + self._windows.num_bytes

    def error(self) -> float:
        return 0.0

    def scan(self, units: Units, regions: Regions, inner: Mask, seed: int) -> float:
        covered = np.zeros(len(units), dtype=np.bool_)
        scans = [_Scan(self, gather(units, group, self.window), seed) for group in split(regions, self.window)]
        for scan in scans:
            covered[scan.text.places[scan.covered()]] = True
        for scan in scans:
            scan.remember(has_others=len(scans) > 1)
        return float(np.count_nonzero(covered & inner))

    def relate(self, text: Gathered, places: Indices, lefts: Indices, rights: Indices, numbers: Indices) -> Mask:
        """Whether the text around anchors is that around their first occurrences, so many units to each side."""
        positions = self._positions[numbers]
        pieces = np.searchsorted(self._bounds[: self._num_bounds], positions, side="right")
        is_same = (positions - lefts >= self._bounds[pieces - 1]) & (positions + rights <= self._bounds[pieces])
        offsets = np.arange(-(self.window - self._part), self.window)
        is_asked = (offsets >= -lefts[:, None]) & (offsets < rights[:, None])
        own = text.units[np.clip(places[:, None] + offsets, 0, len(text.units) - 1)]
        first = self._text[np.clip(positions[:, None] + offsets, 0, self._length - 1)]
        result: Mask = is_same & ((own == first) | ~is_asked).all(axis=1)
        return result

    def vary(self, numbers: Indices, seed: int) -> None:
        """Keep the windows around the first occurrences of anchors, unless they are kept."""
        numbers = np.unique(numbers[self._is_varied[numbers] == 0])
        if not len(numbers):
            return
        self._is_varied[numbers] = 1
        positions = self._positions[numbers]
        pieces = np.searchsorted(self._bounds[: self._num_bounds], positions, side="right")
        starts = np.maximum(self._bounds[pieces - 1], positions - (self.window - self._part))
        ends = np.minimum(self._bounds[pieces], positions + self.window)
        around = list(zip(starts.tolist(), ends.tolist(), strict=True))
        for group in split(around, self.window):
            text = gather(self._text, group, self.window)
            self._windows.number(Rolling(text.units, seed).windows(self.window)[text.starts])

    def store(self, text: Gathered, is_kept: Mask) -> Indices:
        """Append the chosen units to the text; returns the place of each unit there."""
        chosen = np.flatnonzero(is_kept)
        is_first = np.ones(len(chosen), dtype=np.bool_)
        is_first[1:] = (np.diff(chosen) > 1) | (np.diff(text.ends[chosen]) > 0)
        size = self._length + len(chosen)
        if self._text.dtype != text.units.dtype:
            self._text = np.zeros(0, dtype=text.units.dtype)  # the first text; all are of one kind
        self._text = grown(self._text, size, 0)
        self._text[self._length : size] = text.units[chosen]
        new = np.append(self._length + np.flatnonzero(is_first)[1:], size)
        self._bounds = grown(self._bounds, self._num_bounds + len(new), 0)
        self._bounds[self._num_bounds : self._num_bounds + len(new)] = new
        self._num_bounds += len(new)
        places = self._length + np.cumsum(is_kept) - 1
        self._length = size
        return places

    def add_anchors(self, hashes: Hashes) -> tuple[Indices, Indices]:
        """Add anchors that are new: their numbers, and which of them are the first of their hash."""
        unique, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        numbers = self._anchors.count + inverse
        self._anchors.add(unique)
        self._positions = grown(self._positions, self._anchors.count, 0)
        self._is_varied = grown(self._is_varied, self._anchors.count, 0)
        return numbers, first


class _Scan:
    """Regions of a prompt against the index: what they repeat, then they themselves."""

    def __init__(self, index: ExactRepeats, text: Gathered, seed: int) -> None:
        self._index, self.text, self._seed = index, text, seed
        self._windows: Hashes | None = None
        window, part = index.window, index._part
        if not len(text.starts):
            self._places = self._firsts = self._lasts = np.zeros(0, dtype=np.int64)
            return
        self._rolling = Rolling(text.units, seed)
        hashes = self._rolling.polynomials(part)
        packed = (hashes & ~_PLACE) | np.arange(len(hashes), dtype=np.uint64)
        least = (sliding_min(packed, window - part + 1) & _PLACE).astype(np.int64)[text.starts]
        changes = np.flatnonzero(np.diff(least)) + 1
        bounds = np.concatenate(([0], changes, [len(least)]))
        self._places = least[bounds[:-1]]
        self._firsts, self._lasts = text.starts[bounds[:-1]], text.starts[bounds[1:] - 1]  # windows of each anchor
        self._hashes = hashes[self._places]

    def covered(self) -> Mask:
        """Which units are in repeats."""
        index, window = self._index, self._index.window
        if not len(self._places):
            return np.zeros(len(self.text.units), dtype=np.bool_)
        self._numbers = index._anchors.find(self._hashes)
        known = np.flatnonzero(self._numbers >= 0)
        same, other = self._compare(known)
        index.vary(self._numbers[other], self._seed)
        self._varied = other
        starts = self._starts_of(other)
        hits = starts[index._windows.find(self._window_hashes()[starts]) >= 0] if len(starts) else starts
        return cover(
            len(self.text.units), np.concatenate((self._firsts[same], hits)),
            np.concatenate((self._lasts[same] + window, hits + window)),
        )  # fmt: skip

    def remember(self, has_others: bool) -> None:
        """Add the anchors that are new, and the windows of those that occur in other surroundings than at first.

        Args:
            has_others: whether other parts of the prompt may have added some of them meanwhile.
        """
        index = self._index
        if not len(self._places):
            return
        self._numbers = index._anchors.find(self._hashes) if has_others else self._numbers
        new = np.flatnonzero(self._numbers < 0)
        if len(new):
            numbers, first = index.add_anchors(self._hashes[new])
            self._numbers[new] = numbers
            first = new[first]
            index._positions[self._numbers[first]] = index.store(self.text, self._around(first))[self._places[first]]
            is_first = np.zeros(len(self._places), dtype=np.bool_)
            is_first[first] = True
            new = new[~is_first[new]]
        _, other = self._compare(new)
        index.vary(self._numbers[other], self._seed)
        starts = self._starts_of(np.concatenate((self._varied, other)))
        if len(starts):
            index._windows.number(self._window_hashes()[starts])

    def _compare(self, which: Indices) -> tuple[Indices, Indices]:
        """Those of some known anchors around which all is as at their first occurrence, and the others."""
        if not len(which):
            return which, which
        places, lefts = self._places[which], self._places[which] - self._firsts[which]
        rights = self._lasts[which] + self._index.window - places
        is_same = self._index.relate(self.text, places, lefts, rights, self._numbers[which])
        return which[is_same], which[~is_same]

    def _around(self, which: Indices) -> Mask:
        """The units of all windows with these anchors."""
        return cover(len(self.text.units), self._firsts[which], self._lasts[which] + self._index.window)

    def _starts_of(self, which: Indices) -> Indices:
        """The starts of the windows of these anchors."""
        counts = self._lasts[which] - self._firsts[which] + 1
        ends = np.cumsum(counts)
        return np.repeat(self._firsts[which] - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)

    def _window_hashes(self) -> Hashes:
        if self._windows is None:
            self._windows = self._rolling.windows(self._index.window)
        return self._windows


def sliding_min(values: Hashes, width: int) -> Hashes:
    """The least of each `width` values that follow one another."""
    size = 1
    while 2 * size <= width:
        values = np.minimum(values[:-size], values[size:])
        size *= 2
    return np.minimum(values[: len(values) - (width - size)], values[width - size :]) if size < width else values


@dataclass
class SampledRepeats(RepeatIndex):
    """The same within a budget of memory: exact until it is used up, then by a sample of the windows, by their hashes.

    Each window that begins in `inner` and was there before is a unit in a repeat. The last units of a repeat begin no
    such window: of those, between none and all are counted already. The middle is told, and half of them as error, with
    three standard errors of the sample.
    """

    window: int
    budget: int  # bytes
    rate: int = 1  # one window of so many is kept
    _kept: HashIndex = field(default_factory=HashIndex)
    _groups: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_GROUPS))
    _edges: float = 0.0

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def error(self) -> float:
        spread = float(((self._groups - self._groups.mean()) ** 2).sum()) * _GROUPS / (_GROUPS - 1)
        return 3 * math.sqrt(spread) + self._edges

    def scan(self, units: Units, regions: Regions, inner: Mask, seed: int) -> float:
        covered, counted, new = np.zeros(len(units), dtype=np.bool_), 0.0, list[Hashes]()
        for group in split(regions, self.window):
            text = gather(units, group, self.window)
            if not len(text.starts):
                continue
            rolling = Rolling(text.units, seed)
            hashes = rolling.windows(self.window)[text.starts]
            sampled = np.flatnonzero(hashes % np.uint64(self.rate) == 0)
            starts, hashes = text.starts[sampled], hashes[sampled]
            is_hit = self._kept.find(hashes) >= 0
            new.append(hashes)
            if self.rate == 1:
                hits = starts[is_hit]
                covered[text.places[cover(len(text.units), hits, hits + self.window)]] = True
            has_next = starts + self.window < text.ends[starts]
            longer = rolling.ranges(starts[has_next], starts[has_next] + self.window + 1)
            new.append((longer & ~_PLACE) | (hashes[has_next] & _PLACE))  # kept as long as the window's own
            if self.rate > 1:
                is_end = text.places[starts] + self.window == len(units)
                is_end[has_next] = self._kept.find(new[-1]) < 0
                counted += self._count(hashes[is_hit], inner[text.places[starts[is_hit]]], is_end[is_hit])
        for hashes in new:
            self._kept.number(hashes)
        self._thin()
        return counted + float(np.count_nonzero(covered & inner))

    def _count(self, hashes: Hashes, is_inner: Mask, is_end: Mask) -> float:
        """An estimate of the units of repeats, by sampled windows that were there before. Adds to the error."""
        edges = 0.5 * (self.window - 1) * is_end
        groups = ((hashes >> np.uint64(40)) % np.uint64(_GROUPS)).astype(np.int64)
        self._groups += self.rate * np.bincount(groups, is_inner + edges, _GROUPS)
        self._edges += self.rate * float(edges.sum())
        return float(self.rate * (is_inner + edges).sum())

    def _thin(self) -> None:
        """Keep fewer windows where they take more than the budget."""
        while self._kept.num_bytes > self.budget:
            self.rate *= 2
            hashes = self._kept._hashes[: self._kept.count]
            kept = HashIndex()
            kept.add(hashes[hashes % np.uint64(self.rate) == 0])
            self._kept = kept
