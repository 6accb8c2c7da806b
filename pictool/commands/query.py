"""`pic query`: a span query to its answer, or what the optimizer makes of it; or a file of queries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.engine import find_engine
from pictool.commands.errors import UsageError
from pictool.commands.link import Stream
from pictool.commands.options import (
    ANSWER,
    COMPILING,
    OUTPUT,
    POLICY,
    SALT,
    CodecOption,
    EngineOption,
    FieldsOption,
    JsonOption,
    PlotOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.outputs import note, output_path, print_json
from pictool.commands.progress import answers_bar
from pictool.commands.request import parse_fields
from pictool.commands.resources import open_model, open_store, quiet_libraries
from pictool.commands.settings import Settings
from pictool.errors import InputError, PicError

if TYPE_CHECKING:
    from pictool.engines.base import Answer, Engine, Feature
    from pictool.spans.bulk import BulkQuery, Schedule
    from pictool.spans.execute import Done, Executor, Hooks, RunOptions
    from pictool.spans.optimise import Optimised
    from pictool.spans.query import Path as NodePath
    from pictool.spans.query import Query

app = make_app()
_LOCAL = ("pic", "spnl", "local")  # providers whose models run here
_ELSEWHERE = ("ollama", "openai", "gemini", "anthropic", "mistralrs", "candle")


@dataclass(frozen=True)
class QueryOptions:
    """What a command line says of how a query is run."""

    algo: Annotated[
        Optional[str], option("--algo", "NAME", "Policy of linking spans; a wrong name lists all.", POLICY)
    ] = None
    k: Annotated[Optional[int], option("-k", "N", "Tokens recomputed at the start of each span.", POLICY)] = None
    ratio: Annotated[Optional[float], option("--ratio", "SHARE", "Share of rows that is recomputed.", POLICY)] = None
    params: FieldsOption = field(default_factory=list)
    tree: Annotated[
        Optional[int], option("--tree", "N", "Judge at most N candidates at a time, as a tree.", POLICY, min=2)
    ] = None
    max_new_tokens: Annotated[
        Optional[int], option("--max-new-tokens", "N", "Tokens of calls that say nothing (64).", ANSWER, min=1)
    ] = None
    top_p: Annotated[float, option("--top-p", "P", "Nucleus sampling.", ANSWER)] = 1.0
    seed: Annotated[int, option("--seed", "N", "Seed; every call has its own.", ANSWER, min=0, max=2**64 - 1)] = 0
    max_tokens: Annotated[
        Optional[int], option("--budget-tokens", "N", "Generated tokens at most, of all calls.", ANSWER, min=1)
    ] = None
    max_seconds: Annotated[Optional[float], option("--budget-seconds", "S", "No call begins later.", ANSWER, min=0)] = (
        None
    )
    outputs: Annotated[
        Optional[str],
        option("--outputs", "NAME", "generated: link outputs with the KV they came with; or compiled.", COMPILING),
    ] = None
    codec: CodecOption = None


@command(app, "query", "model", "device", "dtype", "store", "remote", *SALT)
def run_query(
    query: Annotated[str, argument("FILE", "A query as JSON or YAML; - is stdin.")],
    options: QueryOptions,
    settings: Settings,
    explain: Annotated[bool, option("--explain", None, "Print the tree before and after; run nothing.")] = False,
    bulk: Annotated[bool, option("--bulk", None, "FILE has a query a line, in JSON; run all.")] = False,
    output: Annotated[
        Optional[str], option("-o, --output", "FILE", "Answers of --bulk; a run that stopped goes on.", OUTPUT)
    ] = None,
    plot: PlotOption = None,
    trace: Annotated[Optional[str], option("--trace", "DIR", "Write a trace of every call.", OUTPUT)] = None,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Run a span query: a program over model calls.

    \b
      pic query rag.yaml --explain
      pic query judge.json --algo full --seed 7
    """
    check_options(query, explain, bulk, output, plot, trace)
    if options.outputs not in (None, "generated", "compiled"):
        raise UsageError(f"--outputs {options.outputs}: must be generated or compiled")
    needed: dict[Feature, str] = {} if options.outputs != "generated" else {"trace": "--outputs generated"}
    engine_type = find_engine(engine, needed | ({} if trace is None else {"trace": "--trace"}))
    text, name, base = read_input(query)
    keeps_outputs = options.outputs != "compiled" and "trace" in engine_type.supports
    if options.outputs is None and not keeps_outputs:
        note(f"{engine_type.title} keeps no KV of outputs; they are compiled (--outputs compiled)")
    run_options = make_options(options, settings, base, keeps_outputs)
    quiet_libraries()
    store = open_store(settings)
    with ExitStack() as running:
        engines = Engines(lambda of: running.enter_context(engine_type(open_model(of), store)), settings)
        from pictool.spans.execute import Executor

        if bulk:
            run_bulk(Executor(engines, run_options), text, name, explain, output, settings.memory, as_json)
        else:
            run_one(engines, run_options, text, name, explain, plot, trace, as_json)
    store.drain()


def check_options(
    query: str, explain: bool, bulk: bool, output: str | None, plot: str | None, trace: str | None
) -> None:
    """Refuse options that make no sense together, and files that cannot be written."""
    if bulk and (plot or trace):
        raise UsageError(f"{'--plot' if plot else '--trace'}: is of one query, not of --bulk")
    if output is not None and not bulk:
        raise UsageError("-o: is for the answers of --bulk; use --json and > FILE")
    if explain and trace is not None:
        raise UsageError("--trace: --explain runs nothing")
    if plot is not None:
        if not plot.endswith(".svg"):
            raise InputError(f"--plot {plot}: trees are drawn as .svg")
        output_path("--plot", plot, [query])
    if output is not None:
        output_path("-o", output, [query])
    if trace is not None and Path(trace).exists() and (not Path(trace).is_dir() or any(Path(trace).iterdir())):
        raise InputError(f"--trace {trace}: has to be an empty or a new folder; name another")


def read_input(name: str) -> tuple[str, str, Path]:
    """The text of a query, its name for messages, and the folder that its files are relative to."""
    from pictool.compiler.chunking import read_text

    if name == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8-sig"), "stdin", Path()
        except UnicodeDecodeError as error:
            raise InputError(f"stdin: not UTF-8 at byte {error.start}; convert it first") from error
    return read_text(Path(name)), name, Path(name).parent


def make_options(options: QueryOptions, settings: Settings, base: Path, keeps_outputs: bool) -> RunOptions:
    """How the queries are run."""
    from pictool.linker.policies import DEFAULT, make_policy
    from pictool.linker.spec import MAX_NEW_TOKENS
    from pictool.spans.execute import Budget, RunOptions

    values: dict[str, Any] = {"k": options.k, "ratio": options.ratio}
    stated = {name: value for name, value in values.items() if value is not None}
    return RunOptions(
        policy=make_policy(options.algo or DEFAULT, stated | parse_fields(options.params)),
        max_new_tokens=options.max_new_tokens or MAX_NEW_TOKENS,
        top_p=options.top_p,
        seed=options.seed,
        codec=options.codec or settings.codec,
        base=base,
        arity=options.tree,
        keeps_outputs=keeps_outputs,
        budget=Budget(options.max_tokens, options.max_seconds),
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
        from pictool.spans.query import DEFAULT_MODEL

        if self._settings.option("model") is not None or model == DEFAULT_MODEL:
            return self._settings.model
        provider, slash, rest = model.partition("/")
        if slash and provider in _ELSEWHERE:
            raise InputError(f"model {model!r} is {provider}'s and does not run here; name one of your own with -m")
        return rest if slash and provider in _LOCAL else model


def run_one(
    engines: Engines, options: RunOptions, text: str, name: str, explain: bool, plot: str | None, trace: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Run, or explain, the query of a text."""
    from pictool.spans.execute import Executor

    traces = TraceWriter(Path(trace)) if trace is not None else None
    executor = Executor(engines, options, make_hooks(as_json, traces))
    optimised = executor.optimise(parse(text, name))
    if plot is not None:
        write_plot(plot, optimised)
    if explain:
        if as_json:
            print_json(explain_report(optimised))
        else:
            print(optimised.explain())
        return
    result = executor.run(optimised.after)
    if as_json:
        print_json({"answer": result.text, **explain_report(optimised), "calls": [d.report() for d in result.done]})
    elif not is_call(optimised.after):  # the text of a call has been streamed
        print(result.text)


def parse(text: str, name: str) -> Query:
    from pictool.spans.reading import read_query

    return read_query(text, name, True if name.endswith((".yaml", ".yml")) else None)


def is_call(query: Query) -> bool:
    from pictool.spans.query import Chat, Generate

    return isinstance(query, Generate | Chat)


def explain_report(optimised: Optimised) -> dict[str, Any]:
    """The trees, the rules that fired and the calls that run once, for JSON."""
    from pictool.spans.query import path_text
    from pictool.spans.reading import to_data

    steps = [
        {"rule": step.rule, "effect": step.effect.name.lower(), "path": path_text(step.path),
         "before": step.before, "after": step.after}
        for step in optimised.steps
    ]  # fmt: skip
    shared = {path_text(path): path_text(first) for path, first in optimised.shared.items()}
    return {"query": to_data(optimised.before), "optimised": to_data(optimised.after), "steps": steps, "shared": shared}


def write_plot(path: str, optimised: Optimised) -> None:
    from pictool.spans.draw import draw
    from pictool.store.store import atomic_write

    with atomic_write(Path(path)) as file:
        file.write(draw([("before", optimised.before), ("after", optimised.after)]).encode())


class TraceWriter:
    """Writes the trace of each call into a folder: 0001.trace, … in the order in which calls end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __call__(self, path: NodePath, answer: Answer) -> None:
        from pictool.spans.query import path_text

        self._folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        file = self._folder / f"{self._count:04}.trace"
        answer.write_trace(file)
        note(f"{file}: {path_text(path)}")


def make_hooks(is_quiet: bool, traces: TraceWriter | None) -> Hooks:
    from pictool.spans.execute import Hooks

    more: dict[str, Any] = {} if traces is None else {"on_answer": traces}
    return Hooks(
        on_done=lambda done: print_call(done, is_streamed=not is_quiet and not done.path),
        on_text=None if is_quiet else Stream(), on_print=note, ask=ask, **more,
    )  # fmt: skip


def ask(text: str) -> str:
    """What the user types. Raises InputError without a terminal."""
    if not sys.stdin.isatty():
        raise InputError(f"asks {text!r}, but stdin is no terminal; run it from one")
    print(text, end=" ", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


def print_call(done: Done, is_streamed: bool) -> None:
    """A line on stderr for a call that has ended, after the line of its text on stdout."""
    from pictool.spans.query import path_text

    if is_streamed:
        print(flush=True)
    if done.is_shared:
        note(f"{path_text(done.path)}: as an equal call before")
        return
    tokens, timing = done.own["tokens"], done.own["timing"]
    note(
        f"{path_text(done.path)}: {tokens['recomputed']:.0f} of {tokens['context']} context rows recomputed, "
        f"TTFT {timing['ttft_s'] * 1e3:.1f} ms, {tokens['generated']} tokens"
    )


def run_bulk(
    executor: Executor, text: str, name: str, explain: bool, output: str | None, memory: int, as_json: bool
) -> None:
    """Run the queries of a file, one a line, in the order that lets shared texts meet; or print that order."""
    from pictool.spans.bulk import AnswerFile, read_bulk

    queries = read_bulk(text, name)
    planned = plan_bulk(executor, queries, memory)
    ordered = [queries[index] for index in planned.order]
    if explain:
        print_schedule(planned, ordered, as_json)
        return
    answers = AnswerFile(Path(output), queries) if output is not None else None
    results: dict[int, Mapping[str, Any]] = dict(answers.answered) if answers is not None else {}
    with answers_bar(name) as show:
        show(len(results), len(queries))
        for query in ordered:
            if query.line not in results:
                results[query.line] = answer_line(executor, query)
                if answers is not None:
                    answers.append(query, results[query.line])
                show(len(results), len(queries))
    if as_json:
        print_json([{"line": line, **results[line]} for line in sorted(results)])
    elif output is None:
        for line in sorted(results):
            print(results[line].get("answer", ""))
    failed = [line for line, result in sorted(results.items()) if "error" in result]
    if failed:
        first = results[failed[0]]["error"]
        raise InputError(f"{name}: {len(failed)} of {len(queries)} queries failed; line {failed[0]}: {first}")


def plan_bulk(executor: Executor, queries: Sequence[BulkQuery], memory: int) -> Schedule:
    """The order of a bulk for a cache of `memory` bytes of KV (`memory` of pic.yaml); without one, of one query's."""
    from pictool.spans.bulk import items_of, schedule
    from pictool.spans.query import DEFAULT_MODEL

    model = executor.engine_of(DEFAULT_MODEL).model
    geometry = model.geometry
    token_bytes = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * model.torch_dtype.itemsize

    def size(text: str) -> int:
        return len(model.encode(text)) * token_bytes

    items = [items_of(query.query, executor.options.base, size) for query in queries]
    return schedule(items, memory or max(sum(sizes.values()) for sizes in items))


def print_schedule(planned: Schedule, ordered: Sequence[BulkQuery], as_json: bool) -> None:
    lines = [query.line for query in ordered]
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


def answer_line(executor: Executor, query: BulkQuery) -> Mapping[str, Any]:
    """The answer of one query of a bulk, or its error."""
    try:
        result = executor.run(executor.optimise(query.query).after)
    except PicError as error:
        return {"error": str(error)}
    return {"answer": result.text, "calls": [done.report() for done in result.done]}
