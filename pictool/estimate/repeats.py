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
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, HashIndex, Indices, Rolling, Units, grown, spread

Mask = NDArray[np.bool_]
_MOST = 1 << 19  # units that are scanned together; their positions take this many numbers
_PLACE = np.uint64((1 << 20) - 1)
_SCANNED_BYTES = 128  # that a window of a sample takes while it is looked up
_GROUPS = 32  # of windows, by whose differences the error of a sample is told
_CHUNK = 1 << 12  # anchors whose surroundings are compared together


@dataclass(frozen=True)
class ScannedPrompts:
    """Prompts that came one after another.

    Fields:
        text: of all of them. ends: [prompts] in units.
        seeds: [prompts] of their tenants, who have no repeats in common.
        lows, highs: [regions] what to scan. Every other window must be in an earlier prompt.
    """

    text: Rolling
    ends: Indices
    seeds: Hashes
    lows: Indices
    highs: Indices

    def numbers(self, places: Indices) -> Indices:
        """The prompts that places are in."""
        return np.searchsorted(self.ends, places, side="right")

    def split(self, window: int) -> Iterator[tuple[Indices, Indices]]:
        """Regions in groups of a bounded size; parts of a longer region share all but one unit of a window."""
        lows, highs, room = list[int](), list[int](), _MOST
        for start, end in zip(self.lows.tolist(), self.highs.tolist(), strict=True):
            while end - start >= window:
                if room < window:
                    yield np.asarray(lows, dtype=np.int64), np.asarray(highs, dtype=np.int64)
                    lows, highs, room = [], [], _MOST
                taken = min(room, end - start)
                lows.append(start)
                highs.append(start + taken)
                room -= taken
                start += taken - window + 1
        if lows:
            yield np.asarray(lows, dtype=np.int64), np.asarray(highs, dtype=np.int64)


def cover(size: int, starts: Indices, ends: Indices) -> Mask:
    """The union of ranges [start, end) of `size` places."""
    steps = np.bincount(starts, minlength=size + 1) - np.bincount(ends, minlength=size + 1)
    return np.cumsum(steps[:size]) > 0


class RepeatIndex(ABC):
    """Finds repeats of at least `window` units in prompts that come one after another."""

    def __init__(self, window: int) -> None:
        self.window = window

    @abstractmethod
    def scan(self, prompts: ScannedPrompts, inner: Mask) -> tuple[Indices, NDArray[np.float64]]:
        """Find the units of `inner` that are in repeats of earlier prompts, and remember these prompts.

        Returns:
            Places, and how many such units each stands for.
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

    def error(self) -> float:
        return 0.0

    def scan(self, prompts: ScannedPrompts, inner: Mask) -> tuple[Indices, NDArray[np.float64]]:
        found = self._occurrences(prompts)
        if not len(found.places):
            return found.places, np.zeros(0)
        hashes = prompts.text.polynomials(found.places, self._part) + prompts.seeds[found.prompts]
        numbers, first = self._anchors.number(hashes)
        is_added = first == np.arange(len(first))
        self._store(prompts, found, np.flatnonzero(is_added), numbers[is_added])
        rest = np.flatnonzero(~is_added)
        is_same = self._relate(prompts.text.units, found.of(rest), numbers[rest])
        same, other = rest[is_same], rest[~is_same]
        same = same[(first[same] < 0) | (found.prompts[first[same]] < found.prompts[same])]
        is_known = first[other] < 0
        self._vary(numbers[other[is_known]], prompts.seeds[found.prompts[other[is_known]]])
        varied = np.unique(np.concatenate((other, first[other[~is_known]])))  # with the first of new anchors
        self._is_varied[numbers[varied]] = 1
        hits = self._number_windows(prompts, found.of(varied))
        covered = cover(
            len(inner), np.concatenate((found.firsts[same], hits)),
            np.concatenate((found.lasts[same], hits)) + self.window,
        )  # fmt: skip
        places = np.flatnonzero(covered & inner)
        return places, np.ones(len(places))

    def _occurrences(self, prompts: ScannedPrompts) -> _Occurrences:
        """The anchors of all windows of the regions, in order."""
        parts = [_winnow(prompts.text, *group, self.window, self._part) for group in prompts.split(self.window)]
        places, firsts, lasts = (
            np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, dtype=np.int64) for i in range(3)
        )
        return _Occurrences(places, firsts, lasts, prompts.numbers(firsts))

    def _number_windows(self, prompts: ScannedPrompts, found: _Occurrences) -> Indices:
        """Remember the windows of anchors; returns the starts of those that are in an earlier prompt."""
        starts, owners = spread(found.firsts, found.lasts + 1)
        times = found.prompts[owners]
        _, first = self._windows.number(prompts.text.windows(starts, self.window) + prompts.seeds[times])
        return starts[(first < 0) | (times[first] < times)]

    def _relate(self, units: Units, found: _Occurrences, numbers: Indices) -> Mask:
        """Whether the windows of anchors are those around their first occurrences."""
        result = np.zeros(len(numbers), dtype=np.bool_)
        offsets = np.arange(-(self.window - self._part), self.window)
        bounds = self._bounds[: self._num_bounds]
        for at in range(0, len(numbers), _CHUNK):
            chunk = slice(at, at + _CHUNK)
            places, positions = found.places[chunk, None], self._positions[numbers[chunk], None]
            lefts, rights = found.firsts[chunk, None] - places, found.lasts[chunk, None] - places + self.window
            pieces = np.searchsorted(bounds, positions, side="right")
            is_within = (positions + lefts >= bounds[pieces - 1]) & (positions + rights <= bounds[pieces])
            own = units.take(places + offsets, mode="clip")
            first = self._text.take(positions + offsets, mode="clip")
            is_equal = ((own == first) | (offsets < lefts) | (offsets >= rights)).all(axis=1)
            result[chunk] = is_within[:, 0] & is_equal
        return result

    def _vary(self, numbers: Indices, seeds: Hashes) -> None:
        """Keep the windows around the first occurrences of anchors, unless they are kept."""
        new = np.flatnonzero(self._is_varied[numbers] == 0)
        numbers, index = np.unique(numbers[new], return_index=True)
        seeds, positions = seeds[new[index]], self._positions[numbers]
        self._is_varied[numbers] = 1
        pieces = np.searchsorted(self._bounds[: self._num_bounds], positions, side="right")
        starts = np.maximum(self._bounds[pieces - 1], positions - (self.window - self._part))
        ends = np.minimum(self._bounds[pieces], positions + self.window)
        for at in range(0, len(numbers), _CHUNK):
            chunk = slice(at, at + _CHUNK)
            places, owners = spread(starts[chunk], ends[chunk])
            within = np.flatnonzero(places + self.window <= ends[chunk][owners])
            text = Rolling(self._text[places])
            self._windows.number(text.windows(within, self.window) + seeds[chunk][owners[within]])

    def _store(self, prompts: ScannedPrompts, found: _Occurrences, new: Indices, numbers: Indices) -> None:
        """Append the windows of new anchors to the text, where they are the first."""
        self._positions = grown(self._positions, self._anchors.count, 0)
        self._is_varied = grown(self._is_varied, self._anchors.count, 0)
        lows, highs = merged(found.firsts[new], found.lasts[new] + self.window, found.prompts[new])
        places, _ = spread(lows, highs)
        ends = self._length + np.cumsum(highs - lows)
        size = self._length + len(places)
        units = prompts.text.units
        if self._text.dtype != units.dtype:
            self._text = np.zeros(0, dtype=units.dtype)  # the first text; all are of one kind
        self._text = grown(self._text, size, 0)
        self._text[self._length : size] = units[places]
        self._bounds = grown(self._bounds, self._num_bounds + len(ends), 0)
        self._bounds[self._num_bounds : self._num_bounds + len(ends)] = ends
        self._num_bounds += len(ends)
        piece = np.searchsorted(lows, found.places[new], side="right") - 1
        self._positions[numbers] = found.places[new] + (ends - highs)[piece]
        self._length = size


@dataclass(frozen=True)
class _Occurrences:
    """Anchors, the first and the last start of the windows of each, and their prompts. [anchors] each, in order."""

    places: Indices
    firsts: Indices
    lasts: Indices
    prompts: Indices

    def of(self, which: Indices) -> _Occurrences:
        return _Occurrences(self.places[which], self.firsts[which], self.lasts[which], self.prompts[which])


def _winnow(text: Rolling, lows: Indices, highs: Indices, window: int, part: int) -> tuple[Indices, Indices, Indices]:
    """The places of the anchors of all windows within regions, and the first and the last start of their windows."""
    places, owners = spread(lows, highs)
    hashes = text.polynomials(places, part)
    packed = (hashes & ~_PLACE) | np.arange(len(hashes), dtype=np.uint64)
    starts = np.flatnonzero(places + window <= highs[owners])
    least = (sliding_min(packed, window - part + 1)[starts] & _PLACE).astype(np.int64)
    ends = np.append(np.flatnonzero(np.diff(least)), len(least) - 1)
    return places[least[ends]], places[starts[np.append(0, ends[:-1] + 1)]], places[starts[ends]]


def merged(lows: Indices, highs: Indices, groups: Indices) -> tuple[Indices, Indices]:
    """The union of the ranges of each group as ranges, in order. Groups are one after another."""
    order = np.argsort(lows, kind="stable")
    shift = groups[order]  # so that the end of a group is not the start of the next
    lows, highs = lows[order] + shift, np.maximum.accumulate(highs[order] + shift)
    is_first = np.ones(len(lows), dtype=np.bool_)
    is_first[1:] = lows[1:] > highs[:-1]
    first = np.flatnonzero(is_first)
    return lows[first] - shift[first], highs[np.append(first[1:] - 1, len(highs) - 1)[: len(first)]] - shift[first]


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
    three standard errors of both.
    """

    window: int
    budget: int  # bytes
    rate: int = 1  # one window of so many is kept
    _kept: HashIndex = field(default_factory=HashIndex)
    _groups: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_GROUPS))
    _edges: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_GROUPS))

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def error(self) -> float:
        deviation = math.sqrt(_GROUPS) * (self._groups.std(ddof=1) + self._edges.std(ddof=1))
        return float(3 * deviation + self._edges.sum())

    def scan(self, prompts: ScannedPrompts, inner: Mask) -> tuple[Indices, NDArray[np.float64]]:
        text, groups = prompts.text, list(prompts.split(self.window))
        num_windows = sum(int((highs - lows).sum()) for lows, highs in groups)
        while num_windows // self.rate > max(_MOST, self.budget // _SCANNED_BYTES):
            self._thin()
        sampled = [self._sample(prompts, lows, highs) for lows, highs in groups]
        if not sampled:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        starts, highs, hashes = (np.concatenate([part[i] for part in sampled]) for i in range(3))
        times = prompts.numbers(starts)
        has_next = np.flatnonzero(starts + self.window < highs)
        longer = text.windows(starts[has_next], self.window + 1) + prompts.seeds[times[has_next]]
        longer = (longer & ~_PLACE) | (hashes[has_next] & _PLACE)  # kept as long as the window's own
        is_hit = self._are_earlier(hashes, times)
        is_end = starts + self.window == prompts.ends[times]
        is_end[has_next] = ~self._are_earlier(longer, times[has_next])
        hits = starts[is_hit]
        if self.rate == 1:
            places = np.flatnonzero(cover(len(inner), hits, hits + self.window) & inner)
            found = places, np.ones(len(places))
        else:
            found = hits, self._count(hashes[is_hit], inner[hits], is_end[is_hit])
        while self._kept.num_bytes > self.budget:
            self._thin()
        return found

    def _sample(self, prompts: ScannedPrompts, lows: Indices, highs: Indices) -> tuple[Indices, Indices, Hashes]:
        """The chosen ones of the windows of regions: their starts, the ends of their regions, and hashes."""
        starts, owners = spread(lows, highs - self.window + 1)
        hashes = prompts.text.windows(starts, self.window) + prompts.seeds[prompts.numbers(lows)[owners]]
        chosen = np.flatnonzero(hashes % np.uint64(self.rate) == 0)
        return starts[chosen], highs[owners[chosen]], hashes[chosen]

    def _are_earlier(self, hashes: Hashes, times: Indices) -> Mask:
        """Which hashes an earlier prompt has; all are kept."""
        _, first = self._kept.number(hashes)
        return (first < 0) | (times[first] < times)

    def _count(self, hashes: Hashes, is_inner: Mask, is_end: Mask) -> NDArray[np.float64]:
        """An estimate of the units of repeats, by sampled windows that were there before. Adds to the error."""
        edges = 0.5 * (self.window - 1) * is_end
        groups = ((hashes >> np.uint64(40)) % np.uint64(_GROUPS)).astype(np.int64)
        self._groups += self.rate * np.bincount(groups, is_inner + edges, _GROUPS)
        self._edges += self.rate * np.bincount(groups, edges, _GROUPS)
        return self.rate * (is_inner + edges)

    def _thin(self) -> None:
        """Keep half of the windows."""
        self.rate *= 2
        hashes = self._kept._hashes[: self._kept.count]
        kept = HashIndex()
        kept.add(hashes[hashes % np.uint64(self.rate) == 0])
        self._kept = kept
