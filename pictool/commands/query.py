"""`pic query`: a span query to its answer, or what the optimizer makes of it; or a file of queries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import output_path, print_json
from pictool.commands.console.progress import answers_bar
from pictool.commands.console.verbosity import note
from pictool.commands.link import Stream
from pictool.commands.linking.batch import answered
from pictool.commands.linking.request import STDIN, policy_of_settings, read_stdin
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    ANSWER,
    COMPILING,
    MODEL,
    OUTPUT,
    POLICY,
    SALT,
    AlgoOption,
    EngineOption,
    JsonOption,
    NewTokensOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store, quiet_libraries
from pictool.commands.settings.settings import Settings
from pictool.commands.settings.types import one_of, parse_seed, parse_size
from pictool.errors import InputError, PicError

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine, Feature
    from pictool.linker.policies.base import Policy
    from pictool.spans.bulk import BulkQuery, Items, Schedule
    from pictool.spans.execute import Executor
    from pictool.spans.optimise import OptimisedQuery
    from pictool.spans.query import Path as NodePath
    from pictool.spans.query import Query
    from pictool.spans.running import CallRecord, Hooks, QueryError, Result, RunOptions

app = make_app()
GENERATED = "generated"
_ELSEWHERE = ("ollama", "openai", "gemini", "anthropic", "mistralrs", "candle")


@dataclass(frozen=True)
class QueryOptions:
    """What a command line says of how a query is run, and of what is printed and written."""

    algo: AlgoOption = None
    tree: Annotated[
        Optional[int],
        option(
            "--tree",
            "N",
            ("Split calls over more than N candidates into a tree of calls over at most N. This changes prompts."),
            POLICY,
            min=2,
        ),
    ] = None
    sort_plus: Annotated[
        bool,
        option(
            "--sort-plus",
            None,
            ("Sort the children of a + by content, so that equal sets become equal prefixes. This changes answers."),
            POLICY,
        ),
    ] = False
    no_optimise: Annotated[bool, option("--no-optimise", None, "Do not apply the optimizer's rules.", POLICY)] = False
    max_new_tokens: NewTokensOption = None
    top_p: Annotated[float, option("--top-p", "P", "Nucleus sampling, in calls with a temperature.", ANSWER)] = 1.0
    seed: Annotated[
        int, option("--seed", "N", "Seed of sampling; each call derives its own.", ANSWER, type=parse_seed)
    ] = 0
    max_tokens: Annotated[
        Optional[int], option("--budget-tokens", "N", "Generate at most N tokens over all calls.", ANSWER, min=1)
    ] = None
    max_seconds: Annotated[
        Optional[float], option("--budget-seconds", "S", "Start no more calls after S seconds.", ANSWER, min=0)
    ] = None
    outputs: Annotated[
        Optional[str],
        option(
            "--outputs",
            "NAME",
            (
                "KV of outputs that later calls read: generated (kept from generation) or compiled (again; the "
                "default with vLLM)."
            ),
            COMPILING,
            type=one_of((GENERATED, "compiled")),
        ),
    ] = None
    pool: Annotated[
        int,
        option(
            "--pool",
            "SIZE",
            "Keep up to SIZE of KV on the device, such as 500M (torch only).",
            MODEL,
            type=parse_size,
        ),
    ] = 0
    explain: Annotated[
        bool, option("--explain", None, "Print the tree before and after the optimizer's rules; run nothing.")
    ] = False
    output: Annotated[
        Optional[str],
        option("-o, --output", "FILE", "Write the answers of many queries as JSON Lines; run again to resume.", OUTPUT),
    ] = None
    trace: Annotated[
        Optional[str],
        option("--trace", "DIR", "Write the run with a trace of every call, for pic inspect and pic tui.", OUTPUT),
    ] = None
    as_json: JsonOption = False

    def check(self, query: str) -> None:
        """Refuse what makes no sense together, and files that cannot be written. `query` is the input's name."""
        if self.no_optimise and (self.tree is not None or self.sort_plus):
            name = "--sort-plus" if self.sort_plus else "--tree"
            raise UsageError(f"{name}: is an optimizer rule; omit --no-optimise")
        if is_bulk(query) and self.trace:
            raise UsageError("--trace: applies to a single query, not to a .jsonl file")
        if self.output is not None and not is_bulk(query):
            raise UsageError("-o: needs queries in a .jsonl file; for one query use --json > FILE")
        if self.explain and self.trace is not None:
            raise UsageError("--trace: cannot be combined with --explain, which runs nothing")
        if self.output is not None:
            output_path("-o", self.output, [query])
        folder = None if self.trace is None else Path(self.trace)
        if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"--trace {folder}: must be an empty or new folder; choose another")


def is_bulk(name: str) -> bool:
    """Whether a file has a query in each line."""
    return name.endswith(".jsonl")


@command(
    app, "query", "model", "device", "dtype", "store", "remote", "require_signed", "separator", "after", "codec", *SALT
)
def run_query(
    query: Annotated[
        str, argument("FILE", "A query in JSON or YAML; - is stdin. A .jsonl file has one query per line.")
    ],
    options: QueryOptions,
    settings: Settings,
    engine: EngineOption = None,
) -> None:
    """Run a span query, a program of model calls.

    \b
      pic query rag.yaml --explain
      pic query judge.json --algo full --seed 7
    """
    options.check(query)
    text, name, base = read_input(query)
    from pictool.runtime.model import require_name
    from pictool.spans.bulk import read_bulk
    from pictool.spans.reading import read_query

    policy = options.algo or policy_of_settings(settings)
    pool_bytes = options.pool or (0 if options.trace else None)  # a trace shows what the policy computes
    needed: dict[Feature, str] = {"outputs": "--outputs generated"} if options.outputs == GENERATED else {}
    needed |= {"pool": "--pool"} if pool_bytes else {}
    needed |= {"trace": "--trace"} if options.trace else {}
    engine_type = find_engine(engine, needed, settings.model)
    require_name(settings.model)
    if is_bulk(name):
        run = partial(run_bulk, queries=read_bulk(text, name), name=name, memory=settings.memory)
    else:
        run = partial(run_one, query=read_query(text, name, True if name.endswith((".yaml", ".yml")) else None))
    run_options = make_options(options, policy, settings, base, keeps_outputs(options.outputs, engine_type))
    quiet_libraries()
    store = open_store(settings)
    with ExitStack() as running:

        def start(of: Settings) -> Engine:
            return running.enter_context(engine_type(open_model(of, engine_type.name), store, pool_bytes))

        engines = Engines(start, settings)
        run(engines, run_options, output=options)
    store.drain()


def keeps_outputs(outputs: str | None, engine: type[Engine]) -> bool:
    """Whether outputs are linked as they were generated. Prints a note if the engine cannot and no option chose."""
    can_keep = "outputs" in engine.supports
    if outputs is None and not can_keep:
        note(f"{engine.title} does not keep the KV of outputs; they are compiled instead (--outputs compiled)")
    return can_keep and outputs != "compiled"


def read_input(name: str) -> tuple[str, str, Path]:
    """The text of a query, its name for messages, and the folder that its files are relative to."""
    from pictool.compiler.chunking import read_text

    if name == STDIN:
        return read_stdin(), "stdin", Path()
    return read_text(Path(name)), name, Path(name).parent


def make_options(
    options: QueryOptions, policy: Policy, settings: Settings, base: Path, keeps_outputs: bool
) -> RunOptions:
    """How the queries are run."""
    from pictool.linker.spec import MAX_NEW_TOKENS
    from pictool.spans.running import QueryBudget, RunOptions

    return RunOptions(
        policy=policy,
        max_new_tokens=options.max_new_tokens or MAX_NEW_TOKENS,
        top_p=options.top_p,
        seed=options.seed,
        codec=settings.codec,
        after=settings.after,
        base=base,
        arity=options.tree,
        sorts_plus=options.sort_plus,
        has_rules=not options.no_optimise,
        keeps_outputs=keeps_outputs,
        budget=QueryBudget(options.max_tokens, options.max_seconds),
    )


class Engines:
    """The engine of each model that a query names. `-m` names the model of all calls."""

    def __init__(self, start: Callable[[Settings], Engine], settings: Settings) -> None:
        self._start, self._settings = start, settings
        self._started: dict[str | None, Engine] = {}

    def __call__(self, model: str) -> Engine:
        """Raises ModelError or InputError: a model that does not run here."""
        name = self._name(model)
        if name not in self._started:
            self._started[name] = self._start(self._settings.override(model=name))
        return self._started[name]

    def _name(self, model: str) -> str | None:
        from pictool.spans.query import DEFAULT_MODEL, model_name

        if self._settings.option("model") is not None or model == DEFAULT_MODEL:
            return self._settings.model
        provider, slash, _ = model.partition("/")
        if slash and provider in _ELSEWHERE:
            raise InputError(f"model {model!r} is {provider}'s and cannot run here; choose a local model with -m")
        return model_name(model)


def run_one(engines: Engines, options: RunOptions, output: QueryOptions, query: Query) -> None:
    """Run, or explain, a query. Of one that fails, JSON has the calls that were done."""
    from pictool.spans.execute import Executor
    from pictool.spans.operators.calls import Generate
    from pictool.spans.running import QueryError

    traces = None if output.trace is None else TraceWriter(Path(output.trace))
    executor = Executor(engines, options, make_hooks(output, traces))
    optimised = executor.optimise(query)
    report = explain_report(optimised)
    if output.explain:
        report |= {"calls_run": optimised.num_calls, "text_tokens": count_tokens(executor, optimised.after)}
        if output.as_json:
            print_json(report)
        else:
            print(
                optimised.explain(),
                f"calls        {report['calls_run']}",
                f"text tokens  {report['text_tokens']}",
                sep="\n",
            )
        return
    (outcome,) = executor.run_all([optimised.after])
    answer = {"answer": None, "error": str(outcome)} if isinstance(outcome, QueryError) else {"answer": outcome.text}
    if traces is not None:
        traces.write_run(optimised.after, outcome.done, {"error": None, **answer, **report})
    if output.as_json:
        print_json({**answer, **report, "calls": [done.report() for done in outcome.done]})
    if isinstance(outcome, QueryError):
        raise outcome
    if not output.as_json and not isinstance(optimised.after, Generate):  # the text of a call has been streamed
        print(outcome.text)


def explain_report(optimised: OptimisedQuery) -> dict[str, Any]:
    """The trees, the rules that fired and the calls that run once, for JSON."""
    from pictool.spans.optimise import shape
    from pictool.spans.query import path_text

    steps = [
        {"rule": step.rule, "effect": step.effect.name.lower(), "path": path_text(step.path),
         "before": shape(step.before), "after": shape(step.after)}
        for step in optimised.steps
    ]  # fmt: skip
    shared = {path_text(path): path_text(first) for path, first in optimised.shared.items()}
    return {
        "query": optimised.before.to_data(),
        "optimised": optimised.after.to_data(),
        "steps": steps,
        "shared": shared,
    }


def count_tokens(executor: Executor, query: Query) -> int:
    """Tokens of the texts that calls read, without outputs; equal texts once. Raises QueryError: no such file."""
    from pictool.spans.bulk import items_of
    from pictool.spans.query import DEFAULT_MODEL

    model = executor.engine_of(DEFAULT_MODEL).model
    return sum(items_of(query, executor.options.base, lambda text: len(model.encode(text))).values())


class TraceWriter:
    """Writes the trace of each call into a folder: 0001.trace, … in the order in which calls end; then the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[NodePath, str] = {}

    def __call__(self, path: NodePath, answer: Answer) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._names[path] = f"{len(self._names) + 1:04}.trace"
        answer.write_trace(self._folder / self._names[path])

    def note_trace(self, path: NodePath) -> None:
        """Say where the trace of a call is, if it has one."""
        from pictool.spans.query import path_text

        if path in self._names:
            note(f"{self._folder / self._names[path]}: {path_text(path)}")

    def write_run(self, query: Query, done: Sequence[CallRecord], more: Mapping[str, Any]) -> None:
        """Write what `pic inspect` and `pic tui` open."""
        from pictool.spans.runs import write_run

        note(f"{write_run(self._folder, query, done, self._names, more)}: run saved; see pic inspect {self._folder}")


def make_hooks(output: QueryOptions, traces: TraceWriter | None) -> Hooks:
    from pictool.spans.running import Hooks

    is_quiet, once = output.as_json, cache(note)
    more: dict[str, Any] = {} if traces is None else {"on_answer": traces}

    def show(done: CallRecord) -> None:
        print_call(done, is_streamed=not is_quiet and not done.path)
        if traces is not None:
            traces.note_trace(done.path)

    return Hooks(
        on_done=show, on_text=None if is_quiet else Stream(), on_print=note, ask=ask,
        on_skip=lambda skipped: once(f"skipped: {skipped}"), **more,
    )  # fmt: skip


def ask(text: str) -> str:
    """What the user types. Raises InputError without a terminal."""
    if not sys.stdin.isatty():
        raise InputError(f"asks {text!r}, but stdin is not a terminal; run the query from a terminal")
    print(text, end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


def print_call(done: CallRecord, is_streamed: bool) -> None:
    """A line on stderr for a call that has ended, after the line of its text on stdout."""
    from pictool.spans.query import path_text

    if is_streamed:
        print(flush=True)
    if done.is_shared:
        note(f"{path_text(done.path)}: answered by an identical call")
        return
    tokens, timing, pool = done.own["tokens"], done.own["timing"], done.own.get("pool")
    on_device = f"{pool['resident']} were on the device, " if pool else ""
    note(
        f"{path_text(done.path)}: {tokens['recomputed']:.0f} of {tokens['context']} context rows recomputed, "
        f"{on_device}TTFT {timing['ttft_s'] * 1e3:.1f} ms, {tokens['generated']} tokens"
    )


def run_bulk(
    engines: Engines, options: RunOptions, output: QueryOptions, queries: Sequence[BulkQuery], name: str,
    memory: int,
) -> None:  # fmt: skip
    """Run the queries of a file, in the order that lets shared texts meet; or print that order."""
    from pictool.engines.answer_file import AnswerFile
    from pictool.spans.bulk import TOGETHER, AnswerDigests
    from pictool.spans.execute import Executor

    executor = Executor(engines, options)
    if output.explain:
        print_schedule(plan_bulk(executor, queries, memory), queries, output.as_json)
        return
    with ExitStack() as opened:
        path, results = output.output, dict[int, Mapping[str, Any]]()
        answers = None if path is None else opened.enter_context(AnswerFile(Path(path), queries))
        if answers is not None:
            results |= answered(answers, AnswerDigests(executor))
        show = opened.enter_context(answers_bar(name))

        def keep(query: BulkQuery, result: Mapping[str, Any]) -> None:
            results[query.line] = result
            if answers is not None:
                answers.append(query, result)
            show(len(results), len(queries))

        show(len(results), len(queries))
        ordered = [queries[index] for index in plan_bulk(executor, queries, memory).order]
        left = [query for query in ordered if query.line not in results]
        for start in range(0, len(left), TOGETHER):
            answer_queries(executor, left[start : start + TOGETHER], keep)
    if output.as_json:
        print_json([{"line": line, **results[line]} for line in sorted(results)])
    elif output.output is None:
        for line in sorted(results):
            print(results[line].get("answer", ""))
    failed = [line for line, result in sorted(results.items()) if "error" in result]
    if failed:
        first = results[failed[0]]["error"]
        raise InputError(f"{name}: {len(failed)} of {len(queries)} queries failed; line {failed[0]}: {first}")


def plan_bulk(executor: Executor, queries: Sequence[BulkQuery], memory: int) -> Schedule:
    """The order of a bulk for a cache of `memory` bytes of KV (`memory` of pic.yaml); without one, of one query's.

    A query that cannot be optimised, or reads a file that is not there, reads nothing here; it fails when it runs.
    """
    from pictool.spans.bulk import items_of, schedule
    from pictool.spans.query import DEFAULT_MODEL

    model = executor.engine_of(DEFAULT_MODEL).model

    @cache
    def size(text: str) -> int:
        return len(model.encode(text)) * model.token_bytes

    def items(query: Query) -> Items:
        try:
            return items_of(executor.optimise(query).after, executor.options.base, size)
        except PicError:
            return {}

    items_of_each = [items(query.query) for query in queries]
    return schedule(items_of_each, memory or max(sum(sizes.values()) for sizes in items_of_each))


def print_schedule(planned: Schedule, queries: Sequence[BulkQuery], as_json: bool) -> None:
    lines = [queries[index].line for index in planned.order]
    if as_json:
        shares = {
            "as_given": planned.hits_as_given / (planned.total or 1),
            "planned": planned.hits / (planned.total or 1),
        }
        print_json({"order": lines, "hits": shares})
        return
    print(f"order        {' '.join(map(str, lines))}")
    print(f"as given     {planned.hits_as_given / (planned.total or 1):.0%} of what is read is in the cache")
    print(f"planned      {planned.hits / (planned.total or 1):.0%}")


def answer_queries(
    executor: Executor, queries: Sequence[BulkQuery], keep: Callable[[BulkQuery, Mapping[str, Any]], None]
) -> None:
    """Run queries of a bulk together; `keep` is called with each and its answer, or its error, once it has ended."""
    from pictool.spans.running import node_seed

    ready: list[tuple[BulkQuery, Query]] = []
    for query in queries:
        try:
            ready.append((query, executor.optimise(query.query).after))
        except PicError as error:
            keep(query, {"error": str(error)})

    def keep_outcome(index: int, outcome: Result | QueryError) -> None:
        result: Mapping[str, Any] = (
            {"error": str(outcome)} if isinstance(outcome, PicError)
            else {"answer": outcome.text, "calls": [done.report() for done in outcome.done]}
        )  # fmt: skip
        keep(ready[index][0], result)

    seeds = [node_seed(executor.options.seed, (query.line,)) for query, _ in ready]
    executor.run_all([query for _, query in ready], keep_outcome, seeds)
