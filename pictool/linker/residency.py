"""Objects that are resident in a pool of KV on the device, and how the next prompts are made of them.

A link's image is a region of the pool. Objects in the pool are moved to their places in the regions of a batch of
prompts by one plan of CIDRA's (Span queries §5.5): an object that two prompts reuse is duplicated, and objects that
change places are a cycle. Objects that they displace are moved aside. Objects that the pool lacks are loaded once for
all prompts of the batch. After the answer, what the policy wrote over documents is restored, so that every resident
object is as it was compiled, and stays.

A region is in use as long as its image exists: several requests may be under way, and what a caller still holds is
never touched. A prompt for which there is no room beside those is linked as without a pool.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.loader import Copy, PlacedObject
from pictool.runtime.memory.cidra import Move
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import (
    Pool,
    PooledImage,
    Repositioning,
    SavedRows,
    require_movable,
    restore,
    slot_bytes,
)

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class PoolUse:
    """What a link got of the pool, in tokens of its context.

    Fields:
        resident: whose KV was in the pool; stayed: of these, those that were in their places; loaded: that came from
            the host; shared: all others that were reused, copied from what was loaded for another place or prompt.
        moved: the moves of the batch's one plan, those of displaced objects among them.
        requests: prompts of the batch.
        has_room: False if the pool has no room for the image.
    """

    resident: int = 0
    stayed: int = 0
    loaded: int = 0
    shared: int = 0
    moved: Repositioning = Repositioning()
    requests: int = 1
    has_room: bool = True

    def report(self) -> dict[str, Any]:
        """As JSON has it."""
        moved = self.moved
        return {
            "has_room": self.has_room, "resident": self.resident, "stayed": self.stayed, "loaded": self.loaded,
            "shared": self.shared, "requests": self.requests, "moved": moved.tokens, "moves": moved.moves,
            "duplicates": moved.duplicates, "scratch": moved.buffer, "scratch_bytes": moved.scratch_bytes,
            "tokens_per_ms": moved.tokens_per_ms,
        }  # fmt: skip


@dataclass(frozen=True)
class PoolCounts:
    """Of a pool, since it was made.

    Fields:
        resident_bytes: of the objects in it, now. moves: runs that were moved. loaded_bytes: KV of objects that links
            copied from the host.
    """

    resident_bytes: int = 0
    moves: int = 0
    loaded_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Resident:
    """An object, or a part of one, in the slots from `start` on; its keys are rotated to `position`, None: not."""

    content: Hashable
    start: int
    length: int
    position: int | None
    used: int  # the number of the batch that used it last

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
    saved: list[SavedRows] = field(default_factory=list)
    is_linked: bool = False


@dataclass(eq=False)
class Reservation:
    """An image, and what is still to be loaded into it. `finish` is to be called when it is linked.

    Link the reservations of a batch in their order, at any time: what one loads, the later ones get as copies.

    Fields:
        own: what it has to load. copies: where else that goes.
        awaited: what another one loads, whose region it is; if that fails, this one has to.
        reused: tokens that are reused. stayed: as of `PoolUse`. seconds: what reserving the batch took.
    """

    image: Image
    own: list[PlacedObject] = field(default_factory=list)
    region: _Region | None = None
    copies: list[Copy] = field(default_factory=list)
    awaited: list[tuple[PlacedObject, _Region]] = field(default_factory=list)
    reused: int = 0
    stayed: int = 0
    seconds: float = 0.0
    moved: Repositioning = Repositioning()
    requests: int = 1
    has_room: bool = True
    on_finish: Callable[[PoolUse], None] | None = None

    @property
    def missing(self) -> list[PlacedObject]:
        """What is to be loaded, as long as it is not linked."""
        return [*self.own, *(part for part, leader in self.awaited if not leader.is_linked)]

    @property
    def use(self) -> PoolUse:
        resident = 0 if self.region is None else sum(each.length for each in self.region.resident)
        loaded = sum(map(_length, self.missing))
        shared = self.reused - resident - loaded
        return PoolUse(resident, self.stayed, loaded, shared, self.moved, self.requests, self.has_room)

    def finish(self) -> None:
        if self.region is not None:
            self.region.is_linked = True
        if self.on_finish is not None:
            self.on_finish(self.use)


PlacedPrompt = tuple[Layout, Sequence[PlacedObject]]  # a prompt, and what is reused in it


class ResidentObjects:
    """Objects resident on the device, in `max_bytes` of KV at most; the least recently used are evicted. Thread-safe.

    Beside the bytes there is what links saved of the rows that they computed, until they are restored, and what one
    plan copies aside of a layer's keys or values.

    Attributes:
        counts: what was done until now.

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
        self.counts = PoolCounts()
        self._pool: Pool | None = None
        self._residents: list[Resident] = []
        self._regions: list[_Region] = []
        self._ended: deque[_Region] = deque()  # whose images exist no more
        self._batches = 0
        self._lock = threading.Lock()

    def reserve(self, prompts: Sequence[PlacedPrompt]) -> list[Reservation]:
        """Reserve a batch: images of the first prompts of several, with the resident objects in their places.

        As many prompts as there is room for at once, one at least, up to one that reuses the same at the same places as
        one before it: that finds everything in place when its turn comes. If there is no room for the first, its image
        is not in the pool.
        """
        started = time.perf_counter()
        with self._lock:
            self._settle()
            found = self._found()
            regions = self._allot(prompts, found)
            if regions:
                reservations = self._reserve_regions(regions, prompts, found)
            else:
                reservations = [self.reserve_outside(*prompts[0], has_room=False)]
        seconds = time.perf_counter() - started
        for reservation in reservations:
            reservation.seconds = seconds
        return reservations

    def reserve_outside(self, layout: Layout, placed: Sequence[PlacedObject], has_room: bool = True) -> Reservation:
        """An image that is not in the pool; `has_room` says whether it could be."""
        return Reservation(
            Image(self._model.stack, layout), list(placed), reused=sum(map(_length, placed)), has_room=has_room,
            on_finish=self._finished,
        )  # fmt: skip

    def _reserve_regions(
        self, regions: Sequence[_Region], prompts: Sequence[PlacedPrompt], found: Mapping[Hashable, Sequence[Resident]]
    ) -> list[Reservation]:
        self._pool = pool = self._pool or Pool(self._model, self.num_slots)
        self._batches += 1
        images = [
            PooledImage(pool, layout, region.start, region.saved)
            for region, (layout, _) in zip(regions, prompts, strict=False)
        ]
        reservations = [
            Reservation(image, region=region, requests=len(regions), on_finish=self._finished)
            for image, region in zip(images, regions, strict=True)
        ]
        moves = self._arrange(reservations, [placed for _, placed in prompts[: len(reservations)]], found)
        moves += self._park(regions, found)
        moved = self._reposition(pool, moves, max(images, key=lambda image: image.num_tokens))
        for reservation, image, region in zip(reservations, images, regions, strict=True):
            reservation.moved = moved
            weakref.finalize(image, self._ended.append, region).atexit = False
        self._regions += regions
        self._count(moves=moved.moves)
        return reservations

    def _reposition(self, pool: Pool, moves: list[Move], longest: PooledImage) -> Repositioning:
        try:
            return pool.reposition(moves, tables=longest.tables)
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

    def _found(self) -> dict[Hashable, list[Resident]]:
        """The residents by content."""
        found: dict[Hashable, list[Resident]] = {}
        for resident in self._residents:
            found.setdefault(resident.content, []).append(resident)
        return found

    def _allot(self, prompts: Sequence[PlacedPrompt], found: Mapping[Hashable, Sequence[Resident]]) -> list[_Region]:
        """The regions of a batch."""
        regions: list[_Region] = []
        contexts: set[Hashable] = set()
        for layout, placed in prompts:
            context = tuple((part.start, _content(part)) for part in placed)
            length = layout.num_tokens + GROWTH
            start = None if context in contexts else self._room(length, placed, found, regions)
            if start is None:
                break
            contexts.add(context)
            regions.append(_Region(start, start + length))
        return regions

    def _room(
        self, length: int, placed: Sequence[PlacedObject], found: Mapping[Hashable, Sequence[Resident]],
        regions: Sequence[_Region],
    ) -> int | None:  # fmt: skip
        """The first of `length` slots that no image uses: where most can stay, or else the first there are."""
        used = [(region.start, region.end) for region in (*self._regions, *regions)]
        stays: Counter[int] = Counter()
        for part in placed:
            for resident in found.get(_content(part), ()):
                if resident.position == part.start:
                    stays[resident.start - part.start] += resident.length
        for start, _ in stays.most_common():
            if 0 <= start <= self.num_slots - length and not _overlaps(start, start + length, used):
                return start
        return _gap(used, length, self.num_slots)

    def _arrange(
        self, reservations: Sequence[Reservation], prompts: Sequence[Sequence[PlacedObject]],
        found: Mapping[Hashable, Sequence[Resident]],
    ) -> list[Move]:  # fmt: skip
        """The moves that bring residents to the reserved regions. Notes in the reservations what is to be loaded."""
        moves: list[Move] = []
        leaders: dict[Hashable, tuple[Reservation, PlacedObject]] = {}  # who loads what
        for reservation, placed in zip(reservations, prompts, strict=True):
            assert reservation.region is not None
            for part in placed:
                start, content = reservation.region.start + part.start, _content(part)
                here = Resident(content, start, _length(part), part.start, self._batches)
                reservation.reused += here.length
                if sources := found.get(content):
                    source = next((resident for resident in sources if resident.start == start), sources[0])
                    reservation.region.resident.append(here)
                    stays = source.start == start and source.position == part.start
                    reservation.stayed += here.length if stays else 0
                    moves.append(Move(source.start, start, None if stays else part.start, here.length))
                    continue
                reservation.region.loaded.append(here)
                leader, loaded = leaders.setdefault(content, (reservation, part))
                if loaded is part:
                    reservation.own.append(part)
                    continue
                leader.copies.append(Copy(loaded, reservation.image, part.start))
                if leader is not reservation:
                    assert leader.region is not None
                    reservation.awaited.append((part, leader.region))
        return moves

    def _park(self, regions: Sequence[_Region], found: Mapping[Hashable, Sequence[Resident]]) -> list[Move]:
        """Keep the residents that a batch's images do not use out of its regions: the moves of those that are displaced
        to where there is room, the latest first. Of an object that is elsewhere, too, a copy is kept while there is."""
        used = [(each.start, each.end) for each in (*self._regions, *regions)]
        latest = sorted(itertools.chain(*found.values()), key=lambda resident: -resident.used)
        displaced = [resident for resident in latest if _overlaps(resident.start, resident.end, used)]
        held = {here.content for region in regions for here in region.resident}
        kept, spare, parked = list[Resident](), list[Resident](), list[Resident]()
        for resident in latest:
            if not _overlaps(resident.start, resident.end, used):
                (spare if resident.content in held else kept).append(resident)
                held.add(resident.content)
        moves: list[Move] = []
        for resident in displaced:
            if resident.content in held:
                continue
            while (start := _gap([*used, *_spans([*kept, *spare])], resident.length, self.num_slots)) is None:
                if not spare and (not kept or kept[-1].used >= resident.used):
                    break  # evicted
                (spare or kept).pop()
            if start is not None:
                moves.append(Move(resident.start, start, None, resident.length))
                used.append((start, start + resident.length))
                parked.append(replace(resident, start=start, position=None))
                held.add(resident.content)
        self._residents = kept + spare + parked
        return moves

    def _finished(self, use: PoolUse) -> None:
        with self._lock:
            self._count(loaded=use.loaded)

    def _count(self, moves: int = 0, loaded: int = 0) -> None:
        """Bring `counts` up to date."""
        there = [*self._residents]
        for region in self._regions:
            there += region.resident + (region.loaded if region.is_linked else [])
        self.counts = PoolCounts(
            sum(resident.length for resident in there) * slot_bytes(self._model), self.counts.moves + moves,
            self.counts.loaded_bytes + 2 * loaded * slot_bytes(self._model) // 3,
        )  # fmt: skip


def _length(part: PlacedObject) -> int:
    return part.end - part.start


def _spans(residents: Sequence[Resident]) -> list[tuple[int, int]]:
    return [(resident.start, resident.end) for resident in residents]


def _overlaps(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for span in spans)


def _content(part: PlacedObject) -> Hashable:
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
