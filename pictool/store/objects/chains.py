"""Prefix chains: a prompt's exact KV in blocks, each keyed by all that precedes it (`Target.identify_blocks`).

A block is an object with a `parent`, so that integrity, eviction and listing are those of objects. The farther a block
is from the beginning of its chain, the longer ago it counts as used: eviction takes the ends of chains first, and never
a block that a later one still needs (vLLM frees blocks in reverse order for the same reason).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from pictool.errors import PicError, StoreError
from pictool.store.entries import Entry
from pictool.store.eviction import remove_all
from pictool.store.objects.format import CompiledChunk, ObjectFile
from pictool.store.store import Store
from pictool.store.upkeep import take_out
from pictool.store.usage import UsageCounts

_STEP_NS = 1_000  # between two blocks of a chain; some file systems keep no finer times


class Chain:
    """The blocks of one prompt in a store, by their keys from its beginning on."""

    def __init__(self, store: Store, keys: Sequence[str]) -> None:
        self._store, self._keys = store, list(keys)
        self._now = time.time_ns()

    def open(self, limit: int) -> list[ObjectFile]:
        """The longest stored beginning of at most `limit` blocks, marked as used; to be closed by the caller.

        A damaged block ends it; `put` writes that block again.
        """
        files: list[ObjectFile] = []
        with ExitStack() as resources:
            for key in self._keys[:limit]:
                try:
                    files.append(resources.enter_context(self._store.peek_local(key)))
                except PicError:
                    break
            resources.pop_all()
        for depth, file in enumerate(files):
            file.touch(self._used_ns(depth))
        misses = int(len(files) < min(limit, len(self._keys)))
        self._store.counters.add(UsageCounts(len(files), misses, sum(file.num_bytes for file in files)))
        return files

    def has(self, depth: int) -> bool:
        """Whether a block is stored; it is marked as used then."""
        try:
            os.utime(self._store.path(self._keys[depth]), ns=(self._used_ns(depth),) * 2, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # a read-only store
            pass
        return True

    def put(self, depth: int, block: CompiledChunk) -> bool:
        """Store a block; False, and it is not stored, if a small budget has no room for it beside its parent.

        Nothing waits for the disk: after a power failure a block may be damaged, which is noticed when it is used.

        Raises:
            StoreError: it cannot be written.
        """
        assert block.meta.key == self._keys[depth]
        parent = self._store.path(self._keys[depth - 1]) if depth else None
        if parent is None or parent.exists():
            path = self._store.put(block, self._used_ns(depth), durable=False)
            if parent is None or parent.exists():
                return True
            if entry := Entry.of(path):  # its parent was evicted to make room for it
                remove_all(self._store.root, [entry])
        return False

    def find_damaged(self, count: int) -> tuple[int, str] | None:
        """The first of `count` blocks that is damaged (or gone), and its problem; it is taken out, if possible."""
        for depth, key in enumerate(self._keys[:count]):
            try:
                with self._store.peek_local(key) as file:
                    file.verify()
            except PicError as error:
                with suppress(StoreError):  # a read-only store
                    take_out(self._store, key)
                return depth, str(error)
        return None

    def _used_ns(self, depth: int) -> int:
        return self._now - depth * _STEP_NS
