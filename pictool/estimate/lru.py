"""Caches of all capacities at once, which drop what was used the longest ago (Mattson et al. 1970).

A cache of capacity C holds the most recently used items, of C tokens in all. So an item is in it if it was used after
some time, one for each capacity, and one pass over the requests answers for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Indices, grown

_ROOM = 1 << 20  # uses


class LruCaches:
    """What caches of several capacities reuse. Items are numbered 0, 1, 2, …; each keeps its size.

    A request is looked up as a whole, then used as a whole: its first item counts as its most recent.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.capacities = np.asarray(capacities, dtype=np.int64)
        self._since = np.zeros(len(capacities), dtype=np.int64)  # items that were used at this time or later are in
        self._held = np.zeros(len(capacities), dtype=np.int64)
        self._last = np.full(_ROOM >> 4, -1, dtype=np.int32)  # [items]
        self._sizes = np.zeros(_ROOM, dtype=np.int32)  # [times] of the item whose last use this was, or 0
        self._items = np.zeros(_ROOM, dtype=np.int32)  # [times]
        self._now = 0

    def use(self, items: Indices, sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Use a request's items, which differ from each other; returns which caches had which. [capacities, items]"""
        if not len(items):
            return np.zeros((len(self.capacities), 0), dtype=np.bool_)
        self._reserve(int(items.max()) + 1, len(items))
        last = self._last[items].astype(np.int64)
        is_hit = (last[None, :] >= self._since[:, None]) & (last >= 0)[None, :]
        self._sizes[last[last >= 0]] = 0
        times = np.arange(self._now + len(items) - 1, self._now - 1, -1)
        self._sizes[times], self._items[times], self._last[items] = sizes, items, times
        self._now += len(items)
        self._held += ~is_hit @ sizes
        for which in np.flatnonzero(self._held > self.capacities).tolist():
            self._drop(which)
        return is_hit

    def _drop(self, which: int) -> None:
        """Drop the least recently used items until the rest fits."""
        since, step = int(self._since[which]), 1024
        excess = int(self._held[which] - self.capacities[which])
        while excess > 0:
            sums = self._sizes[since : min(since + step, self._now)].cumsum(dtype=np.int64)
            taken = min(int(sums.searchsorted(excess)) + 1, len(sums))
            excess -= int(sums[taken - 1])
            since, step = since + taken, 4 * step
        self._since[which], self._held[which] = since, excess + int(self.capacities[which])

    def _reserve(self, num_items: int, num_uses: int) -> None:
        self._last = grown(self._last, num_items, -1)
        if self._now + num_uses <= len(self._sizes):
            return
        alive, since = 0, np.zeros_like(self._since)
        for at in range(0, self._now, _ROOM):  # in parts, so that no copy of all is made
            sizes, items = self._sizes[at : min(at + _ROOM, self._now)], self._items[at : at + _ROOM]
            used = np.flatnonzero(sizes)
            since += np.searchsorted(used, self._since - at)
            end = alive + len(used)
            self._sizes[alive:end], self._items[alive:end] = sizes[used], items[used]
            self._last[self._items[alive:end]] = np.arange(alive, end)
            alive = end
        self._since, self._now = since, alive
        room = max(_ROOM, alive + alive // 4 + num_uses)
        self._sizes, self._items = grown(self._sizes, room, 0), grown(self._items, room, 0)
