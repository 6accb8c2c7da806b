"""`pic sync`: a store in step with folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pictool.commands.console.errors import UsageError
from pictool.commands.console.forecast import print_forecast, warn_of_disk
from pictool.commands.console.outputs import print_json
from pictool.commands.console.progress import new_work, progress
from pictool.commands.console.verbosity import note
from pictool.commands.console.words import count
from pictool.commands.linking.folder import FolderOptions, read_library
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import EngineOption, JsonOption, command, make_app, option
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import PicError
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.core import CompileOptions
    from pictool.documents.library import LibraryReader
    from pictool.documents.sync import SyncPlan
    from pictool.engines.base import Engine

app = make_app()

_FIRST_MS = 500  # of a watch without changes


@command(app, "sync", "model", "device", "dtype", "after", "codec", "store", "remote", "salt", "salt_file")
def run_sync(
    folder: FolderOptions,
    settings: Settings,
    is_dry: Annotated[
        bool, option("--dry-run", None, "Print what would change and what it would cost, and write nothing.")
    ] = False,
    watch: Annotated[bool, option("--watch", None, "Keep running, and sync again whenever a file changes.")] = False,
    as_json: JsonOption = False,
    engine: EngineOption = None,
) -> None:
    """Keep the objects of folders up to date.

    \b
      pic sync docs --dry-run
      pic sync docs --watch
    """
    from pictool.core import CompileOptions
    from pictool.documents.sync import require_all_read, require_folders

    if watch and (is_dry or as_json):
        raise UsageError("--watch: cannot be combined with --dry-run or --json")
    folders, engine_type, store = (
        require_folders(folder.names),
        find_engine(engine, model=settings.model),
        open_store(settings),
    )
    model, options = open_model(settings, engine_type.name), CompileOptions(settings.codec, after=settings.after)
    with engine_type(model, store) as running, folder.open_reader(model, store) as reader:
        plans = [sync_folder(running, reader, folder, path, options, is_dry, as_json) for path in folders]
        if as_json and not is_dry:
            print_json([plan.report() for plan in plans])
        if not watch:
            require_all_read(plans)
        else:
            watch_folders(running, reader, folder, folders, options)
    store.drain()


def sync_folder(
    engine: Engine, reader: LibraryReader, options: FolderOptions, folder: Path, how: CompileOptions,
    is_dry: bool = False, as_json: bool = False,
) -> SyncPlan:  # fmt: skip
    """Sync a folder, or print what that would change and cost."""
    from pictool.compiler.forecast import forecast
    from pictool.documents.sync import finish_sync, plan_sync

    library = read_library(reader, options.find_files([folder]))
    with reader.connected():
        plan = plan_sync(engine.model, engine.store, folder, library, how)
    if is_dry:
        found = forecast(engine.model, engine.store, list(plan.chunks.values()), how)
        found = replace(found, num_chunks=len(library.sizes), num_tokens=sum(library.sizes))  # also of equal texts
        print_changes(plan) if not as_json else None
        print_forecast(found, library.num_documents, as_json, plan.report())
        return plan
    chunks = list(plan.chunks.values())
    warn_of_disk(engine.model, engine.store, chunks, how)
    with progress("compiling", len(chunks)) as advance:
        engine.compile(chunks, how, on_done=lambda done: advance(*new_work(done)))
    finish_sync(engine.store, plan)
    print_changes(plan) if not as_json else None
    note(f"{folder}: {count(len(plan.chunks), 'object')}, {len(plan.new)} new, {len(plan.gone)} removed")
    return plan


def print_changes(plan: SyncPlan) -> None:
    """A line for each file with new objects (+) or removed ones (-)."""
    new = {plan.key_to_path[key] for key in plan.new}
    for path in sorted(new | set(plan.gone.values())):
        marks = ("+" if path in new else " ") + ("-" if path in plan.gone.values() else " ")
        print(f"{marks} {visible(path)}")


def watch_folders(
    engine: Engine, reader: LibraryReader, options: FolderOptions, folders: list[Path], how: CompileOptions
) -> None:
    """Sync folders whenever files below them change, until it is interrupted."""
    from watchfiles import watch

    watching = watch(*folders, raise_interrupt=True, yield_on_timeout=True, rust_timeout=_FIRST_MS)
    next(watching)  # the watch has begun; what changed before it did is synced now
    note(f"watching {', '.join(map(str, folders))}; Ctrl-C stops it")
    changed = list(folders)
    while True:
        for folder in folders:
            if any(path.is_relative_to(folder.resolve()) or path.is_relative_to(folder) for path in changed):
                try:
                    sync_folder(engine, reader, options, folder, how)
                except PicError as error:  # a file that is being written: the next change comes
                    note(str(error))
        changed = [Path(path) for _, path in next(watching)]
