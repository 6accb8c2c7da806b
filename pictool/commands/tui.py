"""`pic tui [STORE|TRACE…]`: open the screens, with the services that they may not import themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.options import SALT, argument, command, make_app
from pictool.commands.settings.resources import open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.spans.runs import QueryRun
    from pictool.store.objects.format import ObjectFile
    from pictool.store.store import Store, StoredObject
    from pictool.trace.analysis import TraceAnalysis
    from pictool.trace.attention_sinks import AttentionSinks
    from pictool.tui.app import PicApp
    from pictool.tui.preferences import Preferences
    from pictool.tui.services import Exports, Job, LoadedTrace
    from pictool.tui.watching import Address

app = make_app()


@command(app, "tui", "model", "device", "dtype", "server", "store", *SALT)
def run_tui(
    settings: Settings,
    names: Annotated[
        Optional[list[str]], argument("NAME", "A store, traces (two or more are compared), or the run of a query.")
    ] = None,
) -> None:
    """Browse objects and traces on the terminal.

    \b
      pic tui
      pic tui legolink.trace cacheblend.trace
      pic tui --server http://localhost:8000
    """
    require_textual()
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("pic tui: needs a terminal; without one use pic inspect and pic store ls")
    from pictool.commands.tui_process.job import WorkerJob

    settings = settings.override(store=named_store(names or (), settings))
    with WorkerJob(settings) as job:
        open_app(names or (), settings, job).run()


def open_app(names: Sequence[str], settings: Settings, job: Job) -> PicApp:
    """Make the app; every trace that is named is read first, before the terminal is asked anything.

    Raises:
        PicError: a trace that cannot be read, or a directory that is no store.
    """
    from pictool.tui.background import BackgroundQuestion
    from pictool.tui.preferences import Preferences, preferences_path
    from pictool.tui.services import LoadedTrace, Services, is_run_path

    server = watched_server(settings)
    if server is not None and names:
        raise UsageError(f"{names[0]}: cannot be shown beside a server; leave --server out")
    store = open_store(settings)
    runs = [Path(name) for name in names if is_run_path(Path(name))]
    traces = [LoadedTrace.read(Path(name)) for name in names if not Path(name).is_dir() and Path(name) not in runs]
    if runs and (len(runs) > 1 or traces):
        raise UsageError(f"{runs[0]}: the run of a query must be shown alone; open the traces from its calls")
    run = _read_run(runs)
    preferences = Preferences.read(preferences_path())
    with BackgroundQuestion() if _asks_for_background(preferences) else nullcontext() as question:
        from pictool.tui.app import PicApp

        is_light = question is not None and question.is_light()
    return PicApp(store, traces, Services(job, make_exports()), run, preferences, is_light, server)


def watched_server(settings: Settings) -> Address | None:
    """The server that the command line names; PIC_SERVER alone, which is for links, opens no screen.

    Raises:
        InputError: what reads its counters is not installed.
    """
    url = settings.option("server")
    if not url:
        return None
    if find_spec("prometheus_client") is None:
        raise InputError("pic tui --server: needs prometheus-client; install it with: pip install 'pictool[tui]'")
    from pictool.tui.watching import Address

    return Address(url, settings.server_key)


def _asks_for_background(preferences: Preferences) -> bool:
    """Whether the terminal's background decides the theme: none was chosen, colours are drawn, and it can be asked."""
    is_chosen = preferences.theme is not None or "TEXTUAL_THEME" in os.environ or "NO_COLOR" in os.environ
    return not is_chosen and sys.stdin.isatty() and sys.stderr.isatty()


def _read_run(runs: Sequence[Path]) -> QueryRun | None:
    if not runs:
        return None
    from pictool.spans.runs import read_run

    return read_run(runs[0])


def named_store(names: Sequence[str], settings: Settings) -> str | None:
    """The store that the command line names, by --store or as a directory."""
    from pictool.tui.services import is_run_path

    directories = [name for name in names if Path(name).is_dir() and not is_run_path(Path(name))]
    if (store := settings.option("store")) is not None:
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
    from pictool.commands.traces.json_form import analysis_json, trace_json

    of_trace = trace_json(loaded.name, loaded.trace, loaded.counts, has_text=True)
    options = InspectOptions(text=True, attention_sinks=True, attention=True, against="full")
    return of_trace if analysis is None else of_trace | analysis_json(loaded.trace, analysis, options)


def _diff(a: LoadedTrace, b: LoadedTrace) -> Mapping[str, Any]:
    from pictool.commands.traces.json_form import diff_json
    from pictool.trace.diff import diff_traces

    names = a.name, b.name
    return diff_json(names, diff_traces(a.trace, b.trace, names))


def _object(file: ObjectFile, sinks: AttentionSinks | None) -> Mapping[str, Any]:
    from pictool.commands.inspect import object_json, sinks_json

    of_object = object_json(file)
    return of_object if sinks is None else of_object | {"sink_profile": sinks_json(sinks)}


def _listing(store: Store, objects: Sequence[StoredObject]) -> Sequence[Mapping[str, Any]]:
    from pictool.commands.store import object_json
    from pictool.store.eviction import pinned
    from pictool.store.side.sources import read_sources

    sources, pins = read_sources(store.root), pinned(store.root)
    return [object_json(stored, sources.get(stored.key), stored.key in pins) for stored in objects]
