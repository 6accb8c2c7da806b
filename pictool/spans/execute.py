"""Running queries on an engine: every call from the bottom up; its answer is what the outer call reads.

Calls that are ready at once, of one query or of several, reach the engine together: it runs them side by side if it can
(`Engine.answer_all`), or links them in batches from its pool (`Engine.link_all`).

The children of a + are linked as objects under the policy. A node that fails names its path, and what was done before
is kept. Sampling is seeded by the path in the query as it was written, so that a query gives the same tree again,
however it was optimised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

from pictool.core import Sampling
from pictool.engines.base import outcome_of
from pictool.errors import PicError
from pictool.linker.spec import Spec
from pictool.spans.generated import answer_all_and_keep, answer_and_keep, keep_output
from pictool.spans.operators.joins import needs_running
from pictool.spans.operators.retrieve import Augment, Fragment, Retrieval, Retrieve
from pictool.spans.optimise import OptimisedQuery, optimise
from pictool.spans.prompt import make_prompt, seam_after
from pictool.spans.query import DEFAULT_MODEL, Options, Path, Query, text_of, with_origins
from pictool.spans.running import (
    CallRecord,
    CallRequest,
    Hooks,
    QueryBudget,
    QueryError,
    Result,
    RunningQuery,
    RunOptions,
    failing,
    node_seed,
)
from pictool.spans.tasks import run, together

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine

__all__ = ["Executor", "Hooks", "QueryBudget", "RunOptions"]
_T = TypeVar("_T")


class Executor:
    """Runs queries on engines, which `engine_of` gives by the model names of calls."""

    def __init__(
        self, engine_of: Callable[[str], Engine], options: RunOptions = RunOptions(), hooks: Hooks = Hooks()
    ) -> None:
        self.engine_of, self.options, self._hooks = engine_of, options, hooks
        self._retrieval = Retrieval(
            options.base, lambda: engine_of(DEFAULT_MODEL).model, options.retriever, hooks.on_skip
        )

    def optimise(self, query: Query) -> OptimisedQuery:
        """A query as it is to be run. Reads the files that it retrieves from; raises InputError if it cannot."""
        own, checkpoint = self.options, self._hooks.checkpoint
        query = with_origins(query, checkpoint=checkpoint)
        if not own.has_rules:
            return OptimisedQuery(query, query, ())
        options = Options(own.sorts_plus, arity=own.arity, retrieve=cache(self._retrieve))
        return optimise(query, options, checkpoint=checkpoint)

    def run(self, query: Query) -> Result:
        """Run a query as it is.

        Raises:
            QueryError: the node that failed, why, and what was done before.
        """
        (outcome,) = self.run_all([query])
        if isinstance(outcome, QueryError):
            raise outcome
        return outcome

    def run_all(
        self, queries: Sequence[Query],
        on_end: Callable[[int, Result | QueryError], None] = lambda index, outcome: None,
        seeds: Sequence[int] | None = None,
    ) -> list[Result | QueryError]:  # fmt: skip
        """Run several queries, each as `run` does; calls of all that are ready at once reach the engine together.

        Args:
            on_end: called with the index of a query and its outcome as soon as it has ended.
            seeds: of each query; None: that of the options.
        """
        seeds = seeds or [self.options.seed] * len(queries)
        runs = [
            RunningQuery(query, self.options, self._hooks, self.engine_of, self._retrieval.find, seed)
            for query, seed in zip(queries, seeds, strict=True)
        ]
        return run(together([each.task(partial(on_end, index)) for index, each in enumerate(runs)]), self._perform)

    def _retrieve(self, node: Retrieve | Augment) -> Sequence[Fragment] | None:
        """What the optimizer puts in place of an R."""
        return None if needs_running(node.input) else self._retrieval.find(node, text_of(node.input))

    def _perform(self, batch: Sequence[CallRequest]) -> list[CallRecord | QueryError]:
        """Run calls that are ready, of one query or of several, side by side where the engine can."""
        is_serial = self.options.is_serial or len(batch) == 1
        engines = dict.fromkeys(request.engine for request in batch)
        groups = [[request] for request in batch] if is_serial else [
            [request for request in batch if request.engine is engine] for engine in engines
        ]  # fmt: skip
        outcomes: dict[CallRequest, CallRecord | QueryError] = {}
        failed: dict[RunningQuery, QueryError] = {}
        for group in groups:
            outcomes |= _perform_group(group, self.options, failed if is_serial else {})
        return [outcomes[request] for request in batch]


def _perform_group(
    group: Sequence[CallRequest], options: RunOptions, failed: dict[RunningQuery, QueryError]
) -> dict[CallRequest, CallRecord | QueryError]:
    """Run calls on one engine. Where one follows from those before it, one that fails ends those of its query after it.

    Args:
        failed: the first failure of each run in which one ended the others; it grows.
    """
    started = time.monotonic()
    ends_others = options.is_serial or options.links_outputs
    outcomes: dict[CallRequest, CallRecord | QueryError] = {}
    specs: dict[CallRequest, Spec] = {}
    refused = dict(failed)  # calls before one that is refused run
    for request in group:
        spec = refused[request.run] if request.run in refused else _tried(request.at, partial(_spec, request))
        if isinstance(spec, Spec):
            specs[request] = spec
            continue
        outcomes[request] = spec
        if ends_others:
            refused[request.run] = spec
    ready, waiting = list(specs), dict(specs)
    for number, answer in _answers(specs, options.links_outputs) if specs else ():
        request = ready[number]
        del waiting[request]
        record = partial(_record, request, answer, started)
        outcome = failed[request.run] if request.run in failed else _tried(request.at, record)
        outcomes[request] = outcome
        del answer, record  # its image goes back to the pool
        if ends_others and isinstance(outcome, QueryError):
            failed[request.run] = outcome
        if failed and all(later.run in failed for later in waiting):
            break
    outcomes |= {request: failed[request.run] for request in waiting}
    failed |= refused
    return outcomes


def _answers(specs: Mapping[CallRequest, Spec], keeps: bool) -> Iterable[tuple[int, Answer | PicError]]:
    """The answers of calls on one engine, by their numbers, with their KV where that is kept; as they end."""
    requests = list(specs)
    engine = requests[0].engine
    if len(requests) > 1:
        answer_all = partial(answer_all_and_keep, engine) if keeps else engine.answer_all
        return answer_all(list(specs.values()))
    (request,) = requests
    answer = partial(answer_and_keep, engine) if keeps else engine.answer
    on_text = request.run.hooks.on_text if request.node is request.run.query else None
    return [(0, outcome_of(partial(answer, specs[request], on_text=on_text)))]


def _spec(request: CallRequest) -> Spec:
    left = request.run.tokens_left(request.at)
    options, call, engine = request.run.options, request.node.call, request.engine
    if options.links_outputs:
        engine.require("outputs", "to link outputs as they were generated")
    prompt = make_prompt(engine.model, request.over)
    limit = call.max_tokens or options.max_new_tokens
    top_p = options.top_p if call.top_p is None else call.top_p
    sampling = Sampling(call.temperature or 0.0, top_p, node_seed(request.run.seed, request.at), call.stop)
    return replace(
        Spec.raw(prompt.documents, prompt.tail, options.policy, prompt.head),
        max_new_tokens=limit if left is None else min(limit, left), sampling=sampling, codec=options.codec,
        after=options.after,
    )  # fmt: skip


def _record(request: CallRequest, answer: Answer | PicError, started: float) -> CallRecord:
    """The record of a call that ran. Its output's KV is kept, if an outer call can link it. Raises what failed."""
    if isinstance(answer, PicError):
        raise answer
    own, engine = request.run, request.engine
    own.tokens += len(answer.generated.tokens)
    own.hooks.on_answer(request.path, answer)
    done = CallRecord.of(request.path, answer)
    if own.options.links_outputs and request.path:
        seam = seam_after(done.text)
        tokens = engine.model.encode(seam)
        key = keep_output(engine.store, answer, done.tokens, tokens, done.text + seam, own.options.codec)
        done = replace(done, object=key or "")
    done = replace(done, seconds=time.monotonic() - started)
    own.finish(done)
    return done


def _tried(path: Path, act: Callable[[], _T]) -> _T | QueryError:
    """What a function returns, or why it failed."""
    try:
        with failing(path):
            return act()
    except QueryError as error:
        return error
