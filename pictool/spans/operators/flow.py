"""Monad, ask, print and zip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pictool.compiler.chunking import make_chunk
from pictool.linker.spec import Spec
from pictool.spans.operators.calls import Generate
from pictool.spans.operators.joins import NOTHING, Join, Plus, Seq, as_input, leaves
from pictool.spans.operators.messages import Message, as_query
from pictool.spans.prompt import MessageSpan, span_text, spans_of
from pictool.spans.query import Over, Path, Query, rewrite
from pictool.spans.reader import QueryReader
from pictool.spans.running import QueryTask, RunningQuery


@dataclass(frozen=True)
class Monad(Over):
    """`{"monad": …}`: runs for what it leaves in the cache, and gives nothing."""

    kind: ClassVar[str] = "monad"
    symbol: ClassVar[str] = "M"
    key: ClassVar[str | None] = None

    @classmethod
    def of(cls, *items: Query | str) -> Monad:
        """Runs the item, or a ⋈ of the items, and gives nothing."""
        return cls(as_input(items))

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Monad:
        return cls(reader.query(value, path, depth))

    def to_data(self) -> dict[str, Any]:
        return {"monad": self.input.to_data()}

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        """The texts of its G¹ are compiled together."""
        spans: dict[str, list[MessageSpan]] = {}
        for node, below in leaves(self.input, (*path, "monad")):
            if isinstance(node, Generate) and node.prepares:
                found = spans_of((yield from run.evaluate(node.input, (*below, node.kind, "input"))))
                spans.setdefault(node.call.model, []).extend(found)
            else:
                yield from run.evaluate(node, below)
        policy = run.options.policy
        for model, found in spans.items() if policy.needs.objects else ():
            engine = run.engine_of(model)
            chunks = [make_chunk(engine.model, span_text(span), span.source) for span in found]
            spec = Spec(policy=policy, codec=run.options.codec, after=run.options.after)
            engine.compile(chunks, spec.objects_for(engine.model))
        return NOTHING


@dataclass(frozen=True)
class _Line(Query):
    """A node that is a text alone."""

    text: str

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Self:
        return cls(reader.text(value, path))

    def to_data(self) -> dict[str, Any]:
        return {self.kind: self.text}


@dataclass(frozen=True)
class Ask(_Line):
    """`{"ask": "…"}`: a message that the user types when the query runs."""

    kind: ClassVar[str] = "ask"

    @property
    def is_drawn(self) -> bool:
        return True

    def run(self, run: RunningQuery, path: Path) -> Query:
        return Message("user", run.hooks.ask(self.text))


@dataclass(frozen=True)
class Print(_Line):
    """`{"print": "…"}`: a message that is shown when the query runs."""

    kind: ClassVar[str] = "print"

    def run(self, run: RunningQuery, path: Path) -> Query:
        run.hooks.on_print(self.text)
        return NOTHING


@dataclass(frozen=True)
class Zip(Query):
    """`{"zip": {"first": …, "second": …}}`, or a pair: `first` before each item of `second`."""

    kind: ClassVar[str] = "zip"
    first: Query
    second: Query

    @classmethod
    def of(cls, first: Query | str, second: Query | str) -> Zip:
        """`first` before each item of `second`."""
        return cls(as_query(first), as_query(second))

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: Path, depth: int) -> Zip:
        if isinstance(value, list) and len(value) == 2:
            value = {"first": value[0], "second": value[1]}
        value = reader.fields(value, path, ("first", "second"))
        return cls(*(reader.query(value[key], (*path, key), depth) for key in ("first", "second")))

    def to_data(self) -> dict[str, Any]:
        return {"zip": {"first": self.first.to_data(), "second": self.second.to_data()}}

    def steps(self) -> Iterator[tuple[Path, Query]]:
        yield (self.kind, "first"), self.first
        yield (self.kind, "second"), self.second

    def with_children(self, children: Sequence[Query]) -> Self:
        first, second = children
        return replace(self, first=first, second=second)

    def run(self, run: RunningQuery, path: Path) -> QueryTask:
        """Items are those that are not empty; a + as `first` takes each item in (spnl)."""
        first, second = yield from run.children(self, path)
        items = rewrite(Seq((second,)))[0]
        if not isinstance(items, Join):
            items = Seq((items,))
        if isinstance(first, Plus):
            return items.with_children([Plus((*first.parts, item)) for item in items.parts])
        return items.with_children([part for item in items.parts for part in (first, item)])
