"""Hashes of many substrings at once, and a table of hashes: what makes a pass over a log quick enough in numpy.

Units are what a prompt is made of: bytes (uint8), or token ids (int32).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Units = NDArray[np.uint8] | NDArray[np.int32]
Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BASE = 0xD1342543DE82EF95  # odd, so that it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 1 << 64)
_LEAST, _MANY = 1 << 16, 1 << 22  # slots; hashes from which on a table is denser, and which are placed together
_RUN = 1 << 18  # units of a text, and powers, that are computed together: more than most batches of prompts have


def mixed(values: Hashes) -> Hashes:
    """Finish hashes, so that each of their bits depends on all (splitmix64)."""
    values = values ^ (values >> np.uint64(30))
    values *= _MIX[0]
    values ^= values >> np.uint64(27)
    values *= _MIX[1]
    values ^= values >> np.uint64(31)
    return values


@cache
def _powers(base: int) -> Hashes:
    """The first `_RUN` powers of a number, modulo 2^64."""
    powers = np.full(_RUN, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def times_powers(values: Hashes, start: int, is_inverse: bool = False) -> None:
    """Multiply values by the powers start, start + 1, … of the base of rolling hashes, or its inverse, modulo 2^64."""
    base, at = _INVERSE if is_inverse else _BASE, 0
    while at < len(values):
        run, place = divmod(start + at, _RUN)
        part = values[at : at + _RUN - place]
        part *= _powers(base)[place : place + len(part)]
        if run:
            part *= np.uint64(pow(base, run * _RUN, 1 << 64))
        at += len(part)


def over_powers(values: Hashes, places: Indices) -> None:
    """Divide values by the powers `places` of the base of rolling hashes, modulo 2^64."""
    values *= _powers(_INVERSE)[places & (_RUN - 1)]
    if len(places) and (last := int(places.max()) // _RUN):
        runs = np.asarray([pow(_INVERSE, run * _RUN, 1 << 64) for run in range(last + 1)], dtype=np.uint64)
        values *= runs[places // _RUN]


class Rolling:
    """Polynomial hashes of the substrings of a text, modulo 2^64 over random values of its units. 8 bytes for a unit.

    Args:
        seed: texts of other seeds have other hashes.
    """

    def __init__(self, units: Units, seed: int = 0) -> None:
        self.units = units
        self._sums = np.zeros(len(units) + 1, dtype=np.uint64)
        for at in range(0, len(units), _RUN):
            values = unit_values(units[at : at + _RUN], seed)
            times_powers(values, at)
            values[:1] += self._sums[at : at + 1]
            np.cumsum(values, out=self._sums[at + 1 : at + 1 + len(values)])

    def places_below(self, limit: int, length: int) -> Indices:
        """Where windows of so many units begin whose hashes, of which only the high bits count, are below a limit."""
        found = list[Indices]()
        for at in range(0, len(self._sums) - length, _RUN):
            ends = self._sums[at + length : at + length + _RUN]
            hashes = ends - self._sums[at : at + len(ends)]
            times_powers(hashes, at, is_inverse=True)
            found.append(at + np.flatnonzero(hashes < np.uint64(limit)))
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def ranges(self, starts: Indices, ends: Indices) -> Hashes:
        """The hashes of the substrings [start, end), with their lengths."""
        found = self._sums[ends] - self._sums[starts]
        over_powers(found, starts)
        found += (ends - starts).astype(np.uint64) * _MULTIPLIER
        return mixed(found)


def unit_values(units: Units, seed: int = 0) -> Hashes:
    """A random number for each unit, by its content."""
    if units.dtype == np.uint8:
        return _byte_values(seed)[units]
    return mixed(units.astype(np.uint64) + _seed_value(seed))


@cache
def _byte_values(seed: int) -> Hashes:
    return mixed(np.arange(256, dtype=np.uint64) + _seed_value(seed))


@cache
def _seed_value(seed: int) -> np.uint64:
    """A random number, so that units under one seed are not other units under the next."""
    return np.uint64(mixed(np.asarray([seed], dtype=np.uint64) + _MULTIPLIER)[0])


def chained(hashes: Hashes, seed: int) -> Hashes:
    """The hash of each beginning of a sequence of hashes."""
    values = mixed(hashes)
    times_powers(values, 0)
    return mixed(np.cumsum(values, dtype=np.uint64) + _seed_value(seed))


def hashes_of_runs(hashes: Hashes, starts: Indices, ends: Indices, seed: int) -> Hashes:
    """The hash of each run [start, end) of a sequence of hashes, as `chained` has it for the run alone."""
    sums, values = np.zeros(len(hashes) + 1, dtype=np.uint64), mixed(hashes)
    times_powers(values, 0)
    np.cumsum(values, out=sums[1:])
    found = sums[ends] - sums[starts]
    over_powers(found, starts)
    return mixed(found + _seed_value(seed))


class HashIndex:
    """A table from 64-bit hashes to the numbers 0, 1, 2, … in the order in which they were added. 16 bytes each."""

    def __init__(self) -> None:
        self.count = 0
        self._hashes = np.zeros(_LEAST // 2, dtype=np.uint64)
        self._slots = np.full(_LEAST, -1, dtype=np.int32)
        self._bits = _LEAST.bit_length() - 1

    def hashes(self, numbers: Indices) -> Hashes:
        """The hashes of numbers."""
        return self._hashes[numbers]

    def find(self, hashes: Hashes) -> Indices:
        """The number of each hash; -1: it was not added."""
        places = self._first(hashes)
        found = self._slots[places].astype(np.int64)
        open_ = np.flatnonzero((self._hashes[found] != hashes) & (found >= 0))
        while len(open_):
            places[open_] = (places[open_] + 1) & (len(self._slots) - 1)
            numbers = self._slots[places[open_]]
            found[open_] = numbers
            open_ = open_[(self._hashes[numbers] != hashes[open_]) & (numbers >= 0)]
        return found

    def add(self, hashes: Hashes) -> None:
        """Add hashes that are not in the table and differ from each other."""
        self._reserve(self.count + len(hashes))
        self._hashes[self.count : self.count + len(hashes)] = hashes
        self._place(hashes, self.count)
        self.count += len(hashes)

    def number(self, hashes: Hashes) -> tuple[Indices, Indices]:
        """The number of each hash, and the index of the first of these that equals it; -1: it was in the table.

        New ones are added.
        """
        numbers, first = self.find(hashes), np.full(len(hashes), -1, dtype=np.int64)
        new = np.flatnonzero(numbers < 0)
        if len(new):
            unique, index, inverse = np.unique(hashes[new], return_index=True, return_inverse=True)
            numbers[new], first[new] = self.count + inverse, new[index][inverse]
            self.add(unique)
        return numbers, first

    def _first(self, hashes: Hashes) -> Indices:
        return ((hashes * _MULTIPLIER) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _place(self, hashes: Hashes, first: int) -> None:
        places, numbers = self._first(hashes), np.arange(first, first + len(hashes), dtype=np.int32)
        while len(numbers):
            is_free = self._slots[places] < 0
            self._slots[places[is_free]] = numbers[is_free]
            is_left = self._slots[places] != numbers  # taken before, or by another of these
            places, numbers = (places[is_left] + 1) & (len(self._slots) - 1), numbers[is_left]

    def _reserve(self, count: int) -> None:
        if count > len(self._hashes):
            self._hashes = grown(self._hashes, count, 0)
        if (4 if count < _MANY else 2) * count > len(self._slots):
            self._bits = (4 * count if count < _MANY else 2 * count).bit_length()
            self._slots = np.zeros(0, dtype=np.int32)  # before the larger one is made
            self._slots = np.full(1 << self._bits, -1, dtype=np.int32)
            for at in range(0, self.count, _MANY):  # in parts, as each takes four times its memory
                self._place(self._hashes[at : min(at + _MANY, self.count)], at)


def spread(starts: Indices, ends: Indices) -> tuple[Indices, Indices]:
    """The places of ranges [start, end), one range after the other, and the number of the range that each is in."""
    sizes = np.maximum(ends - starts, 0)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return np.arange(len(owners)) + (starts - np.cumsum(sizes) + sizes)[owners], owners


def grown(array: NDArray[Any], count: int, fill: int) -> NDArray[Any]:
    """An array with room for `count` values: itself, or a longer copy."""
    if count <= len(array):
        return array
    larger = np.full(max(count, len(array) + len(array) // 4), fill, dtype=array.dtype)
    larger[: len(array)] = array
    return larger
