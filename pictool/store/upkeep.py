"""The life of objects: what is collected, expired, pinned; and what the store holds in all.

Reading every object of a store and checking it; and taking out what is damaged.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pictool.errors import ForeignObjectError, ObjectError, PicError, StoreError, UnreadableObjectError
from pictool.store import eviction as space
from pictool.store.entries import Entry, entries, litter_candidates
from pictool.store.eviction import Amount
from pictool.store.files import locked, remove_litter
from pictool.store.format import ObjectFile
from pictool.store.index import FILE as INDEX
from pictool.store.store import Store
from pictool.store.usage import Counts, forget_hits, read_counts


@dataclass(frozen=True)
class Collected:
    """What a gc removed: temp files that killed writers left, and objects over the size; and what stays."""

    litter: Amount
    evicted: Amount
    num_bytes: int


@dataclass(frozen=True)
class Usage:
    """What a store holds, and how it was used. `chains` are the blocks of prefix chains among the objects."""

    objects: int
    num_bytes: int
    max_bytes: int | None
    pinned: int
    damaged: int
    chains: Amount
    by_model: dict[str, Amount]
    by_codec: dict[str, Amount]
    counts: Counts


def gc(store: Store, max_bytes: int | None = None) -> Collected:
    """Remove the litter of killed writers, and evict what was used least recently until `max_bytes` are left.

    Raises:
        StoreError: the store cannot be written.
    """
    max_bytes = store.max_bytes if max_bytes is None else max_bytes
    try:
        removed = [size for path in litter_candidates(store.root) if (size := remove_litter(path)) is not None]
        used, evicted = space.collect_space(store.root, max_bytes)
    except OSError as error:
        raise _cannot_change(store, error) from error
    store.counters.add(Counts(evictions=evicted.count, evicted_bytes=evicted.num_bytes))
    forget_hits(store.root, store.keys)
    return Collected(Amount(len(removed), sum(removed)), evicted, used)


def expire(store: Store, keys: Sequence[str], force: bool = False) -> Amount:
    """Remove these objects (EPIC appendix B, `expire_cache`).

    Raises:
        StoreError: one is not there, or is pinned and `force` is not given; nothing was removed then.
    """
    found = [_entry(store, key) for key in dict.fromkeys(keys)]
    kept = space.pinned(store.root)
    if not force and (pinned := [entry.key for entry in found if entry.key in kept]):
        raise StoreError(f"{pinned[0][:12]}: is pinned, and stays; unpin it first, or use --force")
    removed = _remove(store, found)
    for entry in found:
        if entry.key in kept:
            space.unpin(store.root, entry.key)
    return removed


def expire_older(store: Store, seconds: float) -> Amount:
    """Remove what was not used for so long, but for what is pinned. What a wrong clock used in the future stays."""
    limit, kept = time.time_ns() - int(seconds * 1e9), space.pinned(store.root)
    return _remove(store, [one for one in entries(store.root) if one.used_ns < limit and one.key not in kept])


def pin(store: Store, key: str) -> None:
    """Keep an object that is there from being evicted or expired."""
    space.pin(store.root, _entry(store, key).key)


def unpin(store: Store, key: str) -> None:
    space.unpin(store.root, key)


def usage(store: Store) -> Usage:
    """Count what the store holds, by model and by codec, and how it was used."""
    store.counters.flush()
    found = list(store.objects(chains=True))
    blocks = [one.num_bytes for one in found if one.is_block]
    whole = [(one.meta, one.num_bytes) for one in found if one.meta is not None]
    return Usage(
        objects=len(found),
        num_bytes=sum(one.num_bytes for one in found),
        max_bytes=store.max_bytes,
        pinned=len(space.pinned(store.root)),
        damaged=len(found) - len(whole),
        chains=Amount(len(blocks), sum(blocks)),
        by_model=_grouped([(meta.target.model, size) for meta, size in whole]),
        by_codec=_grouped([(meta.codec, size) for meta, size in whole]),
        counts=read_counts(store.root / "stats"),
    )


def _grouped(sizes: list[tuple[str, int]]) -> dict[str, Amount]:
    counts, total = Counter(name for name, _ in sizes), Counter[str]()
    for name, size in sizes:
        total[name] += size
    return {name: Amount(counts[name], total[name]) for name in sorted(counts)}


def _entry(store: Store, key: str) -> Entry:
    entry = Entry.of(store.path(key))
    if entry is None:
        raise StoreError(f"{key[:12]}: no such object in the store {store.root}; see pic store ls")
    return entry


def _remove(store: Store, found: list[Entry]) -> Amount:
    if not found:
        return Amount()
    try:
        return space.remove_all(store.root, found)
    except OSError as error:
        raise _cannot_change(store, error) from error


def _cannot_change(store: Store, error: OSError) -> StoreError:
    return StoreError(f"{store.root}: cannot be changed ({error.strerror or error}); see who may write to it")


@dataclass(frozen=True)
class Verified:
    """What was read; `problems` by key, those that `repaired` names are gone."""

    objects: int
    num_bytes: int
    problems: dict[str, str]
    repaired: tuple[str, ...] = ()


def verify(store: Store, repair: bool = False, on_object: Callable[[Entry], None] | None = None) -> Verified:
    """Read and check every object.

    `repair` removes what is damaged, so that it is compiled again when it is next wanted. An object under another
    one's name gets its own. What cannot be read for another reason (permission, a version of format that is not
    known) stays, and remains a problem.

    Raises:
        StoreError: a damaged object cannot be removed.
    """
    count, num_bytes = 0, 0
    problems: dict[str, str] = {}
    for entry in entries(store.root):
        problem = _problem(store, entry.key)
        if problem is None or entry.path.exists():
            count, num_bytes = count + 1, num_bytes + entry.num_bytes
            problems |= {} if problem is None else {entry.key: str(problem)}
        if on_object:
            on_object(entry)
    repaired = tuple(key for key in problems if repair and take_out(store, key))
    if repaired:
        (store.root / INDEX).unlink(missing_ok=True)
    return Verified(count, num_bytes, problems, repaired)


def _problem(store: Store, key: str) -> PicError | None:
    try:
        with store.look_here(key) as found:
            found.verify()
    except PicError as error:
        return error
    return None


def take_out(store: Store, key: str) -> bool:
    """Take a damaged object out, if it still is damaged now that nobody else changes anything.

    Raises:
        StoreError: it cannot be removed.
    """
    path = store.path(key)
    try:
        with locked(store.root / space.LOCK) as fd:
            problem = _problem(store, key)
            if not isinstance(problem, ObjectError) or isinstance(problem, UnreadableObjectError | ForeignObjectError):
                return False
            space.forget_count(fd)
            if (own := _whole_under_own_name(store, key)) is not None and not store.path(own).exists():
                store.path(own).parent.mkdir(exist_ok=True)
                path.rename(store.path(own))
            else:
                path.unlink()
    except OSError as error:
        raise StoreError(f"{path}: is damaged, and cannot be removed ({error.strerror})") from error
    return True


def _whole_under_own_name(store: Store, key: str) -> str | None:
    """The key of a whole object that stands under this one's name."""
    try:
        with ObjectFile(store.path(key)) as found:
            found.verify()
            return found.meta.key
    except ObjectError:
        return None
