"""The life of objects: what is collected, expired, pinned; and what the store holds in all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pictool.errors import StoreError
from pictool.store import space
from pictool.store.counters import Counts, read_counts
from pictool.store.entries import Entry, entries, litter_candidates
from pictool.store.files import remove_litter
from pictool.store.hits import forget_hits
from pictool.store.space import Amount
from pictool.store.store import Store


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
