"""`pic tui [STORE|TRACE…]`: open the screens, with the services that they may not import themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.options import SALT, argument, command, make_app
from pictool.commands.settings.resources import open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.needs import require_extra

if TYPE_CHECKING:
    from pictool.tui.app import PicApp
    from pictool.tui.services import Job

app = make_app()


@command(app, "tui", "model", "device", "dtype", "store", *SALT)
def run_tui(
    settings: Settings,
    names: Annotated[
        Optional[list[str]], argument("NAME", "A store, traces (two or more are compared), or the run of a query.")
    ] = None,
) -> None:
    """Browse objects and links in the terminal.

    \b
      pic tui
      pic tui legolink.trace cacheblend.trace
    """
    require_extra("tui", "pic tui", "textual")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("pic tui: needs a terminal; without one use pic inspect and pic store ls")
    from pictool.commands.tui_process.job import WorkerJob

    settings = settings.override(store=named_store(names or (), settings))
    with WorkerJob(settings) as job:
        open_app(names or (), settings, job).run()


def open_app(names: Sequence[str], settings: Settings, job: Job) -> PicApp:
    """Make the app; every trace that is named is read first.

    Raises:
        PicError: a trace that cannot be read, or a directory that is no store.
    """
    from pictool.tui.app import PicApp
    from pictool.tui.services import LoadedTrace, is_run_path

    store = open_store(settings)
    runs = [Path(name) for name in names if is_run_path(Path(name))]
    paths = [path for path in map(Path, names) if not path.is_dir() and path not in runs]
    traces = [LoadedTrace.read(path, store.root) for path in paths]
    if runs and (len(runs) > 1 or traces):
        raise UsageError(f"{runs[0]}: the run of a query must be shown alone; open the traces from its calls")
    if not runs:
        return PicApp(store, traces, job)
    from pictool.spans.runs import read_run  # it imports numpy, which the other screens do without

    return PicApp(store, traces, job, read_run(runs[0]))


def named_store(names: Sequence[str], settings: Settings) -> str | None:
    """The store that the command line names, by --store or as a directory."""
    from pictool.tui.services import is_run_path

    directories = [name for name in names if Path(name).is_dir() and not is_run_path(Path(name))]
    if (store := settings.option("store")) is not None:
        directories.append(store)
    if len(directories) > 1:
        raise UsageError(f"one store at a time: {', '.join(directories)}")
    return directories[0] if directories else None
