"""What a store holds, read bit by bit and never assumed to stay as it is. Knows no screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pictool.store.entries import Entry
from pictool.store.store import Store, StoredObject

BATCH = 1024
SORTS = ("key", "tokens", "bytes", "hits", "used", "sinks", "links", "text")


@dataclass(frozen=True)
class Row:
    """An object in the list; `found` is None until its header is read.

    `hits`: how often it was opened to be used; None if that cannot be read. `links`: traces at hand that link it.
    """

    key: str
    found: StoredObject | None
    hits: int | None
    links: int


@dataclass
class Listing:
    """The objects of a store: keys at once, then headers batch by batch, and again what changed or was used since.

    Methods that read run in a thread; they build new maps and put them in place whole.
    """

    store: Store
    described: dict[str, StoredObject | None] = field(default_factory=dict)
    hits: Mapping[str, int] | None = None
    _stamp: tuple[object, ...] | None = None

    def refresh(self) -> bool:
        """Read keys and hits again if the store was changed or used. What is gone or was replaced is forgotten."""
        stamp = (self.store.stamp(), self.store.use_stamp())
        if stamp == self._stamp:
            return False
        if any(self.described.values()):
            self.described = {key: _still(self.described.get(key), now) for key, now in self.store.files().items()}
        else:  # as fast as can be
            self.described = dict.fromkeys(self.store.keys())
        self.hits, self._stamp = self.store.hits(), stamp
        return True

    def read_headers(
        self, on_batch: Callable[[], None], is_cancelled: Callable[[], bool], first: Sequence[str] = ()
    ) -> None:
        """Read the headers that are not read yet, those of `first` before others, telling after every batch."""
        waiting = {key: None for key, found in self.described.items() if found is None}
        seen = [key for key in first if key in waiting]
        others = [key for key in waiting if key not in set(seen)]
        for batch in (seen, *(others[start : start + BATCH] for start in range(0, len(others), BATCH))):
            if is_cancelled():
                return
            for key in batch:
                self._read(key)
            on_batch()

    def _read(self, key: str) -> None:
        found = self.store.describe(key)
        if found is None:
            self.described = {one: known for one, known in self.described.items() if one != key}
        elif key in self.described:
            self.described[key] = found

    def rows(self, text: str, sort: str, is_reversed: bool, links: dict[str, int]) -> list[Row]:
        """Rows whose key or text holds `text`, in order, without blocks of chains; those without a header come last."""
        wanted = text.casefold()
        known = [(key, one) for key, one in self.described.items() if one is None or not one.is_block]
        if wanted:
            known = [(key, one) for key, one in known if wanted in _words(key, one)]
        hits = self.hits
        found = [Row(key, one, None if hits is None else hits.get(key, 0), links.get(key, 0)) for key, one in known]
        if sort == "key":  # as they are
            return found[::-1] if is_reversed else found
        with_header = [row for row in found if _order(row, sort) is not None]
        with_header.sort(key=lambda row: _order(row, sort), reverse=is_reversed)  # type: ignore[arg-type, return-value]
        return with_header + [row for row in found if _order(row, sort) is None]


def _still(known: StoredObject | None, now: Entry) -> StoredObject | None:
    """What is known of an object, if its file is the same. One that was used since is read again."""
    is_same = known is not None and (known.used_ns, known.num_bytes) == (now.used_ns, now.num_bytes)
    return known if is_same else None


def ago(used_ns: int, now_ns: int) -> str:
    """How long ago, in the largest unit that is not 0; what a wrong clock has used in the future is `ahead`."""
    seconds = (now_ns - used_ns) // 1_000_000_000
    if seconds < 0:
        return "ahead"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _words(key: str, one: StoredObject | None) -> str:
    return key if one is None else f"{key} {one.text} {one.problem or ''}".casefold()


def _order(row: Row, sort: str) -> tuple[int | str, str] | None:
    """What a row is sorted by; None if that is not known."""
    if sort == "links":
        return row.links, row.key
    if sort == "hits":
        return None if row.hits is None else (row.hits, row.key)
    one = row.found
    if one is None:
        return None
    if sort == "used":
        return one.used_ns, row.key
    if sort == "bytes":
        return one.num_bytes, row.key
    if one.meta is None:
        return None
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
