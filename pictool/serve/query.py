"""Span queries over HTTP: what may be in one, how it runs, and its texts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from pictool.linker.policies.base import Policy
from pictool.serve.errors import ApiError
from pictool.spans import query as nodes
from pictool.spans.execute import STEP_NODES, AnswerSteps, Executor, RunOptions
from pictool.spans.reading import read_query

if TYPE_CHECKING:
    from pictool.engines.base import Engine

MAX_CALLS = 50_000  # of one query
_LOCAL = (nodes.Retrieve, nodes.Ask)


class _Pieces:
    """Gives way after every `STEP_NODES` nodes; called with each."""

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._count, self._give_way = 0, give_way

    def __call__(self) -> None:
        self._count += 1
        if self._count % STEP_NODES == 0:
            self._give_way()


class ServedQuery:
    """A query that was read, and optimised as the policy allows.

    Args:
        give_way: called between two pieces of the work of reading it; what it raises ends that.

    Raises:
        ApiError: a query that reads files of the server, asks somebody, or has too many calls. InputError: no query.
    """

    def __init__(
        self, text: str, engine: Engine, policy: Policy, codec: str, give_way: Callable[[], None] = nodes.no_wait
    ) -> None:
        on_node = _Pieces(give_way)
        query = read_query(text, "query", is_yaml=False, on_node=on_node)
        num_calls = 0
        for _, node in nodes.nodes(query):
            on_node()
            if isinstance(node, _LOCAL) or (isinstance(node, nodes.Fragment) and node.text is None):
                raise ApiError(400, f"query: {node.kind} is for queries that run where their files are", code="query")
            num_calls += _num_calls(node)
        if num_calls > MAX_CALLS:
            raise ApiError(400, f"query: has {num_calls} calls; {MAX_CALLS} at most, so split it", code="query")
        self._executor = Executor(lambda _: engine, RunOptions(policy, codec=codec, keeps_outputs=False))
        self._query = self._executor.optimise(query, on_node).after

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


def _num_calls(node: nodes.Query) -> int:
    """Calls of a node itself; those of a repeat less the one that is below it."""
    match node:
        case nodes.Generate() | nodes.Chat():
            return 1
        case nodes.Repeat():
            return node.n - 1
        case nodes.Map():
            return len(node.inputs)
    return 0
