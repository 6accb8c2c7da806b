"""`pic tui [STORE|TRACE…]`: open the screens, with the services that they may not import themselves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import UsageError, open_store
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.store.format import ObjectFile
    from pictool.store.store import StoredObject
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.tui.app import PicApp
    from pictool.tui.services import Exports, LoadedTrace


def run_tui(
    names: Sequence[str], *, model: str | None, store: str | None, device: str | None, dtype: str | None
) -> None:
    require_textual()
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("pic tui: needs a terminal; pic inspect and pic store ls print")
    from pictool.commands.tui_job import WorkerJob

    with WorkerJob(store=named_store(names, store), model=model, device=device, dtype=dtype) as job:
        make_app(names, store, job).run()


def make_app(names: Sequence[str], store: str | None, job: Any) -> PicApp:
    """Make the app; every trace that is named is read first.

    Raises:
        PicError: a trace that cannot be read, or a directory that is no store.
    """
    from pictool.tui.app import PicApp
    from pictool.tui.services import LoadedTrace, Services

    opened_store = open_store(named_store(names, store))
    traces = [LoadedTrace.read(Path(name)) for name in names if not Path(name).is_dir()]
    return PicApp(opened_store, traces, Services(job, make_exports()))


def named_store(names: Sequence[str], store: str | None) -> str | None:
    """Return the store that is named, by --store or as a directory."""
    directories = [name for name in names if Path(name).is_dir()]
    if store is not None:
        directories.append(store)
    if len(directories) > 1:
        raise UsageError(f"one store at a time: {', '.join(directories)}")
    return directories[0] if directories else None


def require_textual() -> None:
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise InputError("pic tui: needs textual; install it with: pip install 'pictool[tui]'") from error


def make_exports() -> Exports:
    """Return the views' JSON, which is that of the commands."""
    from pictool.tui.services import Exports

    return Exports(_trace, _diff, _object, _listing)


def _trace(loaded: LoadedTrace, analysis: TraceAnalysis | None) -> Mapping[str, Any]:
    from pictool.commands.inspect import InspectOptions
    from pictool.commands.trace_json import analysis_json, trace_json

    of_trace = trace_json(loaded.name, loaded.trace, loaded.counts, has_text=True)
    options = InspectOptions(text=True, sinks=True, attention=True, against="full")
    return of_trace if analysis is None else of_trace | analysis_json(loaded.trace, analysis, options)


def _diff(a: LoadedTrace, b: LoadedTrace) -> Mapping[str, Any]:
    from pictool.commands.trace_json import diff_json
    from pictool.trace.diff import diff_traces

    names = a.name, b.name
    return diff_json(names, diff_traces(a.trace, b.trace, names))


def _object(file: ObjectFile, sinks: AttentionSinks | None) -> Mapping[str, Any]:
    from pictool.commands.inspect_object import object_json, sinks_json

    of_object = object_json(file)
    return of_object if sinks is None else of_object | {"sink_profile": sinks_json(sinks)}


def _listing(objects: Sequence[StoredObject]) -> Sequence[Mapping[str, Any]]:
    from pictool.commands.store import row

    return [row(stored) for stored in objects]
