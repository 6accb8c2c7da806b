"""What `pic estimate` measures, computed in the plainest way: a suffix automaton, and sets of substrings."""

from __future__ import annotations

from collections.abc import Sequence


class SuffixAutomaton:
    """All substrings of several texts (Blumer et al. 1985)."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length = [-1], [0]

    def add(self, text: Sequence[int]) -> None:
        """Add a text and its substrings."""
        last = 0
        for unit in text:
            last = self._extend(last, unit)

    def _extend(self, last: int, unit: int) -> int:
        if unit in self._next[last]:
            known = self._next[last][unit]
            return known if self._length[known] == self._length[last] + 1 else self._clone(last, unit)
        new = self._state(self._length[last] + 1, {}, 0)
        place = last
        while place >= 0 and unit not in self._next[place]:
            self._next[place][unit] = new
            place = self._link[place]
        if place >= 0:
            known = self._next[place][unit]
            self._link[new] = known if self._length[known] == self._length[place] + 1 else self._clone(place, unit)
        return new

    def _clone(self, place: int, unit: int) -> int:
        known = self._next[place][unit]
        copy = self._state(self._length[place] + 1, dict(self._next[known]), self._link[known])
        self._link[known] = copy
        while place >= 0 and self._next[place].get(unit) == known:
            self._next[place][unit] = copy
            place = self._link[place]
        return copy

    def _state(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        return len(self._length) - 1

    def longest(self, text: Sequence[int]) -> list[int]:
        """For each end, how many units before it are a substring of the texts."""
        state = length = 0
        found = []
        for unit in text:
            while state and unit not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if unit in self._next[state]:
                state, length = self._next[state][unit], length + 1
            found.append(length)
        return found


def repeated(prompts: Sequence[Sequence[int]], window: int) -> list[int]:
    """Of each prompt, how many units are in repeats of `window` or more of an earlier one."""
    return [sum(places) for places in repeats(prompts, window)]


def repeats(prompts: Sequence[Sequence[int]], window: int) -> list[list[bool]]:
    """Of each prompt, which units they are."""
    automaton, found = SuffixAutomaton(), []
    for prompt in prompts:
        is_covered = [False] * len(prompt)
        for end, length in enumerate(automaton.longest(prompt), 1):
            if length >= window:
                is_covered[end - length : end] = [True] * length
        found.append(is_covered)
        automaton.add(prompt)
    return found


def prefixes(prompts: Sequence[bytes], block: int) -> list[int]:
    """Of each prompt, the units of whole blocks at its beginning that an earlier prompt begins with."""
    counts, known = [], set[bytes]()
    for prompt in prompts:
        starts = [prompt[:end] for end in range(block, len(prompt) + 1, block)]
        counts.append(next((i for i, start in enumerate(starts) if start not in known), len(starts)) * block)
        known.update(starts)
    return counts
