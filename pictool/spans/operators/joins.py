"""The four joins: seq and par, ⋈ whose children have an order, and + whose children commute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pictool.spans.operators.messages import Message, as_query
from pictool.spans.query import Effect, Options, Path, Query, Rule, to_json
from pictool.spans.reader import QueryReader
from pictool.spans.running import QueryTask, RunningQuery


@dataclass(frozen=True)
class Join(Query):
    """`{"seq": […]}`: any number of children; it gives what they give."""

    parts: tuple[Query, ...]

    @classmethod
    def of(cls, *items: Query | str) -> Self:
        """The join of queries; a text is a user's message."""
        return cls(tuple(map(as_query, items)))

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Self:
        return cls(reader.queries(value, path, depth))

    def to_data(self) -> dict[str, Any]:
        return {self.kind: [part.to_data() for part in self.parts]}

    def steps(self) -> Iterator[tuple[Path, Query]]:
        return (((self.kind, index), part) for index, part in enumerate(self.parts))

    def with_children(self, children: Sequence[Query]) -> Self:
        return replace(self, parts=tuple(children))

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        return self.with_children((yield from run.children(self, path)))

    def drop_empty(self, options: Options) -> Query | None:
        """Messages without text and joins without children leave it (spnl)."""
        kept = tuple(part for part in self.parts if not _is_empty(part))
        return self.with_children(kept) if len(kept) < len(self.parts) else None

    def splice(self, matches: Callable[[int, Query], bool]) -> Query | None:
        """It with the children of those children that match; None if none does."""
        spliced = tuple(
            child
            for index, part in enumerate(self.parts)
            for child in (part.children if matches(index, part) else (part,))
        )
        return self.with_children(spliced) if spliced != self.parts else None

    rules: ClassVar[tuple[Rule, ...]] = (Rule("drop empty", drop_empty),)


def _unwrap_single(join: Join, options: Options) -> Query | None:
    """A seq or par of one is that one (spnl)."""
    return join.parts[0] if len(join.parts) == 1 else None


@dataclass(frozen=True)
class Seq(Join):
    """Children that run one after the other."""

    kind: ClassVar[str] = "seq"

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        return self.with_children((yield from run.children(self, path, is_serial=True)))

    def flatten(self, options: Options) -> Query | None:
        """seq(… seq(…) …) → seq(… …) (spnl)."""
        return self.splice(lambda index, part: isinstance(part, Seq))

    rules = (*Join.rules, Rule("unwrap single", _unwrap_single), Rule("flatten seq", flatten))


@dataclass(frozen=True)
class Par(Join):
    """Children that run side by side; their order is kept."""

    kind: ClassVar[str] = "par"
    rules = (*Join.rules, Rule("unwrap single", _unwrap_single))

    def outputs(self) -> Sequence[Query]:
        return [output for part in self.parts for output in part.outputs()]


@dataclass(frozen=True)
class Cross(Join):
    """⋈: children whose order matters."""

    kind: ClassVar[str] = "cross"
    symbol: ClassVar[str] = "⋈"

    def flatten_seq(self, options: Options) -> Query | None:
        """⋈(… seq(…) …) → ⋈(… …), but at its end, before which a serialised query has a marker (spnl)."""
        return self.splice(lambda index, part: isinstance(part, Seq) and index < len(self.parts) - 1)

    def flatten(self, options: Options) -> Query | None:
        """⋈(… ⋈(…)) → ⋈(… …), at its end (spnl)."""
        return self.splice(lambda index, part: isinstance(part, Cross) and index == len(self.parts) - 1)

    rules = (*Join.rules, Rule("flatten seq", flatten_seq), Rule("flatten ⋈", flatten))


@dataclass(frozen=True)
class Plus(Join):
    """+: children that commute, each of which is linked as an object.

    Not taken from spnl, because it would let order go where it matters: a seq that is the first child of a + is spliced
    into it; a par of + becomes one +.
    """

    kind: ClassVar[str] = "plus"
    symbol: ClassVar[str] = "+"

    def outputs(self) -> Sequence[Query]:
        return [output for part in self.parts for output in part.outputs()]

    def flatten(self, options: Options) -> Query | None:
        """+(… +(…) …) → +(… …) (Span queries fig. 7c)."""
        return self.splice(lambda index, part: isinstance(part, Plus))

    def order(self, options: Options) -> Query | None:
        """Children in the order of their content, so that equal sets of them are equal prefixes."""
        if not options.sorts_plus:
            return None
        parts = tuple(sorted(self.parts, key=to_json))
        return Plus(parts) if parts != self.parts else None

    rules = (*Join.rules, Rule("flatten +", flatten), Rule("order +", order, Effect.ORDER))


JOINS: tuple[type[Join], ...] = (Seq, Par, Cross, Plus)
NOTHING = Seq(())


def as_input(items: Sequence[Query | str]) -> Query:
    """The item, or a ⋈ of the items."""
    return as_query(items[0]) if len(items) == 1 else Cross.of(*items)


def read_input(reader: QueryReader, value: Any, path: Path, depth: int) -> Query:
    """A query; leniently, a list of queries is a ⋈ of them."""
    if not isinstance(value, list):
        return reader.query(value, path, depth)
    items = reader.queries(value, path, depth + 1)
    return items[0] if len(items) == 1 else Cross(items, origin=path)


def leaves(query: Query, path: Path) -> Iterator[tuple[Query, Path]]:
    """What is below joins, each with its path."""
    if not isinstance(query, Join):
        yield query, path
        return
    for step, child in query.steps():
        yield from leaves(child, path + step)


def needs_running(query: Query) -> bool:
    """Whether it is anything but messages and joins of them."""
    return any(not isinstance(node, Message) for node, _ in leaves(query, ()))


def _is_empty(query: Query) -> bool:
    """Whether it is a message without text, or a join without children."""
    return not query.text if isinstance(query, Message) else isinstance(query, Join) and not query.parts
