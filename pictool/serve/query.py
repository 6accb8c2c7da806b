"""Span queries over HTTP: what may be in one, and its texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pictool.linker.policies.base import Policy
from pictool.serve.errors import ApiError
from pictool.spans import query as nodes
from pictool.spans.execute import Executor, RunOptions
from pictool.spans.reading import read_query

if TYPE_CHECKING:
    from pictool.engines.base import Engine

_LOCAL = (nodes.Retrieve, nodes.Ask)


def run_query(text: str, engine: Engine, policy: Policy, codec: str) -> list[str]:
    """Run a query; the texts of its answer: one, or those of a par.

    Raises:
        ApiError: a query that reads files of the server, or asks somebody. PicError: it cannot be run.
    """
    query = read_query(text, "query", is_yaml=False)
    for node in _nodes(query):
        if isinstance(node, _LOCAL) or (isinstance(node, nodes.Fragment) and node.text is None):
            raise ApiError(400, f"query: {node.kind} is for queries that run where their files are", code="query")
    executor = Executor(lambda _: engine, RunOptions(policy, codec=codec, keeps_outputs=False))
    result = executor.run(executor.optimise(query).after).query
    parts = result.parts if isinstance(result, nodes.Par) else (result,)
    return [_text(part) for part in parts]


def _text(node: nodes.Query) -> str:
    if isinstance(node, nodes.Message):
        return node.text.strip()
    return "\n".join(filter(None, (_text(child) for _, child in node.steps()))) if isinstance(node, nodes.Join) else ""


def _nodes(node: nodes.Query) -> Iterator[nodes.Query]:
    yield node
    for _, child in node.steps():
        yield from _nodes(child)
