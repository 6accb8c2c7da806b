"""Span queries over HTTP: what may be in one, how it runs, and its texts."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from pictool.linker.policies.base import Policy
from pictool.serve.errors import ApiError
from pictool.spans import query as nodes
from pictool.spans.execute import AnswerSteps, Executor, RunOptions
from pictool.spans.reading import read_query

if TYPE_CHECKING:
    from pictool.engines.base import Engine

_LOCAL = (nodes.Retrieve, nodes.Ask)


class ServedQuery:
    """A query that was read, and optimised as the policy allows.

    Raises:
        ApiError: a query that reads files of the server, or asks somebody. InputError: no query.
    """

    def __init__(self, text: str, engine: Engine, policy: Policy, codec: str) -> None:
        query = read_query(text, "query", is_yaml=False)
        for node in _nodes(query):
            if isinstance(node, _LOCAL) or (isinstance(node, nodes.Fragment) and node.text is None):
                raise ApiError(400, f"query: {node.kind} is for queries that run where their files are", code="query")
        self._executor = Executor(lambda _: engine, RunOptions(policy, codec=codec, keeps_outputs=False))
        self._query = self._executor.optimise(query).after

    def run(self) -> list[str]:
        """Run it on its engine; the texts of its answer: one, or those of a par. Raises PicError: it cannot be run."""
        return _texts(self._executor.run(self._query).query)

    def steps(self, answer: AnswerSteps) -> Generator[bool | None, None, list[str]]:
        """As `run`, in steps; `answer` answers one call. Yields True between two calls."""
        return _texts((yield from self._executor.steps(self._query, answer)).query)


def _texts(result: nodes.Query) -> list[str]:
    return [_text(part) for part in (result.parts if isinstance(result, nodes.Par) else (result,))]


def _text(node: nodes.Query) -> str:
    if isinstance(node, nodes.Message):
        return node.text.strip()
    return "\n".join(filter(None, (_text(child) for _, child in node.steps()))) if isinstance(node, nodes.Join) else ""


def _nodes(node: nodes.Query) -> Iterator[nodes.Query]:
    yield node
    for _, child in node.steps():
        yield from _nodes(child)
