"""`pic tui [STORE|TRACE…]`: opens the screens, and gives them what they may not know themselves."""

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
    from pictool.trace.analysis import Look
    from pictool.trace.counts import TraceView
    from pictool.trace.format import Trace
    from pictool.trace.sinks import SinkProfile
    from pictool.tui.app import PicApp
    from pictool.tui.services import Exports


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
    """The app; every trace that is named is read first.

    Raises:
        PicError: a trace that cannot be read, or a store that is none.
    """
    from pictool.tui.app import PicApp
    from pictool.tui.opened import Opened
    from pictool.tui.services import Services

    opened = open_store(named_store(names, store))
    traces = [Opened.read(Path(name)) for name in names if not Path(name).is_dir()]
    return PicApp(opened, traces, Services(job, make_exports()))


def named_store(names: Sequence[str], store: str | None) -> str | None:
    """The one store that is named, by --store or as a directory."""
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
    """The views as JSON, as the commands have it."""
    from pictool.tui.services import Exports

    return Exports(_trace, _diff, _object, _listing)


def _diff(names: tuple[str, str], a: Trace, b: Trace) -> Mapping[str, Any]:
    from pictool.commands.trace_json import diff_json
    from pictool.trace.diff import diff_traces

    return diff_json(names, diff_traces(a, b, names))


def _listing(found: Sequence[StoredObject]) -> Sequence[Mapping[str, Any]]:
    from pictool.commands.store import object_json

    return [object_json(one) for one in found]


def _trace(path: Path, trace: Trace, view: TraceView, look: Look | None) -> Mapping[str, Any]:
    from pictool.commands.inspect import InspectOptions
    from pictool.commands.trace_json import look_json, trace_json

    found = trace_json(str(path), trace, view, has_text=True)
    options = InspectOptions(text=True, sinks=True, attention=True, against="full")
    return found if look is None else found | look_json(trace, look, options)


def _object(file: ObjectFile, profile: SinkProfile | None) -> Mapping[str, Any]:
    from pictool.commands.inspect_object import object_json, sinks_json

    found = object_json(file)
    return found if profile is None else found | {"sink_profile": sinks_json(profile)}
