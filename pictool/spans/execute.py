"""Running a query on an engine: every call from the bottom up; its answer is what the outer call reads.

The children of a + are linked as objects under the policy. A node that fails names its path, and what was done before
is kept. Sampling is seeded by the path in the query as it was written, so that a query gives the same tree again,
however it was optimised.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

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
from pictool.spans.prompt import FileText, Output, Prompt, Span, make_prompt, seam_after, span_text, spans_of
from pictool.spans.query import (
    DEFAULT_MODEL,
    Call,
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

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine

NOTHING = Seq(())


class QueryError(PicError):
    """A node that failed: its path and why. `done` is what was done before."""

    def __init__(self, path: Path, problem: str, done: Sequence[Done] = ()) -> None:
        super().__init__(f"{path_text(path)}: {problem}")
        self.path, self.done = path, tuple(done)


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
        run = _Run(self, query, self._hooks)
        return Result(run.evaluate(query, ()), tuple(run.done))

    def retrieve(self, node: nodes.Retrieve | nodes.Augment, query: str) -> list[nodes.Fragment]:
        """The fragments of an R for a query's text. Raises InputError for files that cannot be read."""
        options = self.options
        return find_fragments(node, query, options.base, self.engine_of(DEFAULT_MODEL).model, options.retriever)

    def _retrieve_flat(self, node: nodes.Retrieve | nodes.Augment) -> Sequence[nodes.Fragment] | None:
        return None if needs_running(node.input) else self.retrieve(node, query_text(node.input))


class _Run:
    """One run of one query. `done` grows."""

    def __init__(self, executor: Executor, query: Query, hooks: Hooks) -> None:
        self._executor, self._options, self._query, self._hooks = executor, executor.options, query, hooks
        self.done: list[Done] = []
        self._known: dict[Query, Done] = {}
        self._inputs: dict[Path, Query] = {}  # of repeats
        self._started, self._tokens = time.monotonic(), 0

    def evaluate(self, node: Query, path: Path) -> Query:
        """What a node gives: messages and joins of them."""
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
                return node.with_children(self._below(node, path))
            case Generate() | nodes.Chat():
                return self._call(node, path)
            case nodes.Repeat(over, n):
                below = (*path, "repeat")
                return Par(tuple(self._call(over, (*below, index), below) for index in range(n)))
            case nodes.Map(call, inputs):
                written = (*_written(node, path), "map")
                calls = [
                    Generate(Message("user", text), call, origin=(*written, index)) for index, text in enumerate(inputs)
                ]
                return Par(tuple(self._call(over, (*path, "map", index)) for index, over in enumerate(calls)))
            case nodes.Monad():
                self._prepare(node, path)
                return NOTHING
            case nodes.Zip():
                return _zipped(*self._below(node, path))
            case nodes.Retrieve() | nodes.Augment():
                return self._retrieve(node, path)
        raise AssertionError(f"{node.kind} cannot be run")

    def _below(self, node: Query, path: Path) -> list[Query]:
        return [self.evaluate(child, path + step) for step, child in node.steps()]

    def _fragment(self, node: nodes.Fragment, path: Path) -> Message:
        if node.text is not None:
            return FileText.of(node)
        with self._failing(node, path):
            file = self._options.base / node.source
            return FileText.of(nodes.Fragment(node.source, read_text(file)))

    def _retrieve(self, node: nodes.Retrieve | nodes.Augment, path: Path) -> Query:
        (found,) = self._below(node, path)
        with self._failing(node, path):
            fragments = self._executor.retrieve(node, query_text(found))
        return Plus(tuple(FileText.of(fragment) for fragment in fragments))

    def _prepare(self, node: nodes.Monad, path: Path) -> None:
        """Run for what it leaves in the store: the texts of its G¹ are compiled together."""
        texts: dict[str, list[Span]] = {}
        for call, below in self._preparing(node.input, (*path, "monad")):
            found = spans_of(self.evaluate(call.input, (*below, "g", "input")))
            texts.setdefault(call.call.model, []).extend(found)
        if not self._options.policy.needs.objects:
            return
        objects = Spec(policy=self._options.policy, codec=self._options.codec).objects
        for model, spans in texts.items():
            with self._failing(node, path):
                engine = self._executor.engine_of(model)
                engine.compile([make_chunk(engine.model, span_text(span), span.source) for span in spans], objects)

    def _preparing(self, node: Query, path: Path) -> Iterator[tuple[Generate, Path]]:
        """The G¹ over texts below joins, each with its path; all else below them is run."""
        if isinstance(node, Join):
            for step, child in node.steps():
                yield from self._preparing(child, path + step)
        elif isinstance(node, Generate) and node.call.max_tokens == 1 and not has_calls(node.input):
            yield node, path
        else:
            self.evaluate(node, path)

    def _call(self, node: Generate | nodes.Chat, path: Path, shared: Path | None = None) -> Output:
        """The output of one call. Calls of one repeat share their input, which is at the path `shared`."""
        key = node if is_deterministic(node) else None
        if key is not None and key in self._known:
            return self._output(replace(self._known[key], path=path, is_shared=True, seconds=0.0))
        over = self._input(node, path, shared)
        written = _written(node, path, *([] if shared is None else path[-1:]))
        self._require_budget(written)
        with _Failing(written, self.done):
            engine = self._executor.engine_of(node.call.model)
            started = time.monotonic()
            prompt = make_prompt(engine.model, over)
            spec = self._spec(prompt, node.call, node_seed(self._options.seed, written))
            done = self._answer(engine, spec, prompt, node, path)
        done = replace(done, seconds=time.monotonic() - started)
        if key is not None:
            self._known[key] = done
        return self._output(done)

    def _input(self, node: Generate | nodes.Chat, path: Path, shared: Path | None) -> Query:
        """What is below a call. That of a repeat is run once."""
        if shared is None:
            return self.evaluate(node.input, (*path, node.kind, "input"))
        if shared not in self._inputs:
            self._inputs[shared] = self.evaluate(node.input, (*shared, node.kind, "input"))
        return self._inputs[shared]

    def _answer(self, engine: Engine, spec: Spec, prompt: Prompt, node: Generate | nodes.Chat, path: Path) -> Done:
        """Run one call, and keep its output's KV if an outer call can link it."""
        on_text = self._hooks.on_text if node is self._query else None
        keeps = self._options.keeps_outputs and spec.policy.needs.objects
        if keeps:
            engine.require("trace", "to link outputs as they were generated")
        answer = answer_and_keep(engine, spec, on_text) if keeps else engine.answer(spec, on_text=on_text)
        self._tokens += len(answer.generated.tokens)
        self._hooks.on_answer(path, answer)
        done = Done.of(path, answer)
        if keeps and path:
            seam = engine.model.encode(seam_after(done.text))
            text = done.text + seam_after(done.text)
            key = keep_output(engine.store, answer, done.tokens, seam, text, spec.codec)
            done = replace(done, object=key or "")
        return done

    def _spec(self, prompt: Prompt, call: Call, seed: int) -> Spec:
        options = self._options
        limit = call.max_tokens or options.max_new_tokens
        if options.budget.tokens is not None:
            limit = min(limit, options.budget.tokens - self._tokens)
        sampling = Sampling(call.temperature or 0.0, options.top_p, seed)
        spec = Spec.raw(prompt.documents, prompt.tail, options.policy, prompt.head)
        return replace(spec, max_new_tokens=limit, sampling=sampling, codec=options.codec)

    def _output(self, done: Done) -> Output:
        self.done.append(done)
        self._hooks.on_done(done)
        tokens = done.tokens if self._options.keeps_outputs else ()
        return Output("assistant", done.text, tokens, path_text(done.path), done.object)

    def _require_budget(self, at: Path) -> None:
        budget = self._options.budget
        if budget.tokens is not None and self._tokens >= budget.tokens:
            raise QueryError(at, f"the budget of {budget.tokens} tokens is used up; allow more", self.done)
        if budget.seconds is not None and time.monotonic() - self._started >= budget.seconds:
            raise QueryError(at, f"the budget of {budget.seconds:g} s is used up; allow more", self.done)

    def _failing(self, node: Query, path: Path) -> _Failing:
        return _Failing(_written(node, path), self.done)


class _Failing:
    """Gives errors the path of the node that they belong to."""

    def __init__(self, path: Path, done: Sequence[Done]) -> None:
        self._path, self._done = path, done

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PicError) and not isinstance(error, QueryError):
            raise QueryError(self._path, str(error), self._done) from error


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
