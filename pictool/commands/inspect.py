"""`pic inspect`: what an object is, or what a link or a query's run did. Loads no torch unless it needs a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.console.pager import paged
from pictool.commands.console.verbosity import note
from pictool.commands.link import note_compiled
from pictool.commands.settings.options import (
    SALT,
    argument,
    command,
    make_app,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.commands.traces.options import InspectOptions
from pictool.errors import InputError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.objects.format import ObjectFile
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.counts import TraceCounts
    from pictool.trace.format import Trace

MAX_TOKENS = 2000  # of a text that is shown without --text


app = make_app()


@command(app, "inspect", "model", "device", "dtype", "store", *SALT)
def run_inspect(
    names: Annotated[list[str], argument("NAME", "Object files, keys or traces, or the run of a query.")],
    options: InspectOptions,
    settings: Settings,
) -> None:
    """Show an object or the steps of a link; compare two links.

    \b
      pic inspect a.kvo --text
      pic inspect link.trace --attention --against full
      pic inspect legolink.trace cacheblend.trace --diff
    """
    from pictool.commands.traces.diff_form import show_diff
    from pictool.commands.traces.run_form import inspect_run
    from pictool.tui.services import is_run_path

    with nullcontext() if options.as_json else paged():
        if options.diff:
            if len(names) != 2 or options != InspectOptions(diff=True, as_json=options.as_json):
                raise UsageError("--diff: compares two traces; specify exactly two, without other options")
            show_diff((names[0], names[1]), options.as_json)
        elif any(is_run_path(Path(name)) for name in names):
            inspect_run(names, options)
        else:
            inspect_files(names, options, settings)


def inspect_files(names: Sequence[str], options: InspectOptions, settings: Settings) -> None:
    """Show objects, or traces."""
    from pictool.trace.format import is_trace

    paths = [find(name, settings) for name in names]
    traces = [path for path in paths if is_trace(path)]
    if traces and len(traces) < len(paths):
        raise UsageError(f"{traces[0]}: objects and traces cannot be inspected together; specify one kind")
    check_options(options, bool(traces), names[0])
    reports = inspect_traces(traces, options, settings) if traces else [_inspect_file(path, options) for path in paths]
    if options.as_json:
        print_json(reports[0] if len(reports) == 1 else reports)


def find(name: str, settings: Settings) -> Path:
    """The file, or the object in the store that has this key."""
    path = Path(name)
    if path.is_file():
        return path
    if path.exists():
        raise InputError(f"{name}: is not a regular file; specify an object, a trace or a key")
    if path.suffix == ".kvo":
        raise InputError(f"{name}: no such object file")
    store = open_store(settings)
    return store.path(store.resolve(name))


def check_options(options: InspectOptions, of_traces: bool, name: str) -> None:
    """Refuse options that do not apply to the kind of `name`, or to a view that is not shown."""
    if options.against not in (None, "full"):
        raise UsageError(f"--against {options.against}: must be full; use --diff to compare two traces")
    if not of_traces and (options.attention or options.against or options.layers):
        raise UsageError(f"{name}: not a trace; --attention, --against and --layers need one (pic link --trace)")
    if not options.attention and (options.layer is not None or options.head is not None):
        raise UsageError("--layer and --head need --attention")


# Objects


def _inspect_file(path: Path, options: InspectOptions) -> dict[str, Any]:
    """Show an object, or a list of objects; returns what `--json` prints."""
    from pictool.store.objects.bundles import is_object_list, read_object_list

    if not is_object_list(path):
        return inspect_object(path, options)
    report = {"path": str(path), "objects": [str(member.path) for member in read_object_list(path)]}
    if not options.as_json:
        _print_fields(report)
    return report


def inspect_object(path: Path, options: InspectOptions) -> dict[str, Any]:
    """Show an object; returns what `--json` prints."""
    from pictool.store.objects.format import ObjectFile

    with ObjectFile(path) as file:
        report = _fields(file)
        if options.text:
            report["text"] = file.text()
        checksums = file.checksums
    if not options.as_json:
        if "header" in options.sections:
            _print_fields({name: value for name, value in report.items() if name != "text"})
        if options.text:
            print(report["text"])
    return report | {"checksums": checksums}


def _fields(file: ObjectFile) -> dict[str, Any]:
    meta, target = file.meta, file.meta.target
    return {
        "path": str(file.path), "key": meta.key, "architecture": target.architecture, "model": target.model,
        "tokenizer": target.tokenizer, "tokens": meta.num_tokens, **target.geometry.fields, "dtype": target.dtype,
        "before": meta.num_before, "codec": meta.codec, "bytes": file.num_bytes, "layer_bytes": file.layer_bytes,
        **_states(file),
        **({} if meta.parent is None else {"parent": meta.parent or "none (the first block of a chain)"}),
    }  # fmt: skip


def _states(file: ObjectFile) -> dict[str, Any]:
    """Of a hybrid's object its cut, the bytes of its states, and how many tokens have KV of as many."""
    if file.meta.target.geometry.states is None:
        return {}
    token_bytes = file.layer_bytes * file.meta.target.geometry.layers / file.meta.num_tokens
    tokens, cut = math.ceil(file.state_bytes / token_bytes), file.meta.cut
    return {**({} if cut is None else {"cut": cut}), "state_bytes": file.state_bytes, "state_tokens": tokens}


def _print_fields(report: dict[str, Any]) -> None:
    for name, value in report.items():
        print(f"{name:<13}{value if name == 'text' else visible(str(value))}")


# Traces


def inspect_traces(paths: Sequence[Path], options: InspectOptions, settings: Settings) -> list[dict[str, Any]]:
    """Show traces; returns what `--json` prints of each."""
    from pictool.commands.console.terminal import heading, open_screen
    from pictool.commands.traces.json_form import analysis_json, trace_json
    from pictool.trace.counts import count_rows
    from pictool.trace.format import read_trace

    traces = [read_trace(path) for path in paths]
    analyses = analyse(traces, paths, options, settings)
    for analysis in analyses:
        if analysis is not None and analysis.attention is not None:
            analysis.attention.require(options.layer, options.head)
    counts = [count_rows(trace) for trace in traces]
    if not options.as_json:
        for path, trace, count, analysis in zip(paths, traces, counts, analyses, strict=True):
            if len(traces) > 1:
                heading(open_screen(), f"== {visible(str(path))}")
            _print_trace(path, trace, count, analysis, options)
    reports = []
    for path, trace, count, analysis in zip(paths, traces, counts, analyses, strict=True):
        report = trace_json(str(path), trace, count, has_text=options.text)
        reports.append(report if analysis is None else report | analysis_json(trace, analysis, options))
    return reports


def analyse(
    traces: Sequence[Trace], paths: Sequence[Path], options: InspectOptions, settings: Settings
) -> list[TraceAnalysis | None]:
    """Analyse every trace as the options say; a model is loaded once for all traces that name it."""
    if not options.attention and options.against is None:
        return [None] * len(traces)
    from pictool.trace.analysis import analyse_trace

    store = open_store(settings)
    models: dict[tuple[str, str], Model] = {}
    analyses: list[TraceAnalysis | None] = []
    for trace, path in zip(traces, paths, strict=True):
        model, dtype = named = (
            settings.option("model") or trace.report["model"], settings.option("dtype") or trace.target.dtype
        )  # fmt: skip
        if named not in models:
            models[named] = open_model(settings.override(model=model, dtype=dtype))
        analyses.append(analyse_trace(
            models[named], store, trace, str(path), attention=options.attention,
            deviation=options.against is not None, layer=options.layer,
            on_compile=note_compiled,
        ))  # fmt: skip
    return analyses


def _print_trace(
    path: Path, trace: Trace, counts: TraceCounts, analysis: TraceAnalysis | None, options: InspectOptions
) -> None:
    """Show what a trace says, its text, and what analysing it shows."""
    from pictool.commands.traces.text_form import (
        show_attention,
        show_deviation,
        show_text,
        show_trace,
    )

    show_trace(path, trace, counts, options.sections)
    if "text" in options.sections and trace.layout.num_tokens > MAX_TOKENS and not options.text:
        note(f"{path}: {trace.layout.num_tokens} tokens; --text shows them")
    elif "text" in options.sections:
        show_text(trace, counts)
    if analysis is None:
        return
    if analysis.attention is not None:
        show_attention(trace, analysis.attention, options.layer, options.head)
    if analysis.deviation is not None:
        show_deviation(trace, analysis.deviation, analysis.choices)
