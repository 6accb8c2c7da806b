"""The list of a store's objects: filtered, sorted, and named for people. No screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import time_ns
from typing import Any

from rich.filesize import decimal

from pictool.store.eviction import pinned
from pictool.store.sources import Source, read_sources
from pictool.store.store import Store, StoredObject
from pictool.tui.services import beginning

SHORT = 12  # digits of an abbreviated key


@dataclass(frozen=True)
class Listing:
    """What a store has at a time.

    Attributes:
        objects: by key, without blocks of chains.
        hits: how often each was opened to be used; None if that cannot be read.
        pins: keys of those that are kept from being evicted. sources: what they were made of, as far as it is known.
    """

    objects: Mapping[str, StoredObject] = field(default_factory=dict)
    hits: Mapping[str, int] | None = None
    pins: frozenset[str] = frozenset()
    sources: Mapping[str, Source] = field(default_factory=dict)

    @classmethod
    def read(cls, store: Store) -> Listing:
        """Read it now."""
        objects = {stored.key: stored for stored in store.objects()}
        return cls(objects, store.hits(), pinned(store.root), read_sources(store.root))

    def name(self, key: str, source: str | None) -> str:
        """An object's name for people: its source, the document that it came from, else the beginning of its text."""
        stored = self.objects.get(key)
        if source is not None or stored is None or not stored.text.strip():
            return source or key[:SHORT]
        return beginning(stored.text)

    def find(self, text: str, sort: str, links: Mapping[str, int]) -> list[StoredObject]:
        """The objects whose key, source, text or problem contains `text`, sorted, the largest number first."""
        hits, text = self.hits or {}, text.casefold()
        orders: dict[str, Callable[[StoredObject], Any]] = {
            "key": lambda stored: stored.key,
            "tokens": lambda stored: stored.meta.num_tokens if stored.meta else -1,
            "size": lambda stored: stored.num_bytes,
            "hits": lambda stored: hits.get(stored.key, 0),
            "used": lambda stored: stored.used_ns,
            "before": lambda stored: stored.meta.num_before if stored.meta else -1,
            "links": lambda stored: links[stored.key],
            "text": lambda stored: stored.text.casefold(),
        }
        found = [stored for stored in self.objects.values() if text in self._words(stored).casefold()]
        return sorted(found, key=orders[sort], reverse=sort not in ("key", "text"))

    def _words(self, stored: StoredObject) -> str:
        source = self.sources[stored.key].source if stored.key in self.sources else ""
        return f"{stored.key} {source} {stored.text} {stored.problem or ''}"

    def cells(self, stored: StoredObject, links: int, is_marked: bool) -> tuple[object, ...]:
        """The row of an object: marks, key, tokens, source and text, size, hits, last use, tokens before it, links."""
        key, meta = stored.key, stored.meta
        source = f"{Path(self.sources[key].source).name}: " if key in self.sources else ""
        text = " ".join(stored.text.split())
        if stored.problem:
            text = f"DAMAGED: {stored.problem.removeprefix(f'{stored.path}: ')}"
        return (
            f"{'✓' if is_marked else ' '}{'P' if key in self.pins else ' '}", key[:SHORT],
            "" if meta is None else meta.num_tokens, source + text, decimal(stored.num_bytes),
            "?" if self.hits is None else self.hits.get(key, 0), ago(stored.used_ns, time_ns()),
            "" if meta is None else meta.num_before, links or "",
        )  # fmt: skip


def ago(used_ns: int, now_ns: int) -> str:
    """Return the time since a use in the largest unit that is not 0; `ahead` if a wrong clock set it in the future."""
    seconds = (now_ns - used_ns) // 1_000_000_000
    if seconds < 0:
        return "ahead"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def short_keys(keys: Sequence[str], others: Sequence[str]) -> list[str]:
    """Abbreviate keys to 12 digits, as everywhere; one that another key begins with as well is not abbreviated."""
    counts = Counter(key[:SHORT] for key in others)
    return [key[:SHORT] if counts[key[:SHORT]] <= 1 else key for key in keys]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in the right number."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
