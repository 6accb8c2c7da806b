"""Many queries at once, ordered so that what they share meets in the cache (Span queries §5.8).

A greedy clustering: the next query is the one of which most is cached, in a cache that evicts the least recently used.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.compiler.chunking import read_text
from pictool.engines.answer_file import Contents, digest_of, engine_identity
from pictool.errors import InputError
from pictool.spans.operators.calls import ModelCall
from pictool.spans.operators.retrieve import Fragment, Retrieve, source_files
from pictool.spans.query import DEFAULT_MODEL, Query, nodes, to_json
from pictool.spans.reading import read_query
from pictool.spans.running import failing, written

if TYPE_CHECKING:
    from pictool.spans.execute import Executor

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
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{name}: has no queries")
    return [BulkQuery(number, read_query(line, f"{name}:{number}", is_yaml=False)) for number, line in lines]


class AnswerDigests:
    """Digests of what answers to queries follow from, by an executor that reads the files of now."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._contents = executor, Contents()
        self._engine_identity = cache(lambda name: engine_identity(executor.engine_of(name), executor.options.policy))

    def __call__(self, bulk_query: BulkQuery) -> str | None:
        """None for a query that cannot be run as it is."""
        salt = self._executor.engine_of(DEFAULT_MODEL).model.salt
        return digest_of(lambda: self._identity(bulk_query), salt)

    def _identity(self, bulk_query: BulkQuery) -> list[Any]:
        options, models, files = self._executor.options, {DEFAULT_MODEL}, list[Path]()
        for _, node in nodes(bulk_query.query):
            match node:
                case ModelCall():
                    models.add(node.call.model)
                case Fragment(source, None):
                    files.append(options.base / source)
                case Retrieve():
                    files += source_files(node.sources, options.base)
        said = [
            options.max_new_tokens, options.top_p, options.seed, bulk_query.line, options.codec, options.after,
            options.arity, asdict(options.budget), options.keeps_outputs, options.sorts_plus, options.has_rules,
        ]  # fmt: skip
        engines = [[name, self._engine_identity(name)] for name in sorted(models)]
        return [to_json(bulk_query.query), said, engines, [self._contents.of(path) for path in files]]


def items_of(query: Query, base: Path, size: Callable[[str], int] = len) -> dict[Hashable, int]:
    """The texts that a query's calls read, by their hashes, each with its size.

    What an R finds is among them once the query is optimised; the text of an `augment` always.

    Raises:
        QueryError: a file that cannot be read.
    """
    texts: list[str] = []
    for path, node in nodes(query):
        texts += node.texts
        if isinstance(node, Fragment) and node.text is None:
            with failing(written(node, path)):
                texts.append(read_text(base / node.source))
    return {hashlib.sha256(text.encode()).digest(): size(text) for text in texts}


def schedule(queries: Sequence[Items], capacity: int) -> Schedule:
    """Order queries for a cache that holds items of `capacity` in all; as given where that is no worse."""
    order, total = tuple(_greedy(queries, capacity)), sum(sum(items.values()) for items in queries)
    as_given, planned = (expected_hits([queries[i] for i in each], capacity) for each in (range(len(queries)), order))
    if planned <= as_given:
        order, planned = tuple(range(len(queries))), as_given
    return Schedule(order, as_given, planned, total)


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
