"""What a link got of a pool on the device, and what a pool counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pictool.runtime.memory.pool import Repositioning


@dataclass(frozen=True)
class PoolUse:
    """What a link got of the pool, in tokens of its context.

    Fields:
        resident: whose KV was in the pool; stayed: of these, those that were in their places; loaded: that came from
            the host; shared: all others that were reused, copied from what was loaded for another place or prompt.
        moved: the moves of the batch's one plan, those of displaced objects among them.
        requests: prompts of the batch.
        has_room: False if the pool has no room for the image.
        prefix: all tokens of the prompt that an earlier one computed.
    """

    resident: int = 0
    stayed: int = 0
    loaded: int = 0
    shared: int = 0
    moved: Repositioning = Repositioning()
    requests: int = 1
    has_room: bool = True
    prefix: int = 0

    def report(self) -> dict[str, Any]:
        """As JSON has it."""
        moved = self.moved
        return {
            "has_room": self.has_room, "resident": self.resident, "stayed": self.stayed, "loaded": self.loaded,
            "shared": self.shared, "requests": self.requests, "moved": moved.tokens, "moves": moved.moves,
            "duplicates": moved.duplicates, "scratch": moved.buffer, "scratch_bytes": moved.scratch_bytes,
            "tokens_per_ms": moved.tokens_per_ms, "prefix": self.prefix,
        }  # fmt: skip


@dataclass(frozen=True)
class PoolCounts:
    """Of a pool, since it was made.

    Fields:
        resident_bytes: of the objects in it, now. prefix_bytes: of what was computed for prompts and answers, now.
        moves: runs that were moved. loaded_bytes: KV of objects that links copied from the host. evicted_bytes: of
            objects and prefixes that gave way to others. saved_bytes, restored_bytes: of prefixes that were copied to
            host memory when they were evicted, and back.
    """

    resident_bytes: int = 0
    moves: int = 0
    loaded_bytes: int = 0
    prefix_bytes: int = 0
    evicted_bytes: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
