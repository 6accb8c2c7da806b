"""Span queries in Python: `g(plus(file("a.txt"), file("b.txt")), "Who lives there?")`. A text is a user's message."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from pictool.spans import query as nodes
from pictool.spans.query import DEFAULT_MODEL, MAX_TOKENS, TEMPERATURE, Call, Query

Item = Query | str


def user(text: str) -> nodes.Message:
    """U: a user's message."""
    return nodes.Message("user", text)


def system(text: str) -> nodes.Message:
    """S: a system message."""
    return nodes.Message("system", text)


def assistant(text: str) -> nodes.Message:
    """A: an assistant's message."""
    return nodes.Message("assistant", text)


def file(path: str | PathLike[str]) -> nodes.Fragment:
    """F: the text of a file."""
    return nodes.Fragment(fspath(path))


def fragment(text: str, source: str = "text") -> nodes.Fragment:
    """F: a fragment whose text is at hand."""
    return nodes.Fragment(source, text)


def plus(*items: Item) -> nodes.Plus:
    """+: items that commute."""
    return nodes.Plus(_queries(items))


def cross(*items: Item) -> nodes.Cross:
    """⋈: items whose order matters."""
    return nodes.Cross(_queries(items))


def seq(*items: Item) -> nodes.Seq:
    """Items that run one after the other."""
    return nodes.Seq(_queries(items))


def par(*items: Item) -> nodes.Par:
    """Items that run side by side; their order is kept."""
    return nodes.Par(_queries(items))


def g(
    *items: Item, model: str = DEFAULT_MODEL, max_tokens: int | None = MAX_TOKENS,
    temperature: float | None = TEMPERATURE, top_p: float | None = None, stop: Sequence[str] = (),
) -> nodes.Generate:  # fmt: skip
    """G: what the model generates after its input, the item or a ⋈ of the items."""
    return nodes.Generate(_one(items), Call(model, max_tokens, temperature, top_p, tuple(stop)))


def chat(
    *items: Item, model: str = DEFAULT_MODEL, max_tokens: int | None = MAX_TOKENS,
    temperature: float | None = TEMPERATURE, top_p: float | None = None, stop: Sequence[str] = (),
) -> nodes.Chat:  # fmt: skip
    """C: as `g`; the optimizer makes the ⋈ explicit."""
    return nodes.Chat(_one(items), Call(model, max_tokens, temperature, top_p, tuple(stop)))


def retrieve(
    query: Item, *sources: str | PathLike[str], k: int | None = None, chunk_tokens: int | None = None
) -> nodes.Retrieve:
    """R: the `k` fragments of files and folders that concern a query most."""
    return nodes.Retrieve(_query(query), tuple(fspath(source) for source in sources), k, chunk_tokens)


def repeat(n: int, inner: nodes.Generate) -> nodes.Repeat:
    """n outputs of one call."""
    return nodes.Repeat(inner, n)


def map_(
    *texts: str, model: str = DEFAULT_MODEL, max_tokens: int | None = MAX_TOKENS,
    temperature: float | None = TEMPERATURE, top_p: float | None = None, stop: Sequence[str] = (),
) -> nodes.Map:  # fmt: skip
    """An output for each of several users' messages."""
    return nodes.Map(Call(model, max_tokens, temperature, top_p, tuple(stop)), texts)


def zip_(first: Item, second: Item) -> nodes.Zip:
    """`first` before each item of `second`."""
    return nodes.Zip(_query(first), _query(second))


def augment(query: Item, name: str, text: str, embedding_model: str = DEFAULT_MODEL) -> nodes.Augment:
    """R of spnl: fragments of one document that concern a query."""
    return nodes.Augment(_query(query), embedding_model, name, text)


def ask(text: str) -> nodes.Ask:
    """A message that the user types when the query runs."""
    return nodes.Ask(text)


def print_(text: str) -> nodes.Print:
    """A message that is shown when the query runs."""
    return nodes.Print(text)


def monad(*items: Item) -> nodes.Monad:
    """Runs, and gives nothing."""
    return nodes.Monad(_one(items))


def _queries(items: Sequence[Item]) -> tuple[Query, ...]:
    return tuple(_query(item) for item in items)


def _query(item: Item) -> Query:
    return user(item) if isinstance(item, str) else item


def _one(items: Sequence[Item]) -> Query:
    queries = _queries(items)
    return queries[0] if len(queries) == 1 else nodes.Cross(queries)
