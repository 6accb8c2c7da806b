"""Objects that are resident in a pool of KV on the device, and how the next prompt is made of them.


A link's image is a region of the pool. Objects that the pool has are moved to their places in it by CIDRA's moves, all
at once (Span queries §5.5); what they displace is parked beside; the others are loaded as ever. After the answer, what
the policy wrote over documents is restored, so that every resident object is as it was compiled, and stays.

A region is in use as long as its image exists: several requests may be under way, and what a caller still holds is
never touched. A prompt for which there is no room beside those is linked as without a pool.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.loader import Placed
from pictool.runtime.cidra import Move
from pictool.runtime.image import GROWTH, Image
from pictool.runtime.pool import Pool, PooledImage, Repositioning, Saved, require_movable, restore, slot_bytes

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class PoolUse:
    """What a link got of the pool, in tokens of its context.

    Fields:
        resident: whose KV was in the pool; stayed: of these, those that were in their places; loaded: all others that
            were reused.
        moved: the moves, those of displaced objects among them.
        has_room: whether the image is in the pool.
    """

    resident: int
    stayed: int
    loaded: int
    moved: Repositioning = Repositioning()
    has_room: bool = True

    def report(self) -> dict[str, Any]:
        """As JSON has it."""
        moved = self.moved
        return {
            "has_room": self.has_room, "resident": self.resident, "stayed": self.stayed, "loaded": self.loaded,
            "moved": moved.tokens, "moves": moved.moves, "duplicates": moved.duplicates, "scratch": moved.buffer,
            "tokens_per_ms": moved.tokens_per_ms,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Resident:
    """An object, or a part of one, in the slots from `start` on; its keys are rotated to `position`, None: not."""

    content: Hashable
    start: int
    length: int
    position: int | None
    used: int  # the number of the link that used it last

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False)
class _Region:
    """The slots of an image. Its documents are resident once it has ended; those that are loaded, if the link did."""

    start: int
    end: int
    resident: list[Resident] = field(default_factory=list)
    loaded: list[Resident] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    is_linked: bool = False


@dataclass(frozen=True)
class Claim:
    """An image, and what is still to be loaded into it. `finish` is to be called when it is linked."""

    image: Image
    missing: list[Placed]
    use: PoolUse
    region: _Region | None = None

    def finish(self) -> None:
        if self.region is not None:
            self.region.is_linked = True


class Residency:
    """Objects resident on the device, in `max_bytes` of KV at most; the least recently used are evicted. Thread-safe.

    Beside the bytes there is what links saved of the rows that they computed, until they are restored.

    Raises:
        ModelError: a RoPE whose frequencies depend on the prompt's length.
        InputError: fewer bytes than one image needs.
    """

    def __init__(self, model: Model, max_bytes: int) -> None:
        require_movable(model)
        self._model, self.num_slots = model, max_bytes // slot_bytes(model)
        if self.num_slots <= GROWTH:
            least = (GROWTH + 1) * slot_bytes(model)
            raise InputError(f"a pool of {max_bytes} bytes holds no prompt of {model.name}; give it {least} or more")
        self._pool: Pool | None = None
        self._residents: list[Resident] = []
        self._regions: list[_Region] = []
        self._ended: deque[_Region] = deque()  # whose images exist no more
        self._links = 0
        self._lock = threading.Lock()

    def claim(self, layout: Layout, placed: Sequence[Placed]) -> Claim:
        """An image of a prompt, in which the objects that are resident are in their places."""
        with self._lock:
            self._settle()
            total = sum(part.end - part.start for part in placed)
            start = self._room(layout.num_tokens + GROWTH)
            if start is None:
                image = Image(self._model.stack, layout)
                return Claim(image, list(placed), PoolUse(0, 0, total, has_room=False))
            if self._pool is None:
                self._pool = Pool(self._model, self.num_slots)
            self._links += 1
            region = _Region(start, start + layout.num_tokens + GROWTH)
            image = PooledImage(self._pool, layout, start, region.saved)
            moves, missing, stayed = self._arrange(region, placed)
            moved = self._reposition(self._pool, moves, image)
            self._regions.append(region)
            weakref.finalize(image, self._ended.append, region).atexit = False
            loaded = sum(part.end - part.start for part in missing)
            return Claim(image, missing, PoolUse(total - loaded, stayed, loaded, moved), region)

    def _reposition(self, pool: Pool, moves: list[Move], image: PooledImage) -> Repositioning:
        try:
            return pool.reposition(moves, tables=image.tables)
        except BaseException:
            self._residents = []  # who knows what is where
            raise

    def _settle(self) -> None:
        """Restore what links of images that exist no more have overwritten; their documents are resident."""
        while self._ended:
            region = self._ended.popleft()
            assert self._pool is not None
            restore(self._pool, region.saved)
            self._regions.remove(region)
            self._residents += region.resident + (region.loaded if region.is_linked else [])

    def _room(self, length: int) -> int | None:
        """The first slots that no image uses."""
        return _gap([(region.start, region.end) for region in self._regions], length, self.num_slots)

    def _arrange(self, region: _Region, placed: Sequence[Placed]) -> tuple[list[Move], list[Placed], int]:
        """The moves that bring resident objects to a region, and park what is in its way; what is missing; how many
        tokens are in their places already."""
        found: dict[Hashable, list[Resident]] = {}
        for resident in self._residents:
            found.setdefault(resident.content, []).append(resident)
        moves: list[Move] = []
        missing: list[Placed] = []
        stayed = 0
        for part in placed:
            start, length = region.start + part.start, part.end - part.start
            here = Resident(_content(part), start, length, part.start, self._links)
            sources = found.get(here.content, [])
            if not sources:
                missing.append(part)
                region.loaded.append(here)
                continue
            source = next((resident for resident in sources if resident.start == start), sources[0])
            region.resident.append(here)
            if source.start == start and source.position == part.start:
                stayed += length
            else:
                moves.append(Move(source.start, start, part.start, length))
        taken = {here.content for here in region.resident}
        others = [resident for resident in self._residents if resident.content not in taken]
        self._residents = []
        return moves + self._park(region, others), missing, stayed

    def _park(self, region: _Region, others: Sequence[Resident]) -> list[Move]:
        """Keep residents out of a region: moves of those that it displaces to where there is room, the latest first."""
        regions = [(each.start, each.end) for each in (*self._regions, region)]
        latest = sorted(others, key=lambda resident: -resident.used)
        kept = [resident for resident in latest if not _overlaps(resident, regions)]
        moves: list[Move] = []
        for resident in latest:
            if not _overlaps(resident, regions):
                continue
            while (start := _gap([*regions, *_spans(kept)], resident.length, self.num_slots)) is None:
                if not kept or kept[-1].used >= resident.used:
                    break  # evicted
                kept.pop()
            if start is not None:
                moves.append(Move(resident.start, start, None, resident.length))
                regions.append((start, start + resident.length))
                self._residents.append(replace(resident, start=start, position=None))
        self._residents += kept
        return moves


def _spans(residents: Sequence[Resident]) -> list[tuple[int, int]]:
    return [(resident.start, resident.end) for resident in residents]


def _overlaps(resident: Resident, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start < resident.end and resident.start < end for start, end in spans)


def _content(part: Placed) -> Hashable:
    """What a resident is of: checksums, so that a file that is replaced or damaged later changes nothing; and its key,
    which holds the tenant's salt."""
    file, tokens = part.file, part.tokens
    return file.meta.key, tuple(file.checksums["layers"]), tokens.start, tokens.stop


def _gap(used: Sequence[tuple[int, int]], length: int, num_slots: int) -> int | None:
    """Where the first `length` slots begin that nobody uses; None: nowhere."""
    at = 0
    for start, end in sorted(used):
        if start - at >= length:
            return at
        at = max(at, end)
    return at if num_slots - at >= length else None
