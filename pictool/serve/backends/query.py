"""Span queries over HTTP: what may be in one, how it runs, and its texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pictool.runtime import turns
from pictool.serve.errors import ApiError, model_not_found
from pictool.spans import query as nodes
from pictool.spans.execute import Executor
from pictool.spans.operators.calls import ModelCall
from pictool.spans.operators.flow import Ask
from pictool.spans.operators.joins import Join, Par
from pictool.spans.operators.messages import Message
from pictool.spans.operators.retrieve import Fragment, Retrieve
from pictool.spans.reading import read_query
from pictool.spans.running import Hooks, RunOptions

if TYPE_CHECKING:
    from pictool.engines.base import Engine

MAX_CALLS = 50_000  # of one query
STEP_NODES = 256  # that are read, optimised or evaluated in one step, at most
ANY_MODEL = ("any", nodes.DEFAULT_MODEL)  # of calls that take the one that is served
_LOCAL = (Retrieve, Ask)


class ServedQuery:
    """A query that was read, and optimised as the policy allows.

    Args:
        engine: runs its calls. side_by_side: those that are ready at once reach it together.
        names: those of the engine's model, the first as clients know it.

    Raises:
        ApiError: a query that reads files of the server, asks somebody, names another model, or has too many calls.
        InputError: no query.
    """

    def __init__(self, text: str, engine: Engine, names: tuple[str, str], options: RunOptions) -> None:
        each = every(STEP_NODES, partial(turns.checkpoint, "turn"))
        query = read_query(text, "query", is_yaml=False, checkpoint=each)
        num_calls = 0
        for _, node in nodes.nodes(query):
            each()
            if isinstance(node, _LOCAL) or (isinstance(node, Fragment) and node.text is None):
                raise ApiError(
                    400, f"query: {node.kind} works only where the files are; run it with pic query", code="query"
                )
            if isinstance(node, ModelCall):
                _require_served(node.call.model, names)
            num_calls += node.num_calls
        if num_calls > MAX_CALLS:
            raise ApiError(
                400, f"query: has {num_calls} calls, but at most {MAX_CALLS} are allowed; split it", code="query"
            )
        self._executor = Executor(lambda _: engine, options, Hooks(checkpoint=each))
        self._query = self._executor.optimise(query).after

    def run(self) -> list[str]:
        """Run it; the texts of its answer: one, or those of a par. Raises PicError: it cannot be run."""
        result = self._executor.run(self._query).query
        return [_text(part) for part in (result.parts if isinstance(result, Par) else (result,))]


def every(count: int, call: Callable[[], None]) -> Callable[[], None]:
    """Calls `call` every `count` times that it is called itself."""
    calls = itertools.count(1)

    def counted() -> None:
        if next(calls) % count == 0:
            call()

    return counted


def _require_served(model: str, names: tuple[str, str]) -> None:
    """Refuse a call of another model. Raises ApiError 404."""
    if not {model, nodes.model_name(model)} & {*names, *ANY_MODEL}:
        raise model_not_found(model, names[0])


def _text(node: nodes.Query) -> str:
    if isinstance(node, Message):
        return node.text.strip()
    return "\n".join(filter(None, (_text(child) for _, child in node.steps()))) if isinstance(node, Join) else ""
