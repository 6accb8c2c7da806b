"""`pic estimate`: what a log of requests would gain from linking, before anything is installed for it."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.settings.options import MODEL, OUTPUT, JsonOption, argument, command, make_app, option
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.estimate.measure import Measure
    from pictool.estimate.readers import LogReader
    from pictool.estimate.report import Report
    from pictool.estimate.totals import Tokens
    from pictool.runtime.model import Model

app = make_app()
_NOTE_S = 30.0
_MAX_ROWS = 10  # of tenants
_KV_BYTES = 2 * 2 * 32 * 8 * 128  # of a token of Llama-3.1-8B in bfloat16


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `pic estimate`."""

    logs: Annotated[list[str], argument("LOG", "Request logs, plain or compressed with gzip or zstd; - is stdin.")] = (
        field(default_factory=list)
    )
    memory: Annotated[
        Optional[str],
        option(
            "--memory",
            "SIZE",
            "Use at most SIZE of memory; forgets old requests beyond it and prints the resulting error.",
        ),
    ] = None
    model: Annotated[
        Optional[str],
        option(
            "-m, --model",
            "NAME",
            ("Count tokens and KV bytes for this model, without reading its weights. Default: 4 bytes per token."),
            MODEL,
        ),
    ] = None
    top: Annotated[int, option("--top", "N", "List the N documents that save the most.", OUTPUT, min=0)] = 20
    text: Annotated[bool, option("--text", None, "Show how the listed documents begin, not just hashes.", OUTPUT)] = (
        False
    )
    as_json: JsonOption = False


@command(app, "estimate")
def run_estimate(options: EstimateOptions, settings: Settings) -> None:
    """Estimate from a log of requests what linking would save.

    \b
      pic estimate requests.jsonl
      pic estimate logs/*.jsonl.gz -m MODEL --top 5
      zstdcat month.zst | pic estimate - --memory 500M --json
    """
    from pictool.estimate.readers import LogReader

    if not options.logs:
        raise UsageError("nothing to estimate; specify request logs, or - for stdin")
    if options.logs.count("-") > 1:
        raise UsageError("-: stdin can be read only once")
    memory = memory_of(options)
    model = open_model(options.model)
    reader = LogReader(None if memory is None else memory // 8)
    measure = None
    try:
        for current in passes(options, model, memory, reader):
            measure = current
    except KeyboardInterrupt:
        if measure is not None:
            note("stopped; the report covers the requests read so far")
            show(options, finish(measure, reader, model))
        raise
    assert measure is not None  # a reader that finds no prompt raises
    show(options, finish(measure, reader, model))


def memory_of(options: EstimateOptions) -> int | None:
    """The bytes of --memory; None: no limit."""
    from pictool.commands.settings.types import parse_size

    with of_command_line():
        memory = None if options.memory is None else parse_size("--memory", options.memory)
        if memory is not None and memory < 16 << 20:
            raise InputError(f"--memory {options.memory}: must be 16MiB or more")
    return memory


def open_model(name: str | None) -> Model | None:
    """The model whose tokenizer counts, without its weights."""
    if name is None:
        return None
    from pictool.commands.settings.resources import quiet_libraries
    from pictool.runtime.model import load_model

    quiet_libraries()
    return load_model(name)


def passes(options: EstimateOptions, model: Model | None, memory: int | None, reader: LogReader) -> Iterator[Measure]:
    """Measure prompt after prompt; what was found so far is there after each."""
    from pictool.estimate.measure import Measure

    measure, said = None, time.monotonic()
    for prompt in reader.read(options.logs):
        if measure is None:
            are_ids = bool(prompt.segments) and not isinstance(prompt.segments[0].content, str) and model is None
            are_ids = are_ids and hasattr(prompt.segments[0].content, "dtype")
            measure = Measure(None if model is None else model.encode, are_ids, memory, options.text)
        measure.add(prompt)
        if time.monotonic() > said + _NOTE_S:
            said = time.monotonic()
            note(f"{count(measure.num_prompts, 'request')} read, {reader.num_bytes / 1e9:.2f} GB")
        yield measure


def finish(measure: Measure, reader: LogReader, model: Model | None) -> Report:
    """The report of what was read, and what could not be."""
    from pictool.estimate.report import Report

    left_out = reader.forms.left_out
    for problem in reader.problems:
        note(problem)
    if reader.unread.lines:
        note(f"{count(reader.unread.lines, 'line')} skipped; the first: {reader.unread.first}")
    reads = {
        "requests": measure.num_prompts, "bytes": reader.num_bytes, "forms": dict(reader.forms.found),
        "left_out": {"records": left_out.total(), "reasons": dict(left_out)},
        "lines": reader.num_lines, "unread": {"lines": reader.unread.lines, "first": reader.unread.first or None,
                                              "reasons": dict(reader.unread.reasons)},
        "problems": list(reader.problems),
    }  # fmt: skip
    if model is None:
        return Report(measure, measure.counting(None), reads, "llama-3.1-8b", _KV_BYTES)

    return Report(measure, measure.counting(model.name), reads, model.name, model.token_bytes)


def show(options: EstimateOptions, report: Report) -> None:
    if options.as_json:
        print_json(report.as_json(options.top))
    else:
        print_report(report, options.top)


def print_report(report: Report, top: int) -> None:
    """The tables, and the verdict last."""
    tokens = report.totals.tokens
    print(f"log        {', '.join(f'{number:,d} {name}' for name, number in report.reads['forms'].items())}")
    if left_out := report.reads["left_out"]["reasons"]:
        from pictool.estimate.readers import show_counts

        print(textwrap.fill(f"skipped    {show_counts(Counter(left_out))}", 80, subsequent_indent=" " * 11))
    if span := show_span(report.measure.series[::4]):
        print(f"time       {span}")
    print(f"tokens     {tokens.total:,.0f}, {report.counting}")
    print()
    print_shares(report)
    print_groups(report)
    print_prefill(report)
    print_documents(report, top)
    print()
    print(textwrap.fill(report.verdict(), 80))


def show_span(times: Iterable[float]) -> str:
    """The first and the last time of a log, UTC."""
    known = [moment for moment in times if moment == moment]
    if not known:
        return ""
    try:
        ends = [datetime.fromtimestamp(moment, UTC) for moment in (min(known), max(known))]
    except (OverflowError, ValueError, OSError):
        return ""
    return f"{ends[0]:%Y-%m-%d %H:%M} to {ends[1]:%Y-%m-%d %H:%M} UTC"


def print_shares(report: Report) -> None:
    tokens = report.totals.tokens
    for name, value, what in (
        ("prefix cache", tokens.prefix, "whole blocks of 16 tokens"),
        ("linkable beside it", tokens.linked, "messages, documents, blocks by content"),
    ):
        print(f"{name:<19}{value:>15,.0f}  {percent(value, tokens.total)}  {what}")
    if report.totals.forgotten:
        print(f"--memory was used up: both may miss {report.totals.forgotten:,.0f} tokens at most")


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:5.1f}%"


def print_groups(report: Report) -> None:
    """By kind of segment, and by tenant."""
    totals = report.totals
    groups: list[tuple[str, list[tuple[str, Tokens]]]] = [
        ("kind", sorted(totals.kinds.items(), key=lambda item: -item[1].total))
    ]
    if len(totals.tenants) > 1:
        groups.append(("tenant", sorted(totals.tenants.items(), key=lambda item: -item[1].total)[:_MAX_ROWS]))
    for name, entries in groups:
        print(f"\n{name:<19}{'tokens':>15}  {'prefix':>7}  {'linkable':>8}  {'new':>7}")
        for label, tokens in entries:
            parts = (tokens.prefix, tokens.linked, tokens.new)
            prefix, linked, new = (percent(part, tokens.total) for part in parts)
            print(f"{visible(label or '-')[:18]:<19}{tokens.total:>15,.0f}  {prefix:>7}  {linked:>8}  {new:>7}")


def print_prefill(report: Report) -> None:
    from pictool.estimate.report import show_bytes

    print(f"\n{'prefill':<19}{'tokens computed':>15}  {'share':>7}")
    for way, tokens in report.prefill.items():
        print(f"{way:<19}{tokens:>15,.0f}  {percent(tokens, report.totals.tokens.total):>7}")
    size = show_bytes(report.totals.distinct * report.kv_bytes)
    print(f"\nKV of all distinct text: {size} ({report.model})")


def print_documents(report: Report, top: int) -> None:
    shown = report.documents[:top]
    if not shown:
        return
    print(f"\n{'document':<18}{'kind':<10}{'tokens':>9}{'uses':>9}{'saved':>14}")
    for document in shown:
        text = "" if document.text is None else f"  {visible(' '.join(document.text.split()))[:18]}"
        print(
            f"{document.name:<18}{document.kind:<10}{document.tokens:>9,.0f}{document.uses:>9,d}"
            f"{document.saved:>14,.0f}{text}"
        )
