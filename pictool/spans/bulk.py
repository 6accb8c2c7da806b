"""Many queries at once, ordered so that what they share meets in the cache (Span queries §5.8).

A greedy clustering: the next query is the one of which most is cached, in a cache that evicts the least recently used.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pictool.compiler.chunking import read_text
from pictool.errors import InputError
from pictool.spans.query import Fragment, Map, Message, Query, nodes
from pictool.spans.reading import read_query, to_json

Items = Mapping[Any, int]  # what a query reads, each with its size
TOGETHER = 16  # queries of a bulk that run at once


@dataclass(frozen=True)
class BulkQuery:
    """One line of a file of queries; `line` counts from 1."""

    line: int
    query: Query

    @property
    def digest(self) -> str:
        """Of the query's content (hex)."""
        return hashlib.sha256(to_json(self.query).encode()).hexdigest()


@dataclass(frozen=True)
class Schedule:
    """The order in which queries run, as indices, and how much of what they read is cached before and after."""

    order: tuple[int, ...]
    hits_as_given: int
    hits: int
    total: int


def read_bulk(text: str, name: str) -> list[BulkQuery]:
    """The queries of a JSON Lines text, one a line.

    Raises:
        InputError: names the line and the path to the node, or says that there are none.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise InputError(f"{name}: has no queries")
    return [BulkQuery(number, read_query(line, f"{name}:{number}", is_yaml=False)) for number, line in lines]


def items_of(query: Query, base: Path, size: Callable[[str], int] = len) -> dict[Hashable, int]:
    """The texts that a query's calls read, each with its size; of files by their paths.

    Raises:
        InputError: a file that cannot be read.
    """
    texts: dict[Hashable, str] = {}
    for _, node in nodes(query):
        match node:
            case Fragment(source, None):
                texts["file", source] = read_text(base / source)
            case Fragment(_, str(text)) | Message(_, text):
                texts["text", text] = text
            case Map(_, inputs):
                texts |= {("text", text): text for text in inputs}
    return {key: size(text) for key, text in texts.items()}


def schedule(queries: Sequence[Items], capacity: int) -> Schedule:
    """Order queries for a cache that holds items of `capacity` in all."""
    order = tuple(_greedy(queries, capacity))
    total = sum(sum(items.values()) for items in queries)
    return Schedule(
        order, expected_hits(queries, capacity), expected_hits([queries[i] for i in order], capacity), total
    )


def expected_hits(queries: Sequence[Items], capacity: int) -> int:
    """How much of what queries read is cached when they read it, in this order."""
    cache = _Cache(capacity)
    hits = 0
    for items in queries:
        hits += sum(size for key, size in items.items() if key in cache)
        cache.use(items)
    return hits


class _Cache:
    """The least recently used items leave. What is larger than the whole cache is not kept."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._items: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._items

    def use(self, items: Items) -> tuple[list[Hashable], list[Hashable]]:
        """Have items in the cache; returns those that came, and those that left."""
        came = [key for key, size in items.items() if key not in self._items and size <= self._capacity]
        for key in items:
            if key in self._items:
                self._items.move_to_end(key)
        for key in came:
            self._items[key] = items[key]
            self._used += items[key]
        left: list[Hashable] = []
        while self._used > self._capacity:
            key, size = self._items.popitem(last=False)
            self._used -= size
            left.append(key)
        return came, left


def _greedy(queries: Sequence[Items], capacity: int) -> list[int]:
    readers: dict[Hashable, list[int]] = {}
    for index, items in enumerate(queries):
        for key in items:
            readers.setdefault(key, []).append(index)
    cached = [0] * len(queries)
    is_done = [False] * len(queries)
    heap = [(0, index) for index in range(len(queries))]  # (less what is cached, index); old entries stay
    cache, order = _Cache(capacity), []
    while heap:
        score, index = heapq.heappop(heap)
        if is_done[index] or -score != cached[index]:
            continue
        is_done[index] = True
        order.append(index)
        for keys, sign in zip(cache.use(queries[index]), (1, -1), strict=True):
            for key in keys:
                for reader in readers[key]:
                    if not is_done[reader]:
                        cached[reader] += sign * queries[reader][key]
                        heapq.heappush(heap, (-cached[reader], reader))
    return order


class Asked(Protocol):
    """What is asked on a line of a file; `digest` is the same only for the same."""

    @property
    def line(self) -> int: ...

    @property
    def digest(self) -> str: ...


class AnswerFile:
    """Answers as JSON Lines, appended and synced one at a time, so that a run that was stopped can go on.

    A last line that is not whole was being written then, and is dropped; a query that failed is asked again.

    Raises:
        InputError: the file cannot be used, or has answers to other queries.
    """

    def __init__(self, path: Path, queries: Sequence[Asked]) -> None:
        self._path = path
        self._digests = {query.line: query.digest for query in queries}
        self.answered: dict[int, dict[str, Any]] = {}
        if path.exists():
            self._read(path.read_bytes())

    def append(self, query: Asked, result: Mapping[str, Any]) -> None:
        record = {"line": query.line, "query": query.digest, **result}
        with self._path.open("ab") as file:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, data: bytes) -> None:
        whole, _, rest = data.rpartition(b"\n")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                is_ours = self._digests.get(record["line"]) == record["query"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{self._path}:{number}: is no answer to a query; name another file with -o"
                ) from error
            if not is_ours:
                raise InputError(f"{self._path}:{number}: answers another query; name another file with -o")
            if "error" not in record:
                self.answered[record["line"]] = record
        if rest:
            with self._path.open("rb+") as file:
                file.truncate(len(data) - len(rest))
