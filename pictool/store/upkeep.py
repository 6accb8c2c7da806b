"""Upkeep of a store: garbage collection, expiry, pins, statistics, and verification with repair."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pictool.errors import (
    ForeignObjectError,
    ObjectError,
    PicError,
    StoreError,
    UnreadableObjectError,
    UnwritableStoreError,
)
from pictool.store import eviction
from pictool.store.database import DATABASE, reading, writing
from pictool.store.directory import ensure_store, is_store, require_store
from pictool.store.entries import Entry, entries, inner_directories, temp_candidates
from pictool.store.eviction import Tally
from pictool.store.files import remove_stale_temp, require_no_links
from pictool.store.leases import leased_keys
from pictool.store.objects.format import ObjectFile
from pictool.store.opened import opened
from pictool.store.readings import forget_readings
from pictool.store.scratch import abandoned_scratch, remove_scratch
from pictool.store.signatures import sidecar_of
from pictool.store.store import Store
from pictool.store.usage import UsageCounts, read_counts

_OF_OBJECTS = ("hits WHERE true", "sources WHERE true", "folders WHERE folder = ''")  # what gc forgets with an object
Check = Callable[[ObjectFile], None]


@dataclass(frozen=True)
class GcResult:
    """What a gc removed: temp files of killed writers, and evicted objects; `num_bytes` are those of the others."""

    litter: Tally  # as `pic store gc --json` names it
    evicted: Tally
    num_bytes: int


def gc(store: Store, max_bytes: int | None = None) -> GcResult:
    """Remove temp files of killed writers, and evict the least recently used objects down to `max_bytes`.

    Raises:
        StoreError: the store cannot be written.
    """
    max_bytes = store.max_bytes if max_bytes is None else max_bytes
    store.ensure_store()
    try:
        stale = [size for root in _roots(store) for size in _collect(root, store.root)]
        num_bytes, evicted = eviction.shrink(store.root, max_bytes)
    except OSError as error:
        raise _cannot_change(store, error) from error
    store.counters.add(UsageCounts(evictions=evicted.count, evicted_bytes=evicted.num_bytes))
    opened.close_removed()
    _forget(store)
    return GcResult(Tally(len(stale), sum(stale)), evicted, num_bytes)


def _forget(store: Store) -> None:
    """Drop what the database has of objects that are gone, and what was read of files and not used for long."""
    try:
        with reading(store.root) as db:
            known = {key for rows in _OF_OBJECTS for (key,) in db.execute(f"SELECT key FROM {rows}")}
        gone = [(key,) for key in known.difference(store.keys())]
        if (store.root / DATABASE).exists():
            with writing(store.root) as db:
                for rows in _OF_OBJECTS:
                    db.executemany(f"DELETE FROM {rows} AND key = ?", gone)
                forget_readings(db)
    except StoreError as error:
        store.on_warning(str(error))


def would_collect(store: Store, max_bytes: int | None = None) -> tuple[list[Path], list[Entry]]:
    """What `gc` would remove: temp files and scratch directories of killed writers, and objects.

    Raises:
        StoreError: the directory is no store.
    """
    require_store(store.root)
    stale = list[Path]()
    for root in _roots(store):
        stale += [path for path in _temps(root) if remove_stale_temp(path, dry_run=True) is not None]
        stale += abandoned_scratch(root)
    return stale, eviction.would_shrink(store.root, store.max_bytes if max_bytes is None else max_bytes)


def _roots(store: Store) -> list[Path]:
    """The directories of a store, and of those in it."""
    return [store.root, *filter(is_store, inner_directories(store.root, "objects"))]


def _temps(root: Path) -> list[Path]:
    """Temp files of a store, and of directories in it that were to become stores when their makers were killed."""
    begun = filter(_has_temps_alone, inner_directories(root, "tmp"))
    return [path for directory in (root, *begun) for path in temp_candidates(directory)]


def _has_temps_alone(directory: Path) -> bool:
    with suppress(OSError):
        return [path.name for path in directory.iterdir()] == ["tmp"]
    return False


def _collect(root: Path, outer: Path) -> list[int]:
    """Remove what killed processes left in a store: temp files, scratch directories; the bytes of each."""
    ensure_store(root, outer)
    require_no_links(root / "tmp", root)
    files = [size for path in _temps(root) if (size := remove_stale_temp(path)) is not None]
    return files + remove_scratch(root)


def expire(store: Store, keys: Sequence[str], force: bool = False) -> Tally:
    """Remove these objects (EPIC appendix B, `expire_cache`).

    Raises:
        StoreError: one is not there, or is pinned or leased and `force` is not set; nothing was removed then.
    """
    store.ensure_store()
    objects, pins = would_expire(store, keys, force), eviction.pinned(store.root)
    removed = _remove(store, objects)
    for entry in objects:
        if entry.key in pins:
            eviction.unpin(store.root, entry.key)
    return removed


def would_expire(store: Store, keys: Sequence[str], force: bool = False) -> list[Entry]:
    """What `expire` would remove. Raises as `expire` does."""
    objects = [_entry(store, key) for key in dict.fromkeys(keys)]
    pins = eviction.pinned(store.root)
    pinned = [entry.key for entry in objects if entry.key in pins]
    if pinned and not force:
        raise StoreError(f"{pinned[0][:12]}: is pinned; unpin it first, or use --force")
    leased = [] if force else sorted(leased_keys(store.root) & {entry.key for entry in objects})
    if leased:
        raise StoreError(f"{leased[0][:12]}: is leased by a server; end the lease first, or use --force")
    return objects


def expire_older(store: Store, seconds: float) -> Tally:
    """Remove objects without a pin or a lease that were not used for so long.

    One that a wrong clock used in the future stays.
    """
    store.ensure_store()
    return _remove(store, would_expire_older(store, seconds))


def would_expire_older(store: Store, seconds: float) -> list[Entry]:
    """What `expire_older` would remove."""
    limit, pins = time.time_ns() - int(seconds * 1e9), eviction.kept(store.root)
    return [entry for entry in entries(store.root) if entry.used_ns < limit and entry.key not in pins]


def pin(store: Store, key: str) -> None:
    """Keep an object that is there from being evicted or expired."""
    eviction.pin(store.root, _entry(store, key).key)


def unpin(store: Store, key: str) -> None:
    """Let an object be evicted and expired again."""
    eviction.unpin(store.root, key)


def _entry(store: Store, key: str) -> Entry:
    entry = Entry.of(store.path(key))
    if entry is None:
        raise StoreError(f"{key[:12]}: no such object in the store {store.root}; see pic store ls")
    return entry


def _remove(store: Store, objects: list[Entry]) -> Tally:
    if not objects:
        return Tally()
    try:
        return eviction.remove_all(store.root, objects)
    except OSError as error:
        raise _cannot_change(store, error) from error
    finally:
        opened.close_removed()


def _cannot_change(store: Store, error: OSError) -> StoreError:
    return StoreError(f"{store.root}: cannot be changed ({error.strerror or error}); check its permissions")


@dataclass(frozen=True)
class StoreStats:
    """What a store holds, and how it was used. `chains` are the blocks of prefix chains among the objects."""

    objects: int
    num_bytes: int
    max_bytes: int | None
    pinned: int
    damaged: int
    chains: Tally
    by_model: dict[str, Tally]
    by_codec: dict[str, Tally]
    counts: UsageCounts


def stats(store: Store) -> StoreStats:
    """Count what the store holds, by model and by codec, and how it was used."""
    store.counters.flush()
    objects = list(store.objects(chains=True))
    blocks = [stored.num_bytes for stored in objects if stored.is_block]
    readable = [(stored.meta, stored.num_bytes) for stored in objects if stored.meta is not None]
    return StoreStats(
        objects=len(objects),
        num_bytes=sum(stored.num_bytes for stored in objects),
        max_bytes=store.max_bytes,
        pinned=len(eviction.pinned(store.root)),
        damaged=len(objects) - len(readable),
        chains=Tally(len(blocks), sum(blocks)),
        by_model=_tally_by((meta.target.model, size) for meta, size in readable),
        by_codec=_tally_by((meta.codec, size) for meta, size in readable),
        counts=read_counts(store.root),
    )


def _tally_by(sizes: Iterable[tuple[str, int]]) -> dict[str, Tally]:
    """From (name, bytes) of each object to a tally for each name, sorted by name."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for name, size in sizes:
        tallies[name] += Tally(1, size)
    return dict(sorted(tallies.items()))


@dataclass(frozen=True)
class VerifyResult:
    """What was read. `problems` are by key; the objects in `repaired` are gone.

    `unsigned` are whole, but absent for links: the store requires a signature, and has none of a trusted key.
    """

    objects: int
    num_bytes: int
    problems: dict[str, str]
    repaired: tuple[str, ...] = ()
    unsigned: tuple[str, ...] = ()


def verify(
    store: Store, repair: bool = False, on_object: Callable[[Entry], None] | None = None, check: Check | None = None
) -> VerifyResult:
    """Read and check every object.

    `repair` removes damaged objects, so that they are compiled again when they are next needed, and those under the
    name of another. One that cannot be read for another reason (permission, an unknown version of the format) stays,
    and remains a problem; so does one that cannot be removed, as a directory that is not empty.

    Args:
        check: raises ObjectError for what only somebody else can tell, as whether a text is that of its tokens.
    """
    if repair:
        store.ensure_store()
    count, num_bytes = 0, 0
    problems: dict[str, str] = {}
    unsigned: list[str] = []
    for entry in entries(store.root):
        problem = find_problem(store, entry.key, check)
        if problem is None or entry.path.exists():
            count, num_bytes = count + 1, num_bytes + entry.num_bytes
            problems |= {} if problem is None else {entry.key: str(problem)}
            unsigned += [entry.key] if problem is None and not _is_admitted(store, entry.key) else []
        if on_object:
            on_object(entry)
    repaired = _take_out_all(store, problems, check) if repair else ()
    return VerifyResult(count, num_bytes, problems, repaired, tuple(unsigned))


def _is_admitted(store: Store, key: str) -> bool:
    """Whether links may use an object as far as its signatures tell."""
    if store.requires_signed:
        with suppress(ObjectError), store.peek_any(key) as file:
            return store.admits(file)
    return True


def _take_out_all(store: Store, problems: dict[str, str], check: Check | None) -> tuple[str, ...]:
    """The keys of those that could be taken out; of the others, `problems` says why they could not.

    One that another process took out or compiled again meanwhile is no problem any more.
    """
    repaired = []
    for key in list(problems):
        try:
            if take_out(store, key, check):
                repaired.append(key)
            elif not os.path.lexists(store.path(key)) or find_problem(store, key, check) is None:
                del problems[key]
        except StoreError as error:
            problems[key] = str(error)
    return tuple(repaired)


def take_out(store: Store, key: str, check: Check | None = None) -> bool:
    """Take a damaged object out; False if, under the store's lock, it is not damaged (any more).

    Raises:
        StoreError: it cannot be removed, as a directory that is not empty.
    """
    path = store.path(key)
    try:
        with eviction.locked_store(store.root) as fd:
            problem = find_problem(store, key, check)
            if not isinstance(problem, ObjectError) or isinstance(problem, UnreadableObjectError | ForeignObjectError):
                return False
            eviction.forget_total(fd)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()  # only if there is nothing in it
            else:
                path.unlink()
                sidecar_of(path).unlink(missing_ok=True)
    except OSError as error:
        raise UnwritableStoreError(f"{path}: is {_what_is(path)}, and cannot be removed ({error.strerror})") from error
    return True


def _what_is(path: Path) -> str:
    return "a directory in the place of an object" if path.is_dir() else "damaged"


def find_problem(store: Store, key: str, check: Check | None = None) -> PicError | None:
    """Why an object of this store cannot be used, after all of it was read; None if it can. `check` as of `verify`."""
    try:
        with store.peek_any(key) as file:
            file.verify()
            if check is not None:
                check(file)
    except PicError as error:
        return error
    return None
