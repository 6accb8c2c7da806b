"""Prefix chains: a prompt's exact KV in blocks, each keyed by all that precedes it (`Target.chain_keys`).

A block is an object with a `parent`, so that integrity, eviction and listing are those of objects. The further a block
is from the chain's beginning, the longer ago it counts as used: evicting what was used least recently takes the tails
of chains first, and never a block that a later one still needs (vLLM frees blocks in reverse order for the same end).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from pictool.errors import PicError, StoreError
from pictool.store.entries import Entry
from pictool.store.eviction import remove_all
from pictool.store.format import CompiledChunk, ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import take_out
from pictool.store.usage import Counts

_STEP_NS = 1_000  # between two blocks of a chain; some file systems keep no finer times


class Chain:
    """The blocks of one prompt in a store, by their keys from its beginning on."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, list(keys)
        self._now = time.time_ns()

    def open(self, limit: int) -> list[ObjectFile]:
        """The longest stored beginning of at most `limit` blocks, marked as used; to be closed by the caller.

        A block that is damaged ends it, and is written anew by `put`.
        """
        found: list[ObjectFile] = []
        with ExitStack() as opened:
            for key in self._keys[:limit]:
                try:
                    found.append(opened.enter_context(self._store.look_here(key)))
                except PicError:
                    break
            opened.pop_all()
        for depth, file in enumerate(found):
            file.touch(self._used_ns(depth))
        misses = int(len(found) < min(limit, len(self._keys)))
        self._store.counters.add(Counts(len(found), misses, sum(file.num_bytes for file in found)))
        return found

    def put(self, depth: int, block: CompiledChunk) -> bool:
        """Store a block; False, and it is not stored, if a small budget has no room for it beside the one before it.

        Nothing waits for the disk: after a power failure a block may be damaged, which is found when it is used.

        Raises:
            StoreError: it cannot be written.
        """
        assert block.meta.key == self._keys[depth]
        parent = self._store.path(self._keys[depth - 1]) if depth else None
        if parent is None or parent.exists():
            path = self._store.put(block, self._used_ns(depth), durable=False)
            if parent is None or parent.exists():
                return True
            if entry := Entry.of(path):  # it was the one before it that made room
                remove_all(self._store.root, [entry])
        return False

    def find_damaged(self, count: int) -> tuple[int, str] | None:
        """The first of `count` blocks that is damaged (or gone), and what is wrong; taken out, if that can be."""
        for depth, key in enumerate(self._keys[:count]):
            try:
                with self._store.look_here(key) as file:
                    file.verify()
            except PicError as error:
                with suppress(StoreError):  # a store that may only be read
                    take_out(self._store, key)
                return depth, str(error)
        return None

    def _used_ns(self, depth: int) -> int:
        return self._now - depth * _STEP_NS
