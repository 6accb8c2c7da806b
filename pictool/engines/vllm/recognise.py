"""Chunks recognised in a prompt by content: a rolling hash over its token ids finds candidates, comparison decides."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.core import Target, TokenIds
from pictool.engines.vllm.plan import Found
from pictool.errors import PicError
from pictool.store.store import Store

MAX_WINDOW = 64
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Entry:
    """An object that can be recognised."""

    key: str
    tokens: TokenIds
    sinks: int
    codec: str

    def is_of(self, target: Target, salt: str) -> bool:
        """Whether its key is that of its tokens and this tenant's salt."""
        return target.key(self.tokens, self.sinks, self.codec, salt) == self.key


class Index:
    """The token ids of a store's objects, found by the hash of their first tokens.

    An object is hashed over its first 2^i ≤ its length tokens, `MAX_WINDOW` at most, so a prompt is hashed with few
    windows whatever the objects' lengths are.
    """

    def __init__(self, store: Store, target: Target, min_tokens: int) -> None:
        self._store, self._target, self._min_tokens = store, target, min_tokens
        self._entries: dict[str, Entry | None] = {}  # None: there, but of no use here
        self._windows: dict[int, dict[int, list[Entry]]] = {}
        self._refreshing = threading.Lock()

    def refresh(self) -> None:
        """Take in what was added to the store, and forget what was removed. May run in a thread beside `find`."""
        with self._refreshing:
            keys = self._store.keys()
            entries = {key: self._entries[key] if key in self._entries else self._read(key) for key in keys}
            self._entries, self._windows = entries, _windows(one for one in entries.values() if one is not None)

    def forget(self, key: str) -> None:
        """Leave out an object that turned out to be of no use, until the store has another file for it."""
        with self._refreshing:
            self._entries.pop(key, None)
            self._windows = _windows(one for one in self._entries.values() if one is not None)

    def find(self, tokens: TokenIds, sinks: int, salt: str = "") -> list[Found]:
        """The objects of this salt, with `sinks`, that stand whole in a prompt; the longest first to choose, without
        overlaps."""
        matches = [(at, one) for at, one in self._matches(tokens) if one.sinks == sinks]
        candidates = [Found(one.key, at, one.tokens) for at, one in matches if one.is_of(self._target, salt)]
        candidates.sort(key=lambda one: (-len(one.tokens), one.start))
        is_taken, found = np.zeros(len(tokens), dtype=bool), []
        for one in candidates:
            if not is_taken[one.start : one.end].any():
                is_taken[one.start : one.end] = True
                found.append(one)
        return sorted(found, key=lambda one: one.start)

    def _matches(self, tokens: TokenIds) -> Iterator[tuple[int, Entry]]:
        """Every place at which an object's tokens stand."""
        for window, entries in self._windows.items():
            if window > len(tokens):
                continue
            hashes = rolling_hashes(tokens, window)
            known = np.fromiter(entries, dtype=np.uint64)
            for at in np.flatnonzero(np.isin(hashes, known)).tolist():
                for one in entries[int(hashes[at])]:
                    if np.array_equal(tokens[at : at + len(one.tokens)], one.tokens):
                        yield at, one

    def _read(self, key: str) -> Entry | None:
        try:
            with self._store.peek(key) as file:
                file.meta.require(self._target, key[:12])
                entry = Entry(key, file.tokens(), file.meta.sinks, file.meta.codec)
                is_block = file.meta.parent is not None
        except PicError:  # another model's, or damaged: a request that names it is told
            return None
        return entry if len(entry.tokens) >= self._min_tokens and not is_block else None


def rolling_hashes(tokens: TokenIds, window: int) -> Hashes:
    """The hash of tokens[i : i + window] for every i, uint64 [n - window + 1]; Σ (token + 1) · base^j, modulo 2^64."""
    n = len(tokens)
    sums = np.zeros(n + 1, dtype=np.uint64)
    np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE, n), out=sums[1:])
    return (sums[window:] - sums[: n - window + 1]) * _powers(_INVERSE, n - window + 1)


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)


def _windows(entries: Iterable[Entry]) -> dict[int, dict[int, list[Entry]]]:
    windows: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for one in entries:
        window = min(MAX_WINDOW, 1 << (len(one.tokens).bit_length() - 1))
        windows[window][int(rolling_hashes(one.tokens[:window], window)[0])].append(one)
    return windows
