"""`pic estimate`: what a log of requests would gain from linking, before anything is installed for it."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.outputs import check_picture, print_json
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.settings.options import MODEL, OUTPUT, JsonOption, PlotOption, argument, command, make_app, option
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.estimate.costs import CostRates, ModelSize
    from pictool.estimate.measure import Measure
    from pictool.estimate.readers import LogReader
    from pictool.estimate.report import Report
    from pictool.estimate.segments import LoggedPrompt
    from pictool.estimate.totals import Tokens
    from pictool.runtime.model import Model

app = make_app()
_NOTE_S = 30.0
_MAX_ROWS = 10  # of tenants
_READ_GB_S = 10.0  # where only --tflops is stated: host memory over PCIe


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `pic estimate`."""

    logs: Annotated[list[str], argument("LOG", "Logs of requests, also compressed with gzip or zstd; - is stdin.")] = (
        field(default_factory=list)
    )
    min_tokens: Annotated[
        int, option("--min-tokens", "N", "Shortest repeat that counts, in tokens.", min=1, max=4096)
    ] = 16
    capacity: Annotated[
        list[str], option("--capacity", "SIZE", "Add a cache with SIZE bytes of KV to the table; repeatable.")
    ] = field(default_factory=list)
    memory: Annotated[
        Optional[str],
        option(
            "--memory", "SIZE", "Use at most SIZE of memory. Beyond it, numbers are estimates with a printed error."
        ),
    ] = None
    limit: Annotated[Optional[int], option("--limit", "N", "Read only N requests.", min=1)] = None
    model: Annotated[
        Optional[str],
        option(
            "-m, --model",
            "NAME",
            (
                "Count tokens with this model's tokenizer and take its sizes; no weights are read. "
                "Without it, 4 bytes are a token."
            ),
            MODEL,
        ),
    ] = None
    shape: Annotated[
        Optional[str],
        option("--shape", "NAME", "Take the sizes of this model (llama-3.1-8b). A wrong name lists all.", MODEL),
    ] = None
    tflops: Annotated[
        Optional[float],
        option("--tflops", "RATE", "TFLOP/s of prefill (from pic plan's profile of -m).", MODEL, min=1e-6),
    ] = None
    read_gb_s: Annotated[float, option("--read-gb-s", "RATE", "GB/s at which KV is loaded.", MODEL, min=1e-6)] = (
        _READ_GB_S
    )
    top: Annotated[int, option("--top", "N", "List N documents, those first that save the most.", OUTPUT, min=0)] = 20
    text: Annotated[bool, option("--text", None, "Show how the listed documents begin, not only hashes.", OUTPUT)] = (
        False
    )
    replay: Annotated[
        Optional[str],
        option(
            "--replay",
            "URL",
            (
                "Send requests to a running pic serve with the model of -m; compare its reports with the prediction. "
                "Pasted documents that repeat are compiled first."
            ),
        ),
    ] = None
    sample: Annotated[int, option("--sample", "N", "Requests that --replay sends.", min=1)] = 20
    plot: PlotOption = None
    as_json: JsonOption = False


@command(app, "estimate")
def run_estimate(options: EstimateOptions, settings: Settings) -> None:
    """Estimate what linking would save on a log of requests.

    \b
      pic estimate requests.jsonl
      pic estimate logs/*.jsonl.gz -m MODEL --top 5
      zstdcat month.zst | pic estimate - --memory 500M --json
    """
    from pictool.estimate.readers import LogReader

    check_options(options)
    model, size = open_model(options)
    rates = make_rates(options, model, size)
    memory = sizes(options)[1]
    reader = LogReader(None if memory is None else memory // 8)
    prompts = limited(reader.read(options.logs), options.limit)
    if options.replay is not None:
        run_replay(options, settings, model, prompts)
        return
    measure = None
    try:
        for current in passes(options, model, size, prompts, reader):
            measure = current
    except KeyboardInterrupt:
        if measure is not None:
            note("stopped; the report covers the requests read so far")
            show(options, finish(measure, reader, model, size, rates))
        raise
    assert measure is not None  # a reader that finds no prompt raises
    show(options, finish(measure, reader, model, size, rates))


def check_options(options: EstimateOptions) -> None:
    """Refuse what makes no sense, before a log is read."""
    if not options.logs:
        raise UsageError("nothing to estimate; name logs of requests, or - for stdin")
    if options.logs.count("-") > 1:
        raise UsageError("-: stdin can be read only once")
    if options.replay is not None and options.model is None:
        raise UsageError("--replay: needs -m, the server's model, to count tokens")
    if options.plot is not None:
        check_picture(options.plot, [name for name in options.logs if name != "-"])
    with of_command_line():
        sizes(options)


def sizes(options: EstimateOptions) -> tuple[list[int], int | None]:
    """The bytes of --capacity, and of --memory. Raises InputError."""
    from pictool.commands.console.sizes import parse_size

    memory = None if options.memory is None else parse_size("--memory", options.memory)
    if memory is not None and memory < 16 << 20:
        raise InputError(f"--memory {options.memory}: must be 16MiB or more")
    capacities = [parse_size("--capacity", text) for text in options.capacity]
    if 0 in capacities:
        raise InputError("--capacity: must be above 0")
    return capacities, memory


def open_model(options: EstimateOptions) -> tuple[Model | None, ModelSize]:
    """The model whose tokenizer counts, without its weights; and the sizes of it, or of the shape."""
    from pictool.estimate.costs import DEFAULT_SHAPE, ModelSize

    model = None
    if options.model is not None:
        from pictool.commands.settings.resources import quiet_libraries
        from pictool.runtime.model import load_model

        quiet_libraries()
        model = load_model(options.model)
    if options.shape is not None or model is None:
        from pictool.bench.shapes import shape_of

        with of_command_line():
            shape = shape_of(options.shape or DEFAULT_SHAPE)
        return model, ModelSize.of(shape.name, shape.config)
    return model, ModelSize.of(model.name, model.config.to_dict())


def make_rates(options: EstimateOptions, model: Model | None, size: ModelSize) -> CostRates | None:
    """The rates that are stated, else those of `pic plan`'s profile of this model; None: neither is there."""
    from pictool.estimate.costs import CostRates

    if options.tflops is not None:
        return CostRates.stated(size, options.tflops, options.read_gb_s)
    if model is None:
        return None
    from pictool.controller.profile import known_prefill

    fitted = known_prefill(model)
    if fitted is None:
        return None
    source = f"pic plan's profile of {model.name} here, {options.read_gb_s:g} GB/s"
    return CostRates(fitted.token_s, 2 * fitted.pair_s, 1 / (options.read_gb_s * 1e9), source)


def limited(prompts: Iterator[LoggedPrompt], limit: int | None) -> Iterator[LoggedPrompt]:
    from itertools import islice

    return prompts if limit is None else islice(prompts, limit)


def passes(
    options: EstimateOptions, model: Model | None, size: ModelSize, prompts: Iterable[LoggedPrompt], reader: LogReader
) -> Iterator[Measure]:
    """Measure prompt after prompt; what was found so far is there after each."""
    from pictool.estimate.measure import CAPACITIES, Measure

    bytes_asked, memory = sizes(options)
    capacities = sorted({*CAPACITIES, *(max(1, asked // size.kv_bytes) for asked in bytes_asked)})
    measure, said = None, time.monotonic()
    for prompt in prompts:
        if measure is None:
            are_ids = bool(prompt.segments) and not isinstance(prompt.segments[0].content, str) and model is None
            are_ids = are_ids and hasattr(prompt.segments[0].content, "dtype")
            tokenize = None if model is None else model.encode
            measure = Measure(options.min_tokens, tokenize, are_ids, capacities, memory, options.text)
        measure.add(prompt)
        if time.monotonic() > said + _NOTE_S:
            said = time.monotonic()
            note(f"{count(measure.num_prompts, 'request')} read, {reader.num_bytes / 1e9:.2f} GB")
        yield measure


def finish(
    measure: Measure, reader: LogReader, model: Model | None, size: ModelSize, rates: CostRates | None
) -> Report:
    """The report of what was read, and what could not be."""
    from pictool.estimate.report import Report

    left_out = reader.forms.left_out
    for problem in reader.problems:
        note(problem)
    if reader.unread.lines:
        note(f"{count(reader.unread.lines, 'line')} not read; the first: {reader.unread.first}")
    reads = {
        "requests": measure.num_prompts, "bytes": reader.num_bytes, "forms": dict(reader.forms.found),
        "left_out": {"records": left_out.total(), "reasons": dict(left_out)},
        "lines": reader.num_lines, "unread": {"lines": reader.unread.lines, "first": reader.unread.first or None,
                                              "reasons": dict(reader.unread.reasons)},
        "problems": list(reader.problems),
    }  # fmt: skip
    return Report(measure, measure.counting(None if model is None else model.name), reads, size, rates)


def show(options: EstimateOptions, report: Report) -> None:
    """Print a report, and draw it."""
    if options.plot is not None:
        from pictool.estimate.plot import write

        note(f"wrote {' and '.join(map(str, write(report, options.plot)))}")
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

        print(textwrap.fill(f"left out   {show_counts(Counter(left_out))}", 80, subsequent_indent=" " * 11))
    if span := show_span(report.measure.series[::5]):
        print(f"time       {span}")
    print(f"tokens     {tokens.total:,.0f}, {report.counting}")
    if spent := report.totals.tokenizer_s:
        print(f"tokenizer  {percent(spent, report.totals.seconds).strip()} of {report.totals.seconds:,.1f} seconds")
    print()
    print_shares(report)
    print_groups(report)
    print_capacities(report)
    print_prefill(report)
    print_losses(report)
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
    tokens, cannot = report.totals.tokens, "this log cannot tell"
    rows = [("prefix cache", tokens.prefix, "whole blocks of 16 tokens")]
    rows.append(("linkable beside it", tokens.linked, "messages, documents, blocks by content"))
    measure = report.measure
    rate = measure.sample_rate
    sampled = f"+-{report.totals.most_error:,.0f}, one window in {rate}" if rate > 1 else "exact"
    rows.append(("reusable at most", tokens.most, f"repeats of {measure.scale.min_tokens} tokens or more, {sampled}"))
    known = (True, measure.linked_is_known, measure.most_is_known)
    for (name, value, what), is_known in zip(rows, known, strict=True):
        number = f"{value:>15,.0f}  {percent(value, tokens.total)}" if is_known else f"{'-':>15}  {'-':>6}"
        print(f"{name:<19}{number}  {what if is_known else cannot}")
    if report.totals.forgotten:
        print(f"--memory was used up: the first two may miss {report.totals.forgotten:,.0f} tokens at most")


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:5.1f}%"


def print_groups(report: Report) -> None:
    """By kind of segment, tenant and hour."""
    totals = report.totals
    groups: list[tuple[str, list[tuple[str, Tokens]]]] = [
        ("kind", sorted(totals.kinds.items(), key=lambda item: -item[1].total))
    ]
    if len(totals.tenants) > 1:
        groups.append(("tenant", sorted(totals.tenants.items(), key=lambda item: -item[1].total)[:_MAX_ROWS]))
    if len(totals.hours) > 1:
        groups.append(("hour UTC", [(f"{hour:02d}", totals.hours[hour]) for hour in sorted(totals.hours)]))
    for name, entries in groups:
        print(f"\n{name:<19}{'tokens':>15}  {'prefix':>7}  {'linkable':>8}  {'at most':>7}  {'new':>7}")
        for label, tokens in entries:
            parts = (tokens.prefix, tokens.linked, tokens.most, tokens.total - tokens.prefix - tokens.linked)
            prefix, linked, most, new = (percent(part, tokens.total) for part in parts)
            most = most if report.measure.most_is_known else "-"
            print(
                f"{visible(label or '-')[:18]:<19}{tokens.total:>15,.0f}  {prefix:>7}  {linked:>8}  {most:>7}  {new:>7}"
            )


def print_capacities(report: Report) -> None:
    from pictool.estimate.report import show_bytes

    print(f"\n{'LRU cache of':<19}{f'KV of {report.size.name}'[:20]:>20}  {'prefix':>7}  {'linkable':>8}")
    total, last = report.totals.tokens.total, (0.0, 0.0)
    for capacity, prefix, linked in report.curve():
        if (prefix, linked) != last:
            print(
                f"{f'{capacity:,d} tokens':<19}{show_bytes(capacity * report.size.kv_bytes):>20}  "
                f"{percent(prefix, total):>7}  {percent(linked, total):>8}"
            )
        last = (prefix, linked)
    print(
        f"{'all that is different':<24}{show_bytes(report.totals.distinct * report.size.kv_bytes):>15}  "
        f"{percent(report.totals.tokens.prefix, total):>7}  {percent(report.totals.tokens.linked, total):>8}"
    )


def print_prefill(report: Report) -> None:
    from pictool.estimate.totals import WAYS

    print(f"\n{'prefill':<19}{'tokens computed':>15}  {'share':>7}  {'PFLOP':>10}  {'seconds':>10}")
    none = report.totals.computed["none"].rows
    for way in WAYS:
        computed, seconds = report.totals.computed[way], report.seconds(way)
        print(
            f"{way:<19}{computed.rows:>15,.0f}  {percent(computed.rows, none):>7}  "
            f"{report.size.flops(computed) / 1e15:>10,.3g}  {'-' if seconds is None else f'{seconds:,.1f}':>10}"
        )
    if report.rates is not None:
        print(f"at {report.rates.source}"[:80])
    if even := report.break_even:
        if even.least_tokens is None:
            print("loading KV takes longer than computing it: linking saves no time here")
        else:
            uses = "never" if even.uses is None else f"by {count(even.uses, 'use')}"
            print(f"linking is quicker from {even.least_tokens} tokens on; {even.tokens} tokens are repaid {uses}")


def print_losses(report: Report) -> None:
    totals = report.totals
    print(
        f"\nin blocks of 16 tokens, {totals.losses['linked 16']:,d} linkable ones are lost; of 256, "
        f"{totals.losses['linked 256']:,d},\nand {totals.losses['prefix 256']:,d} of prefixes"
    )
    if totals.border_loss is not None:
        print(f"a border of two parts merges {totals.border_loss:.1f} tokens in the mean")
    if totals.outputs is not None:
        print(f"outputs: {totals.outputs:,.0f} tokens, of which {totals.returned or 0:,.0f} came back in prompts")


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


def run_replay(
    options: EstimateOptions, settings: Settings, model: Model | None, prompts: Iterator[LoggedPrompt]
) -> None:
    """Send requests to a server, and compare what it reuses with what is predicted."""
    from pictool.estimate.replay import ReplayServer, replay

    assert options.replay is not None and model is not None
    server = ReplayServer(options.replay, settings.server_key)
    rows, num_within = list[dict[str, Any]](), 0
    for compared in replay(server, prompts, model.encode, options.sample):
        rows.append(vars(compared))
        if not options.as_json:
            edges = f"  {compared.edges:,d} at edges" if compared.edges else ""
            numbers = f"{compared.predicted:>9,d} predicted{compared.reported:>9,d} reported"
            print(f"request {compared.number:<6}{numbers}{edges}")
        num_within += compared.is_as_predicted
    same = sum(row["predicted"] == row["reported"] for row in rows)
    if options.as_json:
        print_json({"requests": rows, "equal": same, "within_edges": num_within})
    else:
        print(f"{same} of {count(len(rows), 'request')}: the same to the token; {num_within} within the edges")
