"""Running a query on an engine: every call from the bottom up; its answer is what the outer call reads.

Calls that are ready at once, of one query or of several, reach the engine together: it runs them side by side if it can
(`Engine.answer_all`), or links them in batches from its pool (`Engine.link_all`).

The children of a + are linked as objects under the policy. A node that fails names its path, and what was done before
is kept. Sampling is seeded by the path in the query as it was written, so that a query gives the same tree again,
however it was optimised.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from pictool.compiler.chunking import make_chunk, read_text
from pictool.compiler.compile import CODEC
from pictool.core import Sampling
from pictool.errors import InputError, PicError
from pictool.linker.policies import DEFAULT, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import MAX_NEW_TOKENS, Spec
from pictool.spans import query as nodes
from pictool.spans.generated import answer_all_and_keep, answer_and_keep, keep_output
from pictool.spans.optimise import OptimisedQuery, optimise
from pictool.spans.outcome import CallRecord, QueryError, Result
from pictool.spans.prompt import FileText, MessageSpan, Output, make_prompt, seam_after, span_text, spans_of
from pictool.spans.query import (
    DEFAULT_MODEL,
    Checkpoint,
    Generate,
    Join,
    Message,
    Par,
    Path,
    Plus,
    Query,
    Seq,
    no_checkpoint,
    path_text,
    with_origins,
)
from pictool.spans.retrieve import FileFragments, Retriever, bm25, find_fragments, query_text
from pictool.spans.rules import SIMPLIFICATIONS, Options, has_calls, needs_running
from pictool.spans.tasks import Task, one_by_one, run, together

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine

NOTHING = Seq(())
_T = TypeVar("_T")


@dataclass(frozen=True)
class QueryBudget:
    """What a query may use. `tokens`: generated in all; `seconds`: none begins later. None: no limit."""

    tokens: int | None = None
    seconds: float | None = None


def _quiet(*_: Any) -> None:
    pass


def _nobody(text: str) -> str:
    raise InputError(f"asks {text!r}, but there is nobody to answer; run it from a terminal")


@dataclass(frozen=True)
class Hooks:
    """What is called while a query runs.

    Fields:
        on_done: with each call that has ended.
        on_answer: with a call's path and its answer, which holds the KV; it is forgotten afterwards.
        on_text: with each piece of the last call's text, if the query is one call.
        on_print: with the text of each print. ask: with a question; what the user types.
        on_skip: with why a file of a folder is not retrieved from.
        checkpoint: at every node that is optimised or evaluated, and before every call.
    """

    on_done: Callable[[CallRecord], None] = _quiet
    on_answer: Callable[[Path, Answer], None] = _quiet
    on_text: Callable[[str], None] | None = None
    on_print: Callable[[str], None] = _quiet
    ask: Callable[[str], str] = _nobody
    on_skip: Callable[[InputError], None] = _quiet
    checkpoint: Checkpoint = no_checkpoint


@dataclass(frozen=True)
class RunOptions:
    """How queries are run.

    Fields:
        policy: how the spans of a + are linked.
        max_new_tokens: of calls that say 0 or nothing. top_p: of those that name none. seed: each call has its own.
        codec: how the KV of spans is kept.
        base: the folder that files are relative to.
        arity: judges of more candidates become trees of such judges; None: none do.
        sorts_plus: children of a + are put in the order of their content, so that equal sets are equal prefixes.
        has_rules: whether the optimizer changes a query at all.
        keeps_outputs: an outer call reads an output's tokens as they were generated, and links their KV as it was
            computed then, which not every engine can; else its text is read and compiled as any other.
        retriever: chooses the fragments of an R.
        side_by_side: calls that are ready at once reach the engine together. Else they run one after the other, and
            what is below a call is evaluated just before it, so that little of a large query is in memory.
    """

    policy: Policy = field(default_factory=lambda: make_policy(DEFAULT))
    max_new_tokens: int = MAX_NEW_TOKENS
    top_p: float = 1.0
    seed: int = 0
    codec: str = CODEC
    base: FilePath = FilePath()
    arity: int | None = None
    sorts_plus: bool = False
    has_rules: bool = True
    budget: QueryBudget = QueryBudget()
    keeps_outputs: bool = True
    retriever: Retriever = bm25
    side_by_side: bool = True


class Executor:
    """Runs queries on engines, which `engine_of` gives by the model names of calls."""

    def __init__(
        self, engine_of: Callable[[str], Engine], options: RunOptions = RunOptions(), hooks: Hooks = Hooks()
    ) -> None:
        self.engine_of, self.options, self._hooks = engine_of, options, hooks
        self._files = FileFragments()

    def optimise(self, query: Query) -> OptimisedQuery:
        """A query as it is to be run. Reads the files that it retrieves from; raises InputError if it cannot."""
        own, checkpoint = self.options, self._hooks.checkpoint
        query = with_origins(query, checkpoint=checkpoint)
        if not own.has_rules:
            return OptimisedQuery(query, query, ())
        options = Options(own.sorts_plus, arity=own.arity, retrieve=cache(self._retrieve_flat))
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
        self, queries: Sequence[Query], on_end: Callable[[int, Result | QueryError], None] = _quiet,
        seeds: Sequence[int] | None = None,
    ) -> list[Result | QueryError]:  # fmt: skip
        """Run several queries, each as `run` does; calls of all that are ready at once reach the engine together.

        Args:
            on_end: called with the index of a query and its outcome as soon as it has ended.
            seeds: of each query; None: that of the options.
        """
        seeds = seeds or [self.options.seed] * len(queries)
        runs = [_Run(self, query, self._hooks, seed) for query, seed in zip(queries, seeds, strict=True)]
        return run(together([each.task(partial(on_end, index)) for index, each in enumerate(runs)]), _perform)

    def retrieve(self, node: nodes.Retrieve | nodes.Augment, query: str) -> list[nodes.Fragment]:
        """The fragments of an R for a query's text. Raises InputError for files that cannot be read."""
        options = self.options
        model = self.engine_of(DEFAULT_MODEL).model
        return find_fragments(node, query, options.base, model, options.retriever, self._files, self._hooks.on_skip)

    def _retrieve_flat(self, node: nodes.Retrieve | nodes.Augment) -> Sequence[nodes.Fragment] | None:
        return None if needs_running(node.input) else self.retrieve(node, query_text(node.input))


@dataclass(frozen=True, eq=False)
class _CallRequest:
    """A call that is ready: all below it has run. `at` is its place in the query as it was written."""

    run: _Run
    engine: Engine
    over: Query
    node: Generate | nodes.Chat
    path: Path
    at: Path


_Task = Task["_CallRequest", "CallRecord | PicError", _T]


class _Run:
    """One run of one query. `done` grows."""

    def __init__(self, executor: Executor, query: Query, hooks: Hooks, seed: int) -> None:
        self._executor, self._options, self._query, self._hooks = executor, executor.options, query, hooks
        self._seed = seed
        self.done: list[CallRecord] = []
        self._known: dict[Query, CallRecord] = {}
        self._awaited: set[Query] = set()  # calls whose answers are to come, and others wait for
        self._started, self._tokens = time.monotonic(), 0

    def task(self, on_end: Callable[[Result | QueryError], None]) -> _Task[Result | QueryError]:
        """The whole run: what the query gives, messages and joins of them; or why it gives nothing."""
        outcome: Result | QueryError
        try:
            outcome = Result((yield from self._evaluate(self._query, ())), tuple(self.done))
        except QueryError as error:
            error.done = tuple(self.done)
            outcome = error
        on_end(outcome)
        return outcome

    def _evaluate(self, node: Query, path: Path) -> _Task[Query]:
        self._hooks.checkpoint()
        match node:
            case Message():
                return node
            case nodes.Fragment():
                return self._fragment(node, path)
            case nodes.Ask(text):
                with _failing(_written(node, path)):
                    return Message("user", self._hooks.ask(text))
            case nodes.Print(text):
                self._hooks.on_print(text)
                return NOTHING
            case Join():
                return node.with_children((yield from self._below(node, path)))
            case Generate() | nodes.Chat():
                return (yield from self._call(node, path))
            case nodes.Repeat():
                return (yield from self._repeat(node, path))
            case nodes.Map():
                tasks = (self._call(call, (*path, node.kind, index)) for index, call in enumerate(node.calls()))
                return Par(tuple((yield from self._side_by_side(tasks))))
            case nodes.Monad():
                yield from self._prepare(node, path)
                return NOTHING
            case nodes.Zip():
                return _zipped(*(yield from self._below(node, path)))
            case nodes.Retrieve() | nodes.Augment():
                return (yield from self._retrieve(node, path))
        raise AssertionError(f"{node.kind} cannot be run")

    def _below(self, node: Query, path: Path) -> _Task[list[Query]]:
        """What the children give. Those of a seq run one after the other, all others side by side."""
        tasks = (self._evaluate(child, path + step) for step, child in node.steps())
        return (yield from one_by_one(tasks) if isinstance(node, Seq) else self._side_by_side(tasks))

    def _side_by_side(self, tasks: Iterable[_Task[_T]]) -> _Task[list[_T]]:
        """What tasks give that do not depend on one another."""
        return together(list(tasks)) if self._options.side_by_side else one_by_one(tasks)

    def _fragment(self, node: nodes.Fragment, path: Path) -> Message:
        if node.text is not None:
            return FileText.of(node)
        with _failing(_written(node, path)):
            file = self._options.base / node.source
            return FileText.of(nodes.Fragment(node.source, read_text(file)))

    def _retrieve(self, node: nodes.Retrieve | nodes.Augment, path: Path) -> _Task[Query]:
        (found,) = yield from self._below(node, path)
        with _failing(_written(node, path)):
            fragments = self._executor.retrieve(node, query_text(found))
        return Plus(tuple(FileText.of(fragment) for fragment in fragments))

    def _prepare(self, node: nodes.Monad, path: Path) -> _Task[None]:
        """Run for what it leaves in the store: the texts of its G¹ are compiled together."""
        texts: dict[str, list[MessageSpan]] = {}
        for call, below in _leaves(node.input, (*path, "monad")):
            if isinstance(call, Generate) and call.call.max_tokens == 1 and not has_calls(call.input):
                found = spans_of((yield from self._evaluate(call.input, (*below, "g", "input"))))
                texts.setdefault(call.call.model, []).extend(found)
            else:
                yield from self._evaluate(call, below)
        if not self._options.policy.needs.objects:
            return
        spec = Spec(policy=self._options.policy, codec=self._options.codec)
        for model, spans in texts.items():
            with _failing(_written(node, path)):
                engine = self._executor.engine_of(model)
                chunks = [make_chunk(engine.model, span_text(span), span.source) for span in spans]
                engine.compile(chunks, spec.objects_for(engine.model))

    def _repeat(self, node: nodes.Repeat, path: Path) -> _Task[Query]:
        """The outputs of one call, whose input is run once."""
        below = (*path, "repeat")
        if not node.n or self._is_known(node.input):
            over = node.input.input
        else:
            over = yield from self._evaluate(node.input.input, (*below, node.input.kind, "input"))
        paths = [(*below, index) for index in range(node.n)]
        tasks = (
            self._ask(node.input, path, _written(node.input, path, index), over) for index, path in enumerate(paths)
        )
        return Par(tuple((yield from self._side_by_side(tasks))))

    def _call(self, node: Generate | nodes.Chat, path: Path) -> _Task[Output]:
        """The output of one call."""
        over: Query = node.input
        if not self._is_known(node):
            over = yield from self._evaluate(node.input, (*path, node.kind, "input"))
        return (yield from self._ask(node, path, _written(node, path), over))

    def _is_known(self, node: Query) -> bool:
        """Whether an equal call gives, or is about to give, this call's answer."""
        return not node.varies and (node in self._known or node in self._awaited)

    def _ask(self, node: Generate | nodes.Chat, path: Path, at: Path, over: Query) -> _Task[Output]:
        """The output of a call over what is below it; of an equal one before, if there is one."""
        self._hooks.checkpoint()
        while node in self._awaited:
            yield ()
        if not node.varies and node in self._known:
            shared = replace(self._known[node], path=path, is_shared=True, seconds=0.0)
            self._finish(shared)
            return self._output(shared)
        with _failing(at):
            engine = self._executor.engine_of(node.call.model)
            request = _CallRequest(self, engine, over, node, path, at)
        if not node.varies:
            self._awaited.add(node)
        try:
            (outcome,) = yield (request,)
        finally:
            self._awaited.discard(node)
        if isinstance(outcome, PicError):
            raise outcome
        if not node.varies:
            self._known[node] = outcome
        return self._output(outcome)

    @property
    def keeps(self) -> bool:
        """Whether outputs are kept as objects."""
        return self._options.keeps_outputs and self._options.policy.needs.objects

    @property
    def is_serial(self) -> bool:
        """Whether its calls run one after the other, as where the next one depends on what is left of a budget."""
        budget = self._options.budget
        return (
            not self._options.side_by_side or budget.tokens is not None or (self.keeps and budget.seconds is not None)
        )

    def begin(self, request: _CallRequest) -> Spec | QueryError:
        """What the engine is to answer, or why the call cannot begin."""
        return _tried(request.at, partial(self._spec, request))

    def answer(self, request: _CallRequest) -> CallRecord | QueryError:
        """Run one call."""
        engine, started = request.engine, time.monotonic()
        on_text = self._hooks.on_text if request.node is self._query else None
        spec = self.begin(request)
        if isinstance(spec, QueryError):
            return spec
        act = partial(answer_and_keep, engine) if self.keeps else engine.answer
        return self.record(request, _tried(request.at, lambda: act(spec, on_text=on_text)), started)

    def record(self, request: _CallRequest, answer: Answer | PicError, started: float) -> CallRecord | QueryError:
        """The record of a call that ran, or why it failed. Its output's KV is kept, if an outer call can link it."""
        if isinstance(answer, PicError):
            return answer if isinstance(answer, QueryError) else QueryError(request.at, str(answer))
        return _tried(request.at, lambda: self._ended(request, answer, started))

    def _ended(self, request: _CallRequest, answer: Answer, started: float) -> CallRecord:
        self._tokens += len(answer.generated.tokens)
        self._hooks.on_answer(request.path, answer)
        done = CallRecord.of(request.path, answer)
        if self.keeps and request.path:
            engine, text = request.engine, done.text + seam_after(done.text)
            seam = engine.model.encode(seam_after(done.text))
            key = keep_output(engine.store, answer, done.tokens, seam, text, self._options.codec)
            done = replace(done, object=key or "")
        done = replace(done, seconds=time.monotonic() - started)
        self._finish(done)
        return done

    def _finish(self, done: CallRecord) -> None:
        self.done.append(done)
        self._hooks.on_done(done)

    def _spec(self, request: _CallRequest) -> Spec:
        self._require_budget(request.at)
        if self.keeps:
            request.engine.require("outputs", "to link outputs as they were generated")
        options, call = self._options, request.node.call
        prompt = make_prompt(request.engine.model, request.over)
        limit = call.max_tokens or options.max_new_tokens
        if options.budget.tokens is not None:
            limit = min(limit, options.budget.tokens - self._tokens)
        top_p = options.top_p if call.top_p is None else call.top_p
        sampling = Sampling(call.temperature or 0.0, top_p, node_seed(self._seed, request.at), call.stop)
        spec = Spec.raw(prompt.documents, prompt.tail, options.policy, prompt.head)
        return replace(spec, max_new_tokens=limit, sampling=sampling, codec=options.codec)

    def _output(self, done: CallRecord) -> Output:
        tokens = done.tokens if self._options.keeps_outputs else ()
        return Output("assistant", done.text, tokens, path_text(done.path), done.object)

    def _require_budget(self, at: Path) -> None:
        budget = self._options.budget
        if budget.tokens is not None and self._tokens >= budget.tokens:
            raise QueryError(at, f"the budget of {budget.tokens} tokens is used up; allow more")
        if budget.seconds is not None and time.monotonic() - self._started >= budget.seconds:
            raise QueryError(at, f"the budget of {budget.seconds:g} s is used up; allow more")


def _perform(batch: Sequence[_CallRequest]) -> list[CallRecord | QueryError]:
    """Run calls that are ready, of one query or of several, side by side where the engine can."""
    outcomes: dict[int, CallRecord | QueryError] = {}
    if len(batch) == 1 or any(request.run.is_serial for request in batch):
        failed: dict[_Run, QueryError] = {}
        for index, request in enumerate(batch):
            outcome = failed.get(request.run) or request.run.answer(request)
            outcomes[index] = outcome
            if isinstance(outcome, QueryError):
                failed[request.run] = outcome
    else:
        for engine in dict.fromkeys(request.engine for request in batch):
            indices = [index for index, request in enumerate(batch) if request.engine is engine]
            outcomes |= zip(indices, _perform_together(engine, [batch[index] for index in indices]), strict=True)
    return [outcomes[index] for index in range(len(batch))]


def _perform_together(engine: Engine, batch: Sequence[_CallRequest]) -> list[CallRecord | QueryError]:
    """Run calls on one engine. Where outputs are kept, one that fails ends those of its query that come after it."""
    started = time.monotonic()
    keeps = batch[0].run.keeps
    ended: dict[int, CallRecord | QueryError] = {}
    failed: dict[_Run, QueryError] = {}
    begun: dict[int, Spec] = {}
    for index, request in enumerate(batch):
        spec = failed.get(request.run) or request.run.begin(request)
        if isinstance(spec, Spec):
            begun[index] = spec
            continue
        ended[index] = spec
        if keeps:
            failed[request.run] = spec
    ready, specs = list(begun), list(begun.values())
    if not specs:
        return [ended[index] for index in range(len(batch))]
    failed = {}  # those before such a call run
    for number, answer in answer_all_and_keep(engine, specs) if keeps else engine.answer_all(specs):
        index, request = ready[number], batch[ready[number]]
        outcome = failed.get(request.run) or request.run.record(request, answer, started)
        del answer  # its image goes back to the pool
        ended[index] = outcome
        if keeps and isinstance(outcome, QueryError):
            failed[request.run] = outcome
        if failed and all(batch[later].run in failed for later in ready[number + 1 :]):
            break
    return [ended.get(index) or failed[request.run] for index, request in enumerate(batch)]


@contextmanager
def _failing(path: Path) -> Iterator[None]:
    """Give errors the path of the node that they belong to."""
    try:
        yield
    except QueryError:
        raise
    except PicError as error:
        raise QueryError(path, str(error)) from error


def _tried(path: Path, act: Callable[[], _T]) -> _T | QueryError:
    """What a function returns, or why it failed."""
    try:
        with _failing(path):
            return act()
    except QueryError as error:
        return error


def _leaves(node: Query, path: Path) -> Iterator[tuple[Query, Path]]:
    """What is below joins, each with its path."""
    if not isinstance(node, Join):
        yield node, path
        return
    for step, child in node.steps():
        yield from _leaves(child, path + step)


def _written(node: Query, path: Path, *index: str | int) -> Path:
    """The path in the query as it was written, if it is known, by which messages and seeds name a node.

    Args:
        path: of the node in the tree that runs. index: of the call, in a repeat.
    """
    return path if node.origin is None else (*node.origin, *index)


def node_seed(seed: int, path: Path) -> int:
    """The seed of the call at a path: 64 bits of a hash of both."""
    digest = hashlib.sha256(repr((seed, path)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _zipped(first: Query, second: Query) -> Query:
    """`first` before each item of `second` that is not empty; a + as `first` takes each item in (spnl)."""
    second = optimise(Seq((second,)), rules=SIMPLIFICATIONS).after
    if not isinstance(second, Join):
        second = Seq((second,))
    if isinstance(first, Plus):
        return second.with_children([Plus((*first.parts, item)) for item in second.parts])
    return second.with_children([part for item in second.parts for part in (first, item)])
