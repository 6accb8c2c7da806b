"""`pic inspect TRACE…`: show what links did, and analyse them with the model where an option says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import note, open_model, open_store
from pictool.trace.counts import TraceCounts, count_rows
from pictool.trace.format import Trace, read_trace

if TYPE_CHECKING:
    from pictool.commands.inspect import InspectOptions
    from pictool.runtime.model import Model
    from pictool.trace.analysis import TraceAnalysis

MAX_TOKENS = 2000  # of a text that is shown without --text


def inspect_traces(paths: Sequence[Path], options: InspectOptions, *, as_json: bool) -> list[dict[str, Any]]:
    """Show traces one after the other; returns what `--json` prints of each."""
    traces = [read_trace(path) for path in paths]
    analyses = _analyse(traces, paths, options)
    for analysis in analyses:
        if analysis is not None and analysis.attention is not None:
            analysis.attention.require(options.layer, options.head)
    reports = []
    for path, trace, analysis in zip(paths, traces, analyses, strict=True):
        counts = count_rows(trace)
        if not as_json:
            _print(path, trace, counts, analysis, options)
        reports.append(_json(path, trace, counts, analysis, options))
    if options.plot:
        _plot(Path(options.plot), traces, analyses, options)
    return reports


def num_initial(options: InspectOptions) -> int:
    """How many tokens of a part count as initial."""
    from pictool.trace.attention_sinks import NUM_INITIAL

    return options.first or NUM_INITIAL


def _analyse(traces: Sequence[Trace], paths: Sequence[Path], options: InspectOptions) -> list[TraceAnalysis | None]:
    """Analyse every trace as the options say; a model is loaded once for all traces that name it."""
    needs_attention = options.attention or options.sinks
    if not needs_attention and options.against is None:
        return [None] * len(traces)
    from pictool.trace.analysis import analyse_trace

    store = open_store(options.store)
    models: dict[tuple[str, str], Model] = {}
    analyses: list[TraceAnalysis | None] = []
    for trace, path in zip(traces, paths, strict=True):
        named = (options.model or trace.report["model"], options.dtype or trace.target.dtype)
        if named not in models:
            models[named] = open_model(named[0], options.device, named[1])
        analyses.append(analyse_trace(
            models[named], store, trace, str(path), attention=needs_attention, deviation=options.against is not None,
            layer=options.layer,
            on_compile=lambda done: note(f"compiled {done.chunk.source} first ({len(done.chunk)} tokens)"),
        ))  # fmt: skip
    return analyses


def _print(
    path: Path, trace: Trace, counts: TraceCounts, analysis: TraceAnalysis | None, options: InspectOptions
) -> None:
    from pictool.commands.show_look import show_attention, show_attention_sinks, show_deviation
    from pictool.commands.show_trace import show_text, show_trace

    show_trace(path, trace, counts)
    if options.text or trace.layout.num_tokens <= MAX_TOKENS:
        show_text(trace, counts)
    else:
        note(f"{path}: {trace.layout.num_tokens} tokens; --text shows them")
    if analysis is None:
        return
    if analysis.attention is not None and options.sinks:
        show_attention_sinks(trace, analysis.attention, num_initial(options))
    if analysis.attention is not None and options.attention:
        show_attention(trace, analysis.attention, options.layer, options.head, options.scale)
    if analysis.deviation is not None:
        show_deviation(trace, analysis.deviation, analysis.choices)


def _json(
    path: Path, trace: Trace, counts: TraceCounts, analysis: TraceAnalysis | None, options: InspectOptions
) -> dict[str, Any]:
    from pictool.commands.trace_json import analysis_json, trace_json

    of_trace = trace_json(str(path), trace, counts, has_text=options.text)
    return of_trace if analysis is None else of_trace | analysis_json(trace, analysis, options)


def _plot(
    target: Path, traces: Sequence[Trace], analyses: Sequence[TraceAnalysis | None], options: InspectOptions
) -> None:
    """Draw one picture: deviation, attention, attention sinks, or (the default) selections."""
    from pictool.trace import plots

    analysed = [(trace, analysis) for trace, analysis in zip(traces, analyses, strict=True) if analysis is not None]
    maps = [(trace, analysis.attention) for trace, analysis in analysed if analysis.attention is not None]
    if options.against is not None:
        links = [(trace, analysis.deviation) for trace, analysis in analysed if analysis.deviation is not None]
        figure = plots.draw_deviation(links)
    elif options.attention:
        figure = plots.draw_attention(maps, options.layer, options.head, options.scale)
    elif options.sinks:
        figure = plots.draw_share_by_offset(maps)
    else:
        figure = plots.draw_selection(traces)
    plots.save(figure, target)
