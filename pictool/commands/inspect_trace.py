"""`pic inspect TRACE…`: what links did, from their traces alone; and, asked for, what the model shows behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import note, open_model, open_store
from pictool.trace.counts import TraceView, view_of
from pictool.trace.format import Trace, read_trace

if TYPE_CHECKING:
    from pictool.commands.inspect import InspectOptions
    from pictool.runtime.model import Model
    from pictool.trace.analysis import Look

MOST_TOKENS = 2000  # whose text is shown without being asked for


def inspect_traces(paths: Sequence[Path], options: InspectOptions, *, as_json: bool) -> list[dict[str, Any]]:
    """Show traces one after the other; returns what `--json` prints of each."""
    traces = [read_trace(path) for path in paths]
    looks = _look_behind(traces, paths, options)
    for look in looks:
        if look is not None and look.attention is not None:
            look.attention.require(options.layer, options.head)
    found = []
    for path, trace, look in zip(paths, traces, looks, strict=True):
        view = view_of(trace)
        if not as_json:
            _print(path, trace, view, look, options)
        found.append(_json(path, trace, view, look, options))
    if options.plot:
        _plot(Path(options.plot), paths, traces, looks, options)
    return found


def _look_behind(traces: Sequence[Trace], paths: Sequence[Path], options: InspectOptions) -> list[Look | None]:
    """What the model shows of every trace; it is opened once for all that name the same."""
    wants_attention = options.attention or options.sinks
    if not wants_attention and options.against is None:
        return [None] * len(traces)
    from pictool.trace.analysis import look_behind

    store = open_store(options.store)
    models: dict[tuple[str, str], Model] = {}
    looks: list[Look | None] = []
    for trace, path in zip(traces, paths, strict=True):
        named = (options.model or trace.report["model"], options.dtype or trace.target.dtype)
        if named not in models:
            models[named] = open_model(named[0], options.device, named[1])
        looks.append(look_behind(
            models[named], store, trace, str(path), attention=wants_attention, against=options.against is not None,
            layer=options.layer,
            on_compile=lambda done: note(f"compiled {done.chunk.source} first ({len(done.chunk)} tokens)"),
        ))  # fmt: skip
    return looks


def _print(path: Path, trace: Trace, view: TraceView, look: Look | None, options: InspectOptions) -> None:
    from pictool.commands.show_look import show_against, show_attention, show_sinks
    from pictool.commands.show_trace import show_text, show_trace

    show_trace(path, trace, view)
    if options.text or trace.layout.num_tokens <= MOST_TOKENS:
        show_text(trace, view)
    else:
        note(f"{path}: {trace.layout.num_tokens} tokens; --text shows them")
    if look is None:
        return
    if look.attention is not None and options.sinks:
        show_sinks(trace, look.attention, first_of(options))
    if look.attention is not None and options.attention:
        show_attention(trace, look.attention, options.layer, options.head, options.scale)
    if look.against is not None:
        show_against(trace, look.against, look.choices)


def first_of(options: InspectOptions) -> int:
    from pictool.trace.sinks import FIRST

    return options.first or FIRST


def _json(path: Path, trace: Trace, view: TraceView, look: Look | None, options: InspectOptions) -> dict[str, Any]:
    from pictool.commands.trace_json import look_json, trace_json

    found = trace_json(str(path), trace, view, has_text=options.text)
    return found if look is None else found | look_json(trace, look, options)


def _plot(
    target: Path, paths: Sequence[Path], traces: Sequence[Trace], looks: Sequence[Look | None], options: InspectOptions
) -> None:
    """One picture: deviation, sinks, attention, or (the default) selections."""
    from pictool.trace import plots

    seen = [(trace, look) for trace, look in zip(traces, looks, strict=True) if look is not None]
    if options.against is not None:
        figure = plots.draw_deviation([(trace, look.against) for trace, look in seen if look.against is not None])
    elif options.attention:
        maps = [(trace, look.attention) for trace, look in seen if look.attention is not None]
        figure = plots.draw_attention(maps, options.layer, options.head, options.scale)
    elif options.sinks:
        figure = plots.draw_offsets([(trace, look.attention) for trace, look in seen if look.attention is not None])
    else:
        figure = plots.draw_selection(traces)
    plots.save(figure, target)
