"""Objects that are resident in a pool of KV on the device, and how the next prompts are made of them.

A link's image is a region of the pool. Objects in the pool are moved to their places in the regions of a batch of
prompts by one plan of CIDRA's (Span queries §5.5): an object that two prompts reuse is duplicated, and objects that
change places are a cycle. Objects that they displace are moved aside. Objects that the pool lacks are loaded once for
all prompts of the batch. After the answer, what the policy wrote over documents is restored, so that every resident
object is as it was compiled, and stays.

A pool may keep prefixes (`prefixes.py`): what was computed stays in its slots when an image ends. A prompt that begins
in the same way gets that region if no image has it, and goes on there; else the blocks are copied. Objects and prefixes
share the slots, and one order of eviction: copies first, then the least recently used. On a device with memory of its
own, blocks that are evicted go to host memory, beside the layers of objects and in one order of eviction with them.

A region is in use as long as its image exists: several requests may be under way, and what a caller still holds is
never touched. A prompt for which there is no room beside those is linked as without a pool.
"""

from __future__ import annotations

import bisect
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pictool.core import Layout
from pictool.errors import InputError
from pictool.linker.loader import Copy, Loads, PlacedObject
from pictool.linker.prefixes import (
    BLOCK,
    LARGE,
    BlockChain,
    FoundPrefix,
    FoundRun,
    LinkedSpan,
    PoolCounts,
    PrefixIndex,
    PrefixLostError,
    PrefixPiece,
    SavedBlocks,
)
from pictool.runtime.graphs.image import new_image, pooled_image_type
from pictool.runtime.memory.cidra import Move
from pictool.runtime.memory.image import GROWTH, Image
from pictool.runtime.memory.pool import (
    Pool,
    PooledImage,
    Repositioning,
    SavedRows,
    copy_rows,
    require_movable,
    restore,
    slot_bytes,
)
from pictool.runtime.memory.streams import event_now

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.memory import LayerMemory
    from pictool.store.store import Store


@dataclass(frozen=True, eq=False)
class Resident:
    """An object, or a part of one, in the slots from `start` on; its keys are rotated to `position`, None: not."""

    content: Hashable
    start: int
    length: int
    position: int | None
    used: int  # the number of the batch that used it last
    first: ClassVar[int] = 0

    @property
    def end(self) -> int:
        return self.start + self.length


Item = Resident | PrefixPiece  # what may be moved out of the way, or evicted


@dataclass(eq=False)
class _Region:
    """The slots of an image. Its documents are resident once it has ended; those that are loaded, if the link did.

    With a `chain` the blocks that its prompt and the `appended` tokens fill stay, too, as `pieces`; those before block
    `kept` are there. `evicts`: what was in these slots was used longest ago.
    """

    start: int
    end: int
    evicts: bool = False
    chain: BlockChain | None = None
    kept: int = 0
    pieces: list[PrefixPiece] = field(default_factory=list)
    appended: list[int] = field(default_factory=list)
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
        reused: tokens of objects that are reused. stayed, prefix: as of `PoolUse`. seconds: of reserving the batch.
        found: what it reuses of earlier prompts.
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
    prefix: int = 0
    found: FoundPrefix | None = None
    on_finish: Callable[[Reservation], None] | None = None

    @property
    def missing(self) -> list[PlacedObject]:
        """What is to be loaded, as long as it is not linked."""
        return [*self.own, *(part for part, leader in self.awaited if not leader.is_linked)]

    @property
    def use(self) -> PoolUse:
        resident = 0 if self.region is None else sum(each.length for each in self.region.resident)
        loaded = sum(map(_length, self.missing))
        shared = self.reused - resident - loaded
        return PoolUse(resident, self.stayed, loaded, shared, self.moved, self.requests, self.has_room, self.prefix)

    def restore(self, found: FoundPrefix | None, placed: Sequence[PlacedObject]) -> None:
        """Note an exact prefix, and load those of its blocks, too, that are on disk."""
        num_tokens, self.found = sum(map(_length, placed)), found
        self.own, self.reused, self.prefix = [*placed, *self.own], self.reused + num_tokens, self.prefix + num_tokens

    def loads(self, first: int) -> Loads:
        """What is to be loaded now, if nothing cached is used before layer `first`; a pool's rows are in all layers."""
        reuses_rows = self.region is not None or self.prefix > 0
        return Loads(self.image, self.missing, self.copies, 0 if reuses_rows else first)

    def finish(self) -> None:
        if self.region is not None:
            self.region.is_linked = True
        if self.on_finish is not None:
            self.on_finish(self)


PlacedPrompt = tuple[Layout, Sequence[PlacedObject]]  # a prompt, and what is reused in it


class ResidentObjects:
    """Objects resident on the device, in `max_bytes` of KV at most; the least recently used are evicted. Thread-safe.

    Beside the bytes there is what links saved of the rows that they computed, until they are restored, and what one
    plan copies aside of a layer's keys or values.

    Args:
        keeps_prefixes: what is computed for prompts and answers stays, too. kept: where exact prefixes are on disk.
        memory: host memory for prefixes that are evicted from a device with memory of its own.

    Attributes:
        counts: what was done until now.

    Raises:
        ModelError: a RoPE whose frequencies depend on the prompt's length.
        InputError: fewer bytes than one image needs.
    """

    def __init__(
        self, model: Model, max_bytes: int, keeps_prefixes: bool = False, kept: Store | None = None,
        memory: LayerMemory | None = None,
    ) -> None:  # fmt: skip
        require_movable(model)
        self._model, self.num_slots = model, max_bytes // slot_bytes(model)
        if self.num_slots <= GROWTH:
            least = (GROWTH + 1) * slot_bytes(model)
            raise InputError(
                f"a pool of {max_bytes} bytes is too small for a prompt of {model.name}; use {least} or more"
            )
        self.counts: PoolCounts = PoolCounts()
        self.keeps_prefixes, self.kept = keeps_prefixes, kept
        self._pool: Pool | None = None
        is_needed = memory is not None and event_now(model.stack.device) is not None
        self._saved, self._to_save = SavedBlocks(memory if is_needed else None), list[PrefixPiece]()
        self._residents: list[Resident] = []
        self._prefixes = PrefixIndex(self._saved)
        self._regions: list[_Region] = []
        self._ended: deque[_Region] = deque()  # whose images exist no more
        self._batches = self._evicted = self._num_saved = self._num_restored = 0
        self._lock = threading.Lock()

    def find_prefix(
        self, salt: str, layout: Layout, spans: Sequence[LinkedSpan], is_local: bool, on_disk: int = 0
    ) -> FoundPrefix:  # fmt: skip
        """What a prompt reuses of earlier ones (`PrefixIndex.find_prefix`). It may be lost until it is reserved."""
        with self._lock:
            self._settle()
            return self._prefixes.find_prefix(salt, layout, spans, is_local, on_disk)

    def reserve(self, prompts: Sequence[PlacedPrompt], prefix: FoundPrefix | None = None) -> list[Reservation]:
        """Reserve a batch: images of the first prompts of several, with the resident objects in their places.

        As many prompts as there is room for at once, one at least, up to one that reuses the same at the same places as
        one before it: that finds everything in place when its turn comes. If there is no room for the first, its image
        is not in the pool.

        Args:
            prefix: of a batch of one prompt, what it reuses of earlier ones. What is computed for it stays.

        Raises:
            PrefixLostError: that is not there any more.
        """
        started = time.perf_counter()
        with self._lock:
            self._settle()
            found, runs = self._found(), self._found_runs(prefix)
            regions = self._allot(prompts, found, runs)
            if regions:
                reservations = self._reserve_regions(regions, prompts, found, prefix, runs)
            else:
                reservations = [self.reserve_outside(*prompts[0], has_room=False)]
                self._fill(reservations[0], runs)
        seconds = time.perf_counter() - started
        for reservation in reservations:
            reservation.seconds, reservation.prefix = seconds, sum(run.length for run in runs)
        return reservations

    def reserve_outside(self, layout: Layout, placed: Sequence[PlacedObject], has_room: bool = True) -> Reservation:
        """An image that is not in the pool; `has_room` says whether it could be."""
        return Reservation(
            new_image(self._model.stack, layout), list(placed), reused=sum(map(_length, placed)), has_room=has_room,
            on_finish=self._finished,
        )  # fmt: skip

    def _save_evicted(self, pool: Pool) -> None:
        """Copy the pieces that are evicted to host memory, while they are still in their slots."""
        while self._to_save:
            piece = self._to_save.pop()
            if not all(key in self._saved for key in piece.keys):
                for at in range(0, len(piece.keys), LARGE):
                    keys = piece.keys[at : at + LARGE]
                    self._saved.put(keys, pool.save(piece.start + at * BLOCK, len(keys), BLOCK))
                self._num_saved += piece.length

    def _fill(self, reservation: Reservation, runs: Sequence[FoundRun]) -> None:
        """Copy what the moves do not bring: blocks from host memory, and all if the image is not in the pool."""
        for run in runs:
            assert self._pool is not None
            if run.slot is None:
                for at in range(0, len(run.saved), LARGE):
                    blocks, position = run.saved[at : at + LARGE], run.position + at * BLOCK
                    self._pool.load(blocks, BLOCK, reservation.image, position)
                self._num_restored += run.length
            elif reservation.region is None:
                copy_rows(self._pool, reservation.image, run.slot, run.position, run.length)

    def _found_runs(self, prefix: FoundPrefix | None) -> list[FoundRun]:
        runs = [] if prefix is None else self._prefixes.find(prefix.keys)
        if prefix is not None and sum(run.length for run in runs) != prefix.num_tokens:
            raise PrefixLostError
        return [replace(run, saved=self._saved.take(run.keys)) if run.slot is None else run for run in runs]

    def _reserve_regions(
        self, regions: Sequence[_Region], prompts: Sequence[PlacedPrompt], found: Mapping[Hashable, Sequence[Resident]],
        prefix: FoundPrefix | None, runs: Sequence[FoundRun],
    ) -> list[Reservation]:  # fmt: skip
        self._pool = pool = self._pool or Pool(self._model, self.num_slots, keeps_raw=self.kept is not None)
        self._batches += 1
        image_type = pooled_image_type(pool.stack)
        images = [
            image_type(
                pool, layout, region.start, [(part.start, part.end) for part in placed], region.saved, region.appended,
                partial(self._grow, region),
            )
            for region, (layout, placed) in zip(regions, prompts, strict=False)
        ]  # fmt: skip
        reservations = [
            Reservation(image, region=region, requests=len(regions), on_finish=self._finished)
            for image, region in zip(images, regions, strict=True)
        ]
        moves = self._arrange(reservations, [placed for _, placed in prompts[: len(reservations)]], found)
        if prefix is not None:
            regions[0].chain, regions[0].kept = prefix.chain, len(prefix.keys)
            moves += self._take_over(regions[0], runs)
        moves += self._park(regions, found)
        longest = max(images, key=lambda image: image.num_tokens)
        moved = self._reposition(pool, moves, longest, partial(self._fill, reservations[0], runs))
        for reservation, image, region in zip(reservations, images, regions, strict=True):
            reservation.moved = moved
            weakref.finalize(image, self._ended.append, region).atexit = False
        self._regions += regions
        self._count(moves=moved.moves)
        return reservations

    def _reposition(
        self, pool: Pool, moves: list[Move], longest: PooledImage | None = None,
        fill: Callable[[], None] = lambda: None,
    ) -> Repositioning:  # fmt: skip
        try:
            self._save_evicted(pool)
            moved = pool.reposition(moves, tables=None if longest is None else longest.tables)
            fill()
            return moved
        except BaseException:
            self._residents, self._prefixes = [], PrefixIndex(self._saved)  # who knows what is where
            self._to_save.clear()
            for region in self._regions:
                region.chain, region.pieces = None, []
            raise

    def _settle(self) -> None:
        """Restore what links of images that exist no more have overwritten; their documents are resident, and what was
        computed for them stays."""
        while self._ended:
            region = self._ended.popleft()
            assert self._pool is not None
            restore(self._pool, region.saved)
            self._regions.remove(region)
            self._residents += region.resident + (region.loaded if region.is_linked else [])
            if region.chain is not None and region.is_linked:
                region.chain.extend(region.appended)
                self._keep_blocks(region)
            for piece in region.pieces:
                piece.is_held, piece.used = False, self._batches

    def _keep_blocks(self, region: _Region) -> None:
        """Keep the blocks of a region's chain that are computed, from `kept` on."""
        assert region.chain is not None
        keys = region.chain.keys
        for block in range(region.kept, len(keys)):
            last = region.pieces[-1] if region.pieces else None
            if keys[block] and last is not None and last.first + len(last.keys) == block and not last.is_large:
                self._prefixes.grow(last, [keys[block]])
            elif keys[block]:
                piece = PrefixPiece([keys[block]], block, region.start + block * BLOCK, self._batches, is_held=True)
                region.pieces.append(self._prefixes.add(piece))
        region.kept = len(keys)

    def _take_over(self, region: _Region, runs: Sequence[FoundRun]) -> list[Move]:
        """Give a region the blocks of a prompt's prefix; the moves of those that are not in their places."""
        stay = {run.slot for run in runs if run.slot == region.start + run.position}
        within = [(run.slot, run.slot + run.length) for run in runs if run.slot is not None and run.slot in stay]
        self._cut(region, within)
        for piece in self._prefixes.pieces:
            if not piece.is_held and any(start <= piece.start < end for start, end in within):
                piece.is_held, piece.used = True, self._batches
                region.pieces.append(piece)
        moves = []
        for run in runs:
            target = region.start + run.position
            if run.slot != target:
                moves += [] if run.slot is None else [Move(run.slot, target, None, run.length)]
                piece = PrefixPiece(list(run.keys), run.first, target, self._batches, is_held=True)
                region.pieces.append(self._prefixes.add(piece))
        region.pieces.sort(key=lambda piece: piece.first)
        return moves

    def _cut(self, region: _Region, stay: Sequence[tuple[int, int]]) -> None:
        """Cut the pieces that a region is over, so that each is within it or not, and within one of `stay` or not."""
        span = [(region.start, region.end)]
        for piece in [*self._prefixes.pieces]:
            if piece.is_held or not overlaps(piece.start, piece.end, span):
                continue
            if any(start <= piece.start and piece.end <= end for start, end in (stay or span)):
                continue  # all of it stays, or none
            slots = range(piece.start, piece.end, BLOCK)
            kinds = [
                overlaps(at, at + BLOCK, span) + (next((i for i, (a, b) in enumerate(stay, 1) if a <= at < b), 0))
                for at in slots
            ]
            sizes = [len(list(group)) for _, group in itertools.groupby(kinds)]
            if len(sizes) > 1:
                self._prefixes.split(piece, sizes)

    def _found(self) -> dict[Hashable, list[Resident]]:
        """The residents by content."""
        found: dict[Hashable, list[Resident]] = {}
        for resident in self._residents:
            found.setdefault(resident.content, []).append(resident)
        return found

    def _allot(
        self, prompts: Sequence[PlacedPrompt], found: Mapping[Hashable, Sequence[Resident]], runs: Sequence[FoundRun]
    ) -> list[_Region]:
        """The regions of a batch."""
        regions: list[_Region] = []
        contexts: set[Hashable] = set()
        for layout, placed in prompts:
            context = tuple((part.start, _content(part)) for part in placed)
            length = layout.num_tokens + GROWTH
            room = None if context in contexts else self._room(length, placed, found, runs, regions)
            if room is None:
                break
            contexts.add(context)
            regions.append(_Region(room[0], room[0] + length, evicts=room[1]))
        return regions

    def _room(
        self, length: int, placed: Sequence[PlacedObject], found: Mapping[Hashable, Sequence[Resident]],
        runs: Sequence[FoundRun], regions: Sequence[_Region],
    ) -> tuple[int, bool] | None:  # fmt: skip
        """The first of `length` slots that no image uses, and whether others are evicted for it: where most can stay,
        else where nothing is, else where what is there was used longest ago."""
        used = [(region.start, region.end) for region in (*self._regions, *regions)]
        stays: Counter[int] = Counter()
        for part in placed:
            for resident in found.get(_content(part), ()):
                if resident.position == part.start:
                    stays[resident.start - part.start] += resident.length
        for run in runs:
            if run.slot is not None:
                stays[run.slot - run.position] += run.length
        copies, kept = self._eviction_order(found, used)
        room = find_room(order := [*copies, *kept], used, length, self.num_slots)
        own = {_content(part) for part in placed}
        others = [item for item in order if isinstance(item, PrefixPiece) or item.content not in own]
        for start, stay in stays.most_common():
            if 0 <= start <= self.num_slots - length and not overlaps(start, start + length, used):
                displaced = sum(shared_slots(item, start, start + length) for item in others)
                displaced -= sum(run.length for run in runs if run.slot == start + run.position)
                if room is not None and not room[1] and displaced > stay:
                    break  # to copy what would stay takes less than to move what is in the way
                return start, False
        return None if room is None else (room[0], room[1] > 0)

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

    def _eviction_order(
        self, found: Mapping[Hashable, Sequence[Resident]], used: Sequence[tuple[int, int]],
        held: Iterable[Hashable] = (),
    ) -> tuple[list[Item], list[Item]]:  # fmt: skip
        """What is outside of `used`, in the order of eviction: copies of others or of what is `held`, and the rest. The
        least recently used is first, of chains the last blocks."""
        items: list[Item] = [*itertools.chain.from_iterable(found.values())]
        items += [piece for piece in self._prefixes.pieces if not piece.is_held]
        seen = set(held).union(*(piece.keys for piece in self._prefixes.pieces if piece.is_held))
        kept, copies = list[Item](), list[Item]()
        for item in sorted(items, key=_by_use):
            if not overlaps(item.start, item.end, used):
                contents = item.keys if isinstance(item, PrefixPiece) else (item.content,)
                (copies if seen.issuperset(contents) else kept).append(item)
                seen.update(contents)
        return copies[::-1], kept[::-1]

    def _park(self, regions: Sequence[_Region], found: Mapping[Hashable, Sequence[Resident]]) -> list[Move]:
        """Keep what a batch's images do not use out of its regions: the moves of those that are displaced to where
        there is room, the latest first. What was used longer ago makes room for them."""
        used = [(each.start, each.end) for each in {*self._regions, *regions}]
        objects, displaced = list[Resident](), list[Item]()
        for resident in itertools.chain.from_iterable(found.values()):
            (displaced if overlaps(resident.start, resident.end, used) else objects).append(resident)
        for region in regions:
            self._cut(region, [])
        for piece in [*self._prefixes.pieces]:
            if not piece.is_held and overlaps(piece.start, piece.end, used):
                self._prefixes.remove(piece)
                displaced.append(piece)
        self._residents = objects
        held: set[Hashable] = {here.content for region in regions for here in region.resident}
        displaced = [item for item in displaced if not self._has(item, held)]
        copies, kept = self._eviction_order(self._found(), used, held) if displaced else ([], [])
        moves = list[Move]()
        for item in sorted(displaced, key=_by_use):
            if not self._has(item, held):
                evicts = any(region.evicts and shared_slots(item, region.start, region.end) for region in regions)
                older = [other for other in kept if other.used < item.used]
                moves += self._park_one(item, [] if evicts else [*copies, *older], used)
        return moves

    def _has(self, item: Item, held: set[Hashable]) -> bool:
        """Whether something is elsewhere, too."""
        if isinstance(item, PrefixPiece):
            return self._prefixes.has(item.keys)
        return item.content in held or any(resident.content == item.content for resident in self._residents)

    def _park_one(self, item: Item, order: Sequence[Item], used: Sequence[tuple[int, int]]) -> list[Move]:
        """Move something that is displaced to where there is room, once some of `order` are evicted; or evict it."""
        items: list[Item] = [*self._residents, *self._prefixes.pieces]
        there = {id(each): each for each in items}
        order = [each for each in order if there.pop(id(each), None)]
        room = find_room(order, [*used, *slots_of(there.values())], item.length, self.num_slots)
        if room is None:
            self._count_evicted(item)
            return []
        source, start = item.start, room[0]
        for other in order:
            if shared_slots(other, start, start + item.length):
                self._evict(other)
        if isinstance(item, PrefixPiece):
            item.start = start
            self._prefixes.add(item)
        else:
            self._residents.append(replace(item, start=start, position=None))
        return [Move(source, start, None, item.length)]

    def _count_evicted(self, item: Item) -> None:
        self._evicted += item.length
        if isinstance(item, PrefixPiece) and self._saved.memory is not None:
            self._to_save.append(item)

    def _evict(self, item: Item) -> None:
        self._count_evicted(item)
        if isinstance(item, PrefixPiece):
            self._prefixes.remove(item)
        else:
            self._residents.remove(item)

    def _grow(self, region: _Region) -> bool:
        """Give a region `GROWTH` slots more; False if the next ones are another image's, or there are none."""
        with self._lock:
            self._settle()
            others = [(each.start, each.end) for each in self._regions if each is not region]
            if region.end + GROWTH > self.num_slots or overlaps(region.end, region.end + GROWTH, others):
                return False
            region.end += GROWTH
            assert self._pool is not None
            self._count(moves=self._reposition(self._pool, self._park([region], self._found())).moves)
            return True

    def _finished(self, reservation: Reservation) -> None:
        with self._lock:
            if reservation.region is not None and reservation.region.chain is not None:
                self._keep_blocks(reservation.region)
            self._count(loaded=reservation.use.loaded)

    def _count(self, moves: int = 0, loaded: int = 0) -> None:
        """Bring `counts` up to date."""
        there = [*self._residents]
        for region in self._regions:
            there += region.resident + (region.loaded if region.is_linked else [])
        of_slot = slot_bytes(self._model)
        self.counts = PoolCounts(
            sum(resident.length for resident in there) * of_slot, self.counts.moves + moves,
            self.counts.loaded_bytes + 2 * loaded * of_slot // 3,
            sum(piece.length for piece in self._prefixes.pieces) * of_slot, self._evicted * of_slot,
            self._num_saved * of_slot, self._num_restored * of_slot,
        )  # fmt: skip


def _by_use(item: Item) -> tuple[int, int]:
    """Puts the latest first, and of a chain the first."""
    return -item.used, item.first


def _length(part: PlacedObject) -> int:
    return part.end - part.start


def _content(part: PlacedObject) -> Hashable:
    """What a resident is of: checksums, so that a file that is replaced or damaged later changes nothing; and its key,
    which holds the tenant's salt."""
    file, tokens = part.file, part.tokens
    return file.meta.key, tuple(file.checksums["layers"]), tokens.start, tokens.stop


class Placed(Protocol):
    """What takes the slots [start, end)."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


def slots_of(items: Iterable[Placed]) -> list[tuple[int, int]]:
    return [(item.start, item.end) for item in items]


def shared_slots(item: Placed, start: int, end: int) -> int:
    """How many of the slots [start, end) something takes."""
    return max(0, min(item.end, end) - max(item.start, start))


def overlaps(start: int, end: int, spans: Sequence[tuple[int, int]]) -> bool:
    return any(span[0] < end and start < span[1] for span in spans)


def find_room(
    order: Sequence[Placed], used: Sequence[tuple[int, int]], length: int, num_slots: int
) -> tuple[int, int] | None:
    """Where `length` slots are free once the first of `order` are evicted, and how many these are; None: nowhere."""

    def gap(evicted: int) -> int | None:
        return first_gap([*used, *slots_of(order[evicted:])], length, num_slots)

    evicted = bisect.bisect_left(range(len(order) + 1), True, key=lambda count: gap(count) is not None)
    start = gap(evicted) if evicted <= len(order) else None
    return None if start is None else (start, evicted)


def first_gap(used: Sequence[tuple[int, int]], length: int, num_slots: int) -> int | None:
    """Where the first `length` slots begin that nobody uses; None: nowhere."""
    at = 0
    for start, end in sorted(used):
        if start - at >= length:
            return at
        at = max(at, end)
    return at if num_slots - at >= length else None


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
