"""The list of a store's objects: read in batches, refreshed when the store changes, filtered and sorted. No screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pictool.store.entries import Entry
from pictool.store.eviction import pinned
from pictool.store.side.sources import SOURCES_FILE, Source, read_sources
from pictool.store.store import Store, StoredObject

BATCH = 1024
SHORT = 12  # digits of an abbreviated key
SORTS = ("key", "tokens", "size", "hits", "used", "dummy", "links", "text")


@dataclass(frozen=True)
class ListedObject:
    """An object in the list.

    Attributes:
        stored: what its header says; None until that is read.
        hits: how often it was opened to be used; None if that cannot be read.
        links: how many open traces link it.
        is_pinned: whether it is kept from being evicted.
        verified: the problem that reading all of it has found; "" if none was found or looked for.
    """

    key: str
    stored: StoredObject | None
    hits: int | None
    links: int
    is_pinned: bool = False
    verified: str = ""

    @property
    def problem(self) -> str:
        """Why it cannot be used, as far as that is known; else ""."""
        return self.verified or ("" if self.stored is None else self.stored.problem or "")


@dataclass
class Listing:
    """The objects of a store: first the keys, then the headers in batches, then again whatever changed or was used.

    Methods that read run in a thread; they build new maps and replace the old ones as a whole.
    """

    store: Store
    described: dict[str, StoredObject | None] = field(default_factory=dict)
    hits: Mapping[str, int] | None = None
    pins: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)  # that verifying has found, by key
    _stamp: tuple[object, ...] | None = None

    def refresh(self) -> bool:
        """Read keys and hits again if the store was changed or used; forget what was removed or replaced.

        Returns whether anything was read.
        """
        pins = pinned(self.store.root)
        stamp = (self.store.stamp(), self.store.use_stamp(), pins, _changed_ns(self.store.root / SOURCES_FILE))
        if stamp == self._stamp:
            return False
        if any(self.described.values()):
            files = self.store.files().items()
            self.described = {key: _if_unchanged(self.described.get(key), entry) for key, entry in files}
        else:  # keys alone are faster
            self.described = dict.fromkeys(self.store.keys())
        self.hits, self.pins, self._stamp = self.store.hits(), pins, stamp
        self.sources = read_sources(self.store.root)
        self.problems = {key: problem for key, problem in self.problems.items() if self.described.get(key) is not None}
        return True

    @property
    def num_objects(self) -> int:
        """How many objects are listed without a filter: blocks of chains are not."""
        return sum(stored is None or not stored.is_block for stored in self.described.values())

    def set_verified(self, found: Mapping[str, str]) -> None:
        """Take over what verifying found: of each key its problem, or "" if there is none."""
        problems = {**self.problems, **found}
        self.problems = {key: problem for key, problem in problems.items() if problem}

    def read_headers(
        self, on_batch: Callable[[], None], is_cancelled: Callable[[], bool], first: Sequence[str] = ()
    ) -> None:
        """Read the headers that are missing, those of `first` before others; `on_batch` is called after every batch."""
        missing = {key: None for key, stored in self.described.items() if stored is None}
        urgent = [key for key in first if key in missing]
        others = [key for key in missing if key not in set(urgent)]
        for batch in (urgent, *(others[start : start + BATCH] for start in range(0, len(others), BATCH))):
            if is_cancelled():
                return
            for key in batch:
                self._read(key)
            on_batch()

    def _read(self, key: str) -> None:
        stored = self.store.describe(key)
        if stored is None:
            self.described = {other: known for other, known in self.described.items() if other != key}
        elif key in self.described:
            self.described[key] = stored

    def objects(self, text: str, sort: str, is_reversed: bool, links: dict[str, int]) -> list[ListedObject]:
        """List the objects whose key, source or text contains `text`, sorted, without blocks of chains.

        Objects whose sort key is not known yet come last.
        """
        text, hits = text.casefold(), self.hits
        listed = [
            ListedObject(
                key,
                stored,
                None if hits is None else hits.get(key, 0),
                links.get(key, 0),
                key in self.pins,
                self.problems.get(key, ""),
            )
            for key, stored in self.described.items()
            if (stored is None or not stored.is_block)
            and (not text or text in _search_text(key, stored, self.sources.get(key)))
        ]
        if sort == "key":  # the order of the store
            return listed[::-1] if is_reversed else listed
        known = [entry for entry in listed if _sort_key(entry, sort) is not None]
        known.sort(key=lambda entry: _sort_key(entry, sort), reverse=is_reversed)  # type: ignore[arg-type, return-value]
        return known + [entry for entry in listed if _sort_key(entry, sort) is None]


def _if_unchanged(stored: StoredObject | None, entry: Entry) -> StoredObject | None:
    """Return what is known of an object if its file is still the same and was not used since."""
    is_same = stored is not None and (stored.used_ns, stored.num_bytes) == (entry.used_ns, entry.num_bytes)
    return stored if is_same else None


def ago(used_ns: int, now_ns: int) -> str:
    """Return the time since a use in the largest unit that is not 0; `ahead` if a wrong clock set it in the future."""
    seconds = (now_ns - used_ns) // 1_000_000_000
    if seconds < 0:
        return "ahead"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _search_text(key: str, stored: StoredObject | None, source: Source | None) -> str:
    known = "" if stored is None else f"{stored.text} {stored.problem or ''}"
    return f"{key} {'' if source is None else source.source} {known}".casefold()


def _changed_ns(path: Path) -> int:
    """When a file was last changed; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _sort_key(entry: ListedObject, sort: str) -> tuple[int | str, str] | None:
    """Return what an object is sorted by; None if that is not known."""
    if sort == "links":
        return entry.links, entry.key
    if sort == "hits":
        return None if entry.hits is None else (entry.hits, entry.key)
    stored = entry.stored
    if stored is None:
        return None
    if sort == "used":
        return stored.used_ns, entry.key
    if sort == "size":
        return stored.num_bytes, entry.key
    if stored.meta is None:
        return None
    if sort == "text":
        return stored.text.casefold(), entry.key
    return (stored.meta.num_tokens if sort == "tokens" else stored.meta.sinks), entry.key


def short_keys(keys: Sequence[str], others: Sequence[str]) -> list[str]:
    """Abbreviate keys to 12 digits, as everywhere; one that another key begins with as well is not abbreviated."""
    counts = Counter(key[:SHORT] for key in others)
    return [key[:SHORT] if counts[key[:SHORT]] <= 1 else key for key in keys]


def readable(num_bytes: int) -> str:
    """Return a size of three digits or so with its unit, as `117 KB`."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in the right number."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def count_links(keys_by_trace: Sequence[Sequence[str]]) -> dict[str, int]:
    """Count how many traces link each object."""
    counts: dict[str, int] = {}
    for keys in keys_by_trace:
        for key in set(keys):
            counts[key] = counts.get(key, 0) + 1
    return counts
