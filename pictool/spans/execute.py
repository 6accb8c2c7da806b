"""Running a query on an engine: every call from the bottom up; its answer is what the outer call reads.

Calls that are ready at once reach the engine together, which runs them side by side if it can (`Engine.answer_all`).

The children of a + are linked as objects under the policy. A node that fails names its path, and what was done before
is kept. Sampling is seeded by the path in the query as it was written, so that a query gives the same tree again,
however it was optimised.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from pictool.spans.generated import answer_and_keep, keep_output
from pictool.spans.optimise import Optimised, optimise
from pictool.spans.prompt import FileText, Output, Span, make_prompt, seam_after, span_text, spans_of
from pictool.spans.query import (
    DEFAULT_MODEL,
    Generate,
    Join,
    Message,
    Par,
    Path,
    Plus,
    Query,
    Seq,
    path_text,
    with_origins,
)
from pictool.spans.retrieve import Retriever, bm25, find_fragments, query_text
from pictool.spans.rules import SIMPLIFICATIONS, Options, has_calls, is_deterministic, needs_running
from pictool.spans.tasks import Task, run, run_in_steps, together

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine

NOTHING = Seq(())
AnswerSteps = Callable[[Spec], Generator[None, None, "Answer"]]  # answers a call, as `TorchEngine.answer_steps` does
_T = TypeVar("_T")


class QueryError(PicError):
    """A node that failed: its path and why. `done` is what was done until then."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path_text(path)}: {problem}")
        self.path = path
        self.done: tuple[Done, ...] = ()


@dataclass(frozen=True)
class Done:
    """What one call did.

    Fields:
        text, tokens: what it generated; without the end token.
        is_shared: an equal call had been run, whose answer this is.
        own: the answer's report.
        spans: `[start, end)` of the head, each document and the tail in its prompt.
        object: the key of its generated object; empty if there is none.
    """

    path: Path
    text: str
    tokens: tuple[int, ...]
    own: Mapping[str, Any]
    spans: tuple[tuple[int, int], ...]
    seconds: float = 0.0
    is_shared: bool = False
    object: str = ""

    @classmethod
    def of(cls, path: Path, answer: Answer) -> Done:
        """The record of an answer. It holds no KV."""
        model, generated, layout = answer.loaded, answer.generated, answer.link.layout
        tokens = generated.tokens
        if tokens and tokens[-1] in model.eos_ids:
            tokens = tokens[:-1]
        if str(model.tokenizer.decode(list(tokens))) != generated.text:  # a stop string, or special tokens within
            tokens = model.encode(generated.text)
        spans = (layout.head, *layout.chunks, layout.tail)
        return cls(path, generated.text, tokens, answer.report(), spans)

    def report(self) -> dict[str, Any]:
        """As `pic query --json` has it: the answer's own report, with the path and the spans of the prompt."""
        spans = [list(span) for span in self.spans]
        more = {"path": path_text(self.path), "shared": self.is_shared, "seconds": self.seconds, "spans": spans}
        return more | {"object": self.object or None} | dict(self.own)


@dataclass(frozen=True)
class Result:
    """What a query gave: messages and joins, and what every call did, in the order in which they ended."""

    query: Query
    done: tuple[Done, ...]

    @property
    def text(self) -> str:
        """The texts of the messages."""
        return query_text(self.query).strip()


@dataclass(frozen=True)
class Budget:
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
    """

    on_done: Callable[[Done], None] = _quiet
    on_answer: Callable[[Path, Answer], None] = _quiet
    on_text: Callable[[str], None] | None = None
    on_print: Callable[[str], None] = _quiet
    ask: Callable[[str], str] = _nobody


@dataclass(frozen=True)
class RunOptions:
    """How queries are run.

    Fields:
        policy: how the spans of a + are linked.
        max_new_tokens: of calls that say 0 or nothing. top_p, seed: of sampling; each call has a seed of its own.
        codec: how the KV of spans is kept.
        base: the folder that files are relative to.
        arity: judges of more candidates become trees of such judges; None: none do.
        keeps_outputs: an outer call reads an output's tokens as they were generated, and links their KV as it was
            computed then, which not every engine can; else its text is read and compiled as any other.
        retriever: chooses the fragments of an R.
    """

    policy: Policy = field(default_factory=lambda: make_policy(DEFAULT))
    max_new_tokens: int = MAX_NEW_TOKENS
    top_p: float = 1.0
    seed: int = 0
    codec: str = CODEC
    base: FilePath = FilePath()
    arity: int | None = None
    budget: Budget = Budget()
    keeps_outputs: bool = True
    retriever: Retriever = bm25


class Executor:
    """Runs queries on engines, which `engine_of` gives by the model names of calls."""

    def __init__(
        self, engine_of: Callable[[str], Engine], options: RunOptions = RunOptions(), hooks: Hooks = Hooks()
    ) -> None:
        self.engine_of, self.options, self._hooks = engine_of, options, hooks

    def optimise(self, query: Query) -> Optimised:
        """A query as it is to be run; files that it retrieves from are read here.

        Raises:
            InputError: files that cannot be read.
        """
        options = self.options
        is_exact = not options.policy.needs.objects
        return optimise(with_origins(query), Options(is_exact, arity=options.arity, retrieve=self._retrieve_flat))

    def run(self, query: Query) -> Result:
        """Run a query as it is.

        Raises:
            QueryError: the node that failed, why, and what was done before.
        """
        running = _Run(self, query, self._hooks)
        with running.reporting():
            return Result(running.evaluate(), tuple(running.done))

    def steps(self, query: Query, answer: AnswerSteps) -> Generator[bool | None, None, Result]:
        """As `run`, a step at a time, for a caller that does other work between steps. Outputs are not kept.

        Args:
            answer: answers each call, whichever model it names.

        Yields:
            True where a call is about to begin after another one.
        """
        assert not self.options.keeps_outputs
        running = _Run(self, query, self._hooks, answer)
        with running.reporting():
            return Result((yield from running.steps()), tuple(running.done))

    def retrieve(self, node: nodes.Retrieve | nodes.Augment, query: str) -> list[nodes.Fragment]:
        """The fragments of an R for a query's text. Raises InputError for files that cannot be read."""
        options = self.options
        return find_fragments(node, query, options.base, self.engine_of(DEFAULT_MODEL).model, options.retriever)

    def _retrieve_flat(self, node: nodes.Retrieve | nodes.Augment) -> Sequence[nodes.Fragment] | None:
        return None if needs_running(node.input) else self.retrieve(node, query_text(node.input))


@dataclass(frozen=True)
class _Asked:
    """A call that is ready: all below it has run. `seed` and `at` are by its place in the query as it was written."""

    engine: Engine
    over: Query
    node: Generate | nodes.Chat
    path: Path
    at: Path


_Task = Task["_Asked", "Done | PicError", _T]


class _Run:
    """One run of one query, in steps if `answer` is given. `done` grows."""

    def __init__(self, executor: Executor, query: Query, hooks: Hooks, answer: AnswerSteps | None = None) -> None:
        self._executor, self._options, self._query, self._hooks = executor, executor.options, query, hooks
        self._answer = answer
        self.done: list[Done] = []
        self._known: dict[Query, Done] = {}
        self._asked: set[Query] = set()  # calls whose answers are to come, and others wait for
        self._started, self._tokens = time.monotonic(), 0

    def evaluate(self) -> Query:
        """What the query gives: messages and joins of them."""
        return run(self._evaluate(self._query, ()), self._perform)

    def steps(self) -> Generator[bool | None, None, Query]:
        """As `evaluate`, in steps; see `Executor.steps`."""
        return run_in_steps(self._evaluate(self._query, ()), self._perform_in_steps)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Gives errors what was done before."""
        try:
            yield
        except QueryError as error:
            error.done = tuple(self.done)
            raise

    def _evaluate(self, node: Query, path: Path) -> _Task[Query]:
        match node:
            case Message():
                return node
            case nodes.Fragment():
                return self._fragment(node, path)
            case nodes.Ask(text):
                with self._failing(node, path):
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
            case nodes.Map(call, inputs):
                written = (*_written(node, path), "map")
                calls = [
                    Generate(Message("user", text), call, origin=(*written, index)) for index, text in enumerate(inputs)
                ]
                tasks = [self._call(over, (*path, "map", index)) for index, over in enumerate(calls)]
                return Par(tuple((yield from together(tasks))))
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
        tasks = [self._evaluate(child, path + step) for step, child in node.steps()]
        if not isinstance(node, Seq):
            return (yield from together(tasks))
        results: list[Query] = []
        for task in tasks:
            results.append((yield from task))  # noqa: PERF401 (no yield in a comprehension)
        return results

    def _fragment(self, node: nodes.Fragment, path: Path) -> Message:
        if node.text is not None:
            return FileText.of(node)
        with self._failing(node, path):
            file = self._options.base / node.source
            return FileText.of(nodes.Fragment(node.source, read_text(file)))

    def _retrieve(self, node: nodes.Retrieve | nodes.Augment, path: Path) -> _Task[Query]:
        (found,) = yield from self._below(node, path)
        with self._failing(node, path):
            fragments = self._executor.retrieve(node, query_text(found))
        return Plus(tuple(FileText.of(fragment) for fragment in fragments))

    def _prepare(self, node: nodes.Monad, path: Path) -> _Task[None]:
        """Run for what it leaves in the store: the texts of its G¹ are compiled together."""
        texts: dict[str, list[Span]] = {}
        for call, below in _leaves(node.input, (*path, "monad")):
            if isinstance(call, Generate) and call.call.max_tokens == 1 and not has_calls(call.input):
                found = spans_of((yield from self._evaluate(call.input, (*below, "g", "input"))))
                texts.setdefault(call.call.model, []).extend(found)
            else:
                yield from self._evaluate(call, below)
        if not self._options.policy.needs.objects:
            return
        objects = Spec(policy=self._options.policy, codec=self._options.codec).objects
        for model, spans in texts.items():
            for batch in [spans] if self._answer is None else [[span] for span in spans]:
                with self._failing(node, path):
                    engine = self._executor.engine_of(model)
                    engine.compile([make_chunk(engine.model, span_text(span), span.source) for span in batch], objects)
                yield ()

    def _repeat(self, node: nodes.Repeat, path: Path) -> _Task[Query]:
        """The outputs of one call, whose input is run once."""
        below = (*path, "repeat")
        if not node.n or self._is_known(node.input):
            over = node.input.input
        else:
            over = yield from self._evaluate(node.input.input, (*below, node.input.kind, "input"))
        paths = [(*below, index) for index in range(node.n)]
        tasks = [
            self._ask(node.input, path, _written(node.input, path, index), over) for index, path in enumerate(paths)
        ]
        return Par(tuple((yield from together(tasks))))

    def _call(self, node: Generate | nodes.Chat, path: Path) -> _Task[Output]:
        """The output of one call."""
        over: Query = node.input
        if not self._is_known(node):
            over = yield from self._evaluate(node.input, (*path, node.kind, "input"))
        return (yield from self._ask(node, path, _written(node, path), over))

    def _is_known(self, node: Query) -> bool:
        """Whether an equal call gives, or is about to give, this call's answer."""
        return is_deterministic(node) and (node in self._known or node in self._asked)

    def _ask(self, node: Generate | nodes.Chat, path: Path, at: Path, over: Query) -> _Task[Output]:
        """The output of a call over what is below it; of an equal one before, if there is one."""
        while node in self._asked:
            yield ()
        if is_deterministic(node) and node in self._known:
            shared = replace(self._known[node], path=path, is_shared=True, seconds=0.0)
            self._finish(shared)
            return self._output(shared)
        with _Failing(at):
            engine = self._executor.engine_of(node.call.model)
            asked = _Asked(engine, over, node, path, at)
        if is_deterministic(node):
            self._asked.add(node)
        try:
            (outcome,) = yield (asked,)
        finally:
            self._asked.discard(node)
        if isinstance(outcome, PicError):
            raise outcome
        if is_deterministic(node):
            self._known[node] = outcome
        return self._output(outcome)

    def _perform(self, wave: Sequence[_Asked]) -> list[Done | PicError]:
        """Run calls that are ready, side by side where the engine can.

        Outputs that are kept, and a budget of tokens, take one call after the other, until one fails.
        """
        keeps = self._options.keeps_outputs and self._options.policy.needs.objects
        outcomes: dict[int, Done | PicError] = {}
        if keeps or self._options.budget.tokens is not None or len(wave) == 1:
            for index, asked in enumerate(wave):
                outcomes[index] = self._run_one(asked, keeps)
                if isinstance(outcomes[index], PicError):
                    break
        else:
            for engine in dict.fromkeys(asked.engine for asked in wave):
                indices = [index for index, asked in enumerate(wave) if asked.engine is engine]
                outcomes |= zip(indices, self._run_all(engine, [wave[index] for index in indices]), strict=True)
        return [outcomes[index] for index in range(len(outcomes))]

    def _run_all(self, engine: Engine, wave: Sequence[_Asked]) -> list[Done | PicError]:
        """Run calls on one engine side by side."""
        started = time.monotonic()
        try:
            self._require_budget(wave[0].at)
        except QueryError as error:
            return [error] * len(wave)
        ended: dict[int, Done | PicError] = {}
        specs: dict[int, Spec] = {}
        for index, asked in enumerate(wave):
            try:
                with _Failing(asked.at):
                    specs[index] = self._spec(asked)
            except QueryError as error:
                ended[index] = error
        indices = [*specs]
        for number, answer in engine.answer_all([*specs.values()]):
            index = indices[number]
            if isinstance(answer, PicError):
                ended[index] = QueryError(wave[index].at, str(answer))
            else:
                ended[index] = self._ended(wave[index], answer, started)
        return [ended[index] for index in range(len(wave))]

    def _perform_in_steps(self, wave: Sequence[_Asked]) -> Generator[bool | None, None, list[Done | PicError]]:
        """Run calls one after the other, until one fails."""
        outcomes: list[Done | PicError] = []
        for asked in wave:
            if self.done:
                yield True
            outcomes.append((yield from self._run_in_steps(asked)))
            if isinstance(outcomes[-1], PicError):
                break
        if not wave:  # after an object was compiled
            yield True
        return outcomes

    def _run_in_steps(self, asked: _Asked) -> Generator[bool | None, None, Done | PicError]:
        """Run one call."""
        assert self._answer is not None
        started = time.monotonic()
        try:
            with _Failing(asked.at):
                self._require_budget(asked.at)
                answer = yield from self._answer(self._spec(asked))
                return self._ended(asked, answer, started)
        except QueryError as error:
            return error

    def _run_one(self, asked: _Asked, keeps: bool) -> Done | PicError:
        """Run one call, and keep its output's KV if an outer call can link it."""
        engine, started = asked.engine, time.monotonic()
        on_text = self._hooks.on_text if asked.node is self._query else None
        try:
            with _Failing(asked.at):
                self._require_budget(asked.at)
                if not keeps:
                    return self._ended(asked, engine.answer(self._spec(asked), on_text=on_text), started)
                engine.require("trace", "to link outputs as they were generated")
                spec = self._spec(asked)
                return self._ended(asked, answer_and_keep(engine, spec, on_text), started, spec.codec)
        except QueryError as error:
            return error

    def _ended(self, asked: _Asked, answer: Answer, started: float, codec: str | None = None) -> Done:
        """The record of a call; with `codec` its output's KV is kept, if there is an outer call."""
        self._tokens += len(answer.generated.tokens)
        self._hooks.on_answer(asked.path, answer)
        done = Done.of(asked.path, answer)
        if codec is not None and asked.path:
            engine, text = asked.engine, done.text + seam_after(done.text)
            seam = engine.model.encode(seam_after(done.text))
            key = keep_output(engine.store, answer, done.tokens, seam, text, codec)
            done = replace(done, object=key or "")
        done = replace(done, seconds=time.monotonic() - started)
        self._finish(done)
        return done

    def _finish(self, done: Done) -> None:
        self.done.append(done)
        self._hooks.on_done(done)

    def _spec(self, asked: _Asked) -> Spec:
        options, call = self._options, asked.node.call
        prompt = make_prompt(asked.engine.model, asked.over)
        limit = call.max_tokens or options.max_new_tokens
        if options.budget.tokens is not None:
            limit = min(limit, options.budget.tokens - self._tokens)
        sampling = Sampling(call.temperature or 0.0, options.top_p, node_seed(options.seed, asked.at))
        spec = Spec.raw(prompt.documents, prompt.tail, options.policy, prompt.head)
        return replace(spec, max_new_tokens=limit, sampling=sampling, codec=options.codec)

    def _output(self, done: Done) -> Output:
        tokens = done.tokens if self._options.keeps_outputs else ()
        return Output("assistant", done.text, tokens, path_text(done.path), done.object)

    def _require_budget(self, at: Path) -> None:
        budget = self._options.budget
        if budget.tokens is not None and self._tokens >= budget.tokens:
            raise QueryError(at, f"the budget of {budget.tokens} tokens is used up; allow more")
        if budget.seconds is not None and time.monotonic() - self._started >= budget.seconds:
            raise QueryError(at, f"the budget of {budget.seconds:g} s is used up; allow more")

    def _failing(self, node: Query, path: Path) -> _Failing:
        return _Failing(_written(node, path))


class _Failing:
    """Gives errors the path of the node that they belong to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PicError) and not isinstance(error, QueryError):
            raise QueryError(self._path, str(error)) from error


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
    second = optimise(second, rules=SIMPLIFICATIONS).after
    if not isinstance(second, Join):
        second = Seq((second,))
    if isinstance(first, Plus):
        return second.with_children([Plus((*first.parts, item)) for item in second.parts])
    return second.with_children([part for item in second.parts for part in (first, item)])
