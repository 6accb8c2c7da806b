"""One run of one query, as its operators see it: what is below a node, calls, and who answers them.

A call that is ready is yielded as a `CallRequest`; its outcome is sent back.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from pictool.compiler.compile import CODEC
from pictool.compiler.contexts import PREVIOUS
from pictool.errors import InputError, PicError
from pictool.linker.policies import DEFAULT, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import MAX_NEW_TOKENS
from pictool.spans.operators.messages import Output
from pictool.spans.query import Checkpoint, Path, Query, no_checkpoint, path_text, text_of
from pictool.spans.tasks import Task, one_by_one, together

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine

# Called with a query's text, the fragments and k: the fragments to take, at most k, the best first.
Retriever = Callable[[str, Sequence[Any], int], Sequence[Any]]
_T = TypeVar("_T")


class QueryError(PicError):
    """A node that failed: its path and why. `done` is what was done until then."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path_text(path)}: {problem}")
        self.path = path
        self.done: tuple[CallRecord, ...] = ()


@dataclass(frozen=True)
class CallRecord:
    """What one call did.

    Fields:
        text, tokens: what it generated; without the end token.
        is_shared: an equal call had been run, whose answer this is.
        own: the answer's report.
        spans: `[start, end)` of the head, each document and the tail in its prompt.
        object: the key of its generated object; empty if there is none.
        is_exact: whether it is what full recompute of its prompt gives: nothing was reused but prefixes, or every row
            of the context was computed.
    """

    path: Path
    text: str
    tokens: tuple[int, ...]
    own: Mapping[str, Any]
    spans: tuple[tuple[int, int], ...]
    seconds: float = 0.0
    is_shared: bool = False
    object: str = ""
    is_exact: bool = True

    @classmethod
    def of(cls, path: Path, answer: Answer) -> CallRecord:
        """The record of an answer. It holds no KV."""
        model, generated, layout = answer.loaded, answer.generated, answer.link.layout
        tokens = generated.tokens
        if tokens and tokens[-1] in model.eos_ids:
            tokens = tokens[:-1]
        if str(model.tokenizer.decode(list(tokens))) != generated.text:  # a stop string, or special tokens within
            tokens = model.encode(generated.text)
        spans = (layout.head, *layout.chunks, layout.tail)
        reuses = answer.link.policy.needs.objects and bool(layout.chunks)  # a head alone is a prefix
        is_exact = not reuses or answer.link.recomputed >= layout.num_context
        return cls(path, generated.text, tokens, answer.report(), spans, is_exact=is_exact)

    def report(self) -> dict[str, Any]:
        """As `pic query --json` has it: the answer's own report, with the path and the spans of the prompt."""
        spans = [list(span) for span in self.spans]
        more = {
            "path": path_text(self.path),
            "shared": self.is_shared,
            "exact": self.is_exact,
            "seconds": self.seconds,
            "spans": spans,
        }
        return more | {"object": self.object or None} | dict(self.own)


@dataclass(frozen=True)
class Result:
    """What a query gave: messages and joins, and what every call did, in the order in which they ended."""

    query: Query
    done: tuple[CallRecord, ...]

    @property
    def text(self) -> str:
        """The texts of the messages."""
        return text_of(self.query).strip()


@dataclass(frozen=True)
class QueryBudget:
    """What a query may use. `tokens`: generated in all; `seconds`: none begins later. None: no limit."""

    tokens: int | None = None
    seconds: float | None = None


def _quiet(*_: Any) -> None:
    pass


def _nobody(text: str) -> str:
    raise InputError(f"asks {text!r}, but no one can answer here; run it from a terminal")


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
        codec, after: how spans are compiled.
        base: the folder that files are relative to.
        arity: judges of more candidates become trees of such judges; None: none do.
        sorts_plus: children of a + are put in the order of their content, so that equal sets are equal prefixes.
        has_rules: whether the optimizer changes a query at all.
        keeps_outputs: an outer call reads an output's tokens as they were generated, and links their KV as it was
            computed then, which not every engine can; else its text is read and compiled as any other.
        retriever: chooses the fragments of an R; None: by BM25.
        side_by_side: calls that are ready at once reach the engine together. Else they run one after the other, and
            what is below a call is evaluated just before it, so that little of a large query is in memory.
    """

    policy: Policy = field(default_factory=lambda: make_policy(DEFAULT))
    max_new_tokens: int = MAX_NEW_TOKENS
    top_p: float = 1.0
    seed: int = 0
    codec: str = CODEC
    after: str = PREVIOUS
    base: FilePath = FilePath()
    arity: int | None = None
    sorts_plus: bool = False
    has_rules: bool = True
    budget: QueryBudget = QueryBudget()
    keeps_outputs: bool = True
    retriever: Retriever | None = None
    side_by_side: bool = True

    @property
    def links_outputs(self) -> bool:
        """Whether outputs are kept as objects."""
        return self.keeps_outputs and self.policy.needs.objects

    @property
    def is_serial(self) -> bool:
        """Whether calls run one after the other, as where the next one depends on what is left of a budget."""
        budget = self.budget
        return not self.side_by_side or budget.tokens is not None or (self.links_outputs and budget.seconds is not None)


@dataclass(frozen=True, eq=False)
class CallRequest:
    """A call that is ready: `over` is what all below it gave. `at` is its place in the query as it was written."""

    run: RunningQuery
    engine: Engine
    over: Query
    node: Any
    path: Path
    at: Path


QueryTask = Task[CallRequest, CallRecord | PicError, Query]
_Task = Task[CallRequest, CallRecord | PicError, _T]


class RunningQuery:
    """One run of one query. `done` grows.

    Args:
        engine_of: gives the engine of a model by its name.
        retrieve: the fragments of an R for a query's text.
    """

    def __init__(
        self, query: Query, options: RunOptions, hooks: Hooks, engine_of: Callable[[str], Engine],
        retrieve: Callable[[Any, str], Sequence[Any]], seed: int,
    ) -> None:  # fmt: skip
        self.query, self.options, self.hooks, self.engine_of, self.retrieve = query, options, hooks, engine_of, retrieve
        self.seed = seed
        self.done: list[CallRecord] = []
        self.tokens = 0  # that were generated
        self.started = time.monotonic()
        self._known: dict[Query, CallRecord] = {}
        self._awaited: set[Query] = set()  # calls whose answers are to come, and others wait for

    def task(self, on_end: Callable[[Result | QueryError], None]) -> _Task[Result | QueryError]:
        """The whole run: what the query gives, messages and joins of them; or why it gives nothing."""
        outcome: Result | QueryError
        try:
            outcome = Result((yield from self.evaluate(self.query, ())), tuple(self.done))
        except QueryError as error:
            error.done = tuple(self.done)
            outcome = error
        on_end(outcome)
        return outcome

    def evaluate(self, node: Query, path: Path) -> QueryTask:
        """What a node gives, messages and joins of them."""
        self.hooks.checkpoint()
        with failing(written(node, path)):
            given = node.run(self, path)
            return given if isinstance(given, Query) else (yield from given)

    def children(self, node: Query, path: Path, is_serial: bool = False) -> _Task[list[Query]]:
        """What the children of a node give, one after the other or side by side."""
        tasks = (self.evaluate(child, path + step) for step, child in node.steps())
        return one_by_one(tasks) if is_serial else self.side_by_side(tasks)

    def side_by_side(self, tasks: Iterable[_Task[_T]]) -> _Task[list[_T]]:
        """What tasks give that do not depend on one another."""
        return together(list(tasks)) if self.options.side_by_side else one_by_one(tasks)

    def call(self, node: Any, path: Path) -> QueryTask:
        """The output of a call."""
        over = node.input
        if not self.is_known(node):
            over = yield from self.evaluate(over, (*path, node.kind, "input"))
        return (yield from self.answer(node, path, over))

    def is_known(self, node: Query) -> bool:
        """Whether an equal call gives, or is about to give, this call's answer."""
        return not node.varies and (node in self._known or node in self._awaited)

    def answer(self, node: Any, path: Path, over: Query, *index: int) -> QueryTask:
        """The output of a call over what is below it; of an equal one before, if there is one.

        Args:
            index: of the call, in a repeat.
        """
        self.hooks.checkpoint()
        while node in self._awaited:
            yield ()
        if not node.varies and node in self._known:
            shared = replace(self._known[node], path=path, is_shared=True, seconds=0.0)
            self.finish(shared)
            return self._output(shared)
        at = written(node, path, *index)
        with failing(at):
            request = CallRequest(self, self.engine_of(node.call.model), over, node, path, at)
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

    def _output(self, done: CallRecord) -> Output:
        tokens = done.tokens if self.options.keeps_outputs else ()
        return Output("assistant", done.text, tokens, path_text(done.path), done.object)

    def finish(self, done: CallRecord) -> None:
        """Note a call that has ended."""
        self.done.append(done)
        self.hooks.on_done(done)

    def tokens_left(self, at: Path) -> int | None:
        """What the budget leaves; None: all. Raises QueryError: nothing."""
        budget = self.options.budget
        if budget.tokens is not None and self.tokens >= budget.tokens:
            raise QueryError(at, f"the budget of {budget.tokens} tokens is used up; allow more")
        if budget.seconds is not None and time.monotonic() - self.started >= budget.seconds:
            raise QueryError(at, f"the budget of {budget.seconds:g} s is used up; allow more")
        return None if budget.tokens is None else budget.tokens - self.tokens


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Give errors the path of the node that they belong to."""
    try:
        yield
    except QueryError:
        raise
    except PicError as error:
        raise QueryError(path, str(error)) from error


def written(node: Query, path: Path, *index: int) -> Path:
    """The path in the query as it was written, if it is known, by which messages and seeds name a node.

    Args:
        path: of the node in the tree that runs. index: of the call, in a repeat.
    """
    return path if node.origin is None else (*node.origin, *index)


def node_seed(seed: int, path: Path) -> int:
    """The seed of the call at a path: 64 bits of a hash of both."""
    digest = hashlib.sha256(repr((seed, path)).encode()).digest()
    return int.from_bytes(digest[:8], "little")
