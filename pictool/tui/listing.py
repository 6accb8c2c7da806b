"""What a store holds, read bit by bit and never assumed to stay as it is. Knows no screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pictool.store.store import Store, StoredObject

BATCH = 1024
SORTS = ("key", "tokens", "bytes", "sinks", "links", "text")


@dataclass(frozen=True)
class Row:
    """An object in the list; `found` is None until its header is read. `links`: traces at hand that link it."""

    key: str
    found: StoredObject | None
    links: int


@dataclass
class Listing:
    """The objects of a store: keys at once, headers batch by batch, and again what changed since.

    Methods that read run in a thread; they build new maps and put them in place whole.
    """

    store: Store
    described: dict[str, StoredObject | None] = field(default_factory=dict)
    _stamp: tuple[int, ...] | None = None
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def refresh(self) -> bool:
        """Read the keys again if the store has changed. What is gone or was replaced is forgotten. In a thread."""
        stamp = self.store.stamp()
        if stamp == self._stamp:
            return False
        seen = self.store.files()
        self.described = {
            key: self.described.get(key) if self._seen.get(key) == seen[key] else None for key in sorted(seen)
        }
        self._seen, self._stamp = seen, stamp
        return True

    def read_headers(self, on_batch: Callable[[], None], is_cancelled: Callable[[], bool]) -> None:
        """Read the headers that are not read yet, telling after every batch. In a thread."""
        waiting = [key for key, found in self.described.items() if found is None]
        for start in range(0, len(waiting), BATCH):
            if is_cancelled():
                return
            for key in waiting[start : start + BATCH]:
                self._read(key)
            on_batch()

    def _read(self, key: str) -> None:
        found = self.store.describe(key)
        if found is None:
            self.described = {one: known for one, known in self.described.items() if one != key}
        elif key in self.described:
            self.described[key] = found

    def rows(self, text: str, sort: str, is_reversed: bool, links: dict[str, int]) -> list[Row]:
        """Rows whose key or text holds `text`, in order; those without a header come last."""
        wanted = text.casefold()
        known = list(self.described.items())
        if wanted:
            known = [(key, one) for key, one in known if wanted in _words(key, one)]
        found = [Row(key, one, links.get(key, 0)) for key, one in known]
        if sort == "key":  # as they are
            return found[::-1] if is_reversed else found
        with_header = [row for row in found if _order(row, sort) is not None]
        with_header.sort(key=lambda row: _order(row, sort), reverse=is_reversed)  # type: ignore[arg-type, return-value]
        return with_header + [row for row in found if _order(row, sort) is None]


def _words(key: str, one: StoredObject | None) -> str:
    return key if one is None else f"{key} {one.text} {one.problem or ''}".casefold()


def _order(row: Row, sort: str) -> tuple[int | str, str] | None:
    """What a row is sorted by; None if that is not known."""
    if sort == "links":
        return row.links, row.key
    one = row.found
    if one is None or (one.meta is None and sort != "bytes"):
        return None
    if sort == "bytes" or one.meta is None:
        return one.num_bytes, row.key
    if sort == "text":
        return one.text.casefold(), row.key
    return (one.meta.num_tokens if sort == "tokens" else one.meta.sinks), row.key


def links_of(keys_by_trace: Sequence[Sequence[str]]) -> dict[str, int]:
    """How many traces link each object."""
    counts: dict[str, int] = {}
    for keys in keys_by_trace:
        for key in set(keys):
            counts[key] = counts.get(key, 0) + 1
    return counts
