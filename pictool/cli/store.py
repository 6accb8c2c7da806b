"""`pic store`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.cli.options import JsonOption, RemoteOption, StoreOption, reports_errors

store_app = typer.Typer(
    rich_markup_mode=None, help="Look into the store of objects, and keep it.", no_args_is_help=True
)

KeysArgument = Annotated[list[str], typer.Argument(help="Keys, as in git.")]


def register(app: typer.Typer) -> None:
    app.add_typer(store_app, name="store")


@store_app.command("ls")
@reports_errors
def store_ls(
    limit: Annotated[Optional[int], typer.Option("--limit", min=1, help="At most so many.")] = None,
    after: Annotated[str, typer.Option("--after", help="Go on behind this key.")] = "",
    chains: Annotated[bool, typer.Option("--chains", help="List blocks of prefix chains, too.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the objects, by key."""
    from pictool.commands.store import run_ls

    run_ls(store=store, limit=limit, after=after, chains=chains, as_json=as_json)


@store_app.command("show")
@reports_errors
def store_show(keys: KeysArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show objects: what they are, their text, when they were last used."""
    from pictool.commands.store import run_show

    run_show(keys, store=store, as_json=as_json)


@store_app.command("verify")
@reports_errors
def store_verify(
    repair: Annotated[bool, typer.Option("--repair", help="Take damaged objects out.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every object and check it."""
    from pictool.commands.store import run_verify

    run_verify(store=store, repair=repair, as_json=as_json)


@store_app.command("stats")
@reports_errors
def store_stats(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Count objects and bytes, hits and misses."""
    from pictool.commands.store import run_stats

    run_stats(store=store, as_json=as_json)


@store_app.command("gc")
@reports_errors
def store_gc(
    max_size: Annotated[
        Optional[str], typer.Option("--max-size", help="Evict least recently used ones, as 10G (PIC_MAX_SIZE).")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what killed writers left; keep a size."""
    from pictool.commands.life import run_gc

    run_gc(store=store, max_size=max_size, as_json=as_json)


@store_app.command("expire")
@reports_errors
def store_expire(
    keys: Annotated[Optional[list[str]], typer.Argument(help="Keys, as in git.")] = None,
    older_than: Annotated[Optional[str], typer.Option("--older-than", help="Not used for so long: 12h, 30d.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Pinned ones too.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove objects."""
    from pictool.commands.life import run_expire

    run_expire(keys or [], store=store, older_than=older_than, force=force, as_json=as_json)


@store_app.command("pin")
@reports_errors
def store_pin(keys: KeysArgument, store: StoreOption = None) -> None:
    """Keep objects from being evicted or expired."""
    from pictool.commands.life import run_pin

    run_pin(keys, store=store, is_on=True)


@store_app.command("unpin")
@reports_errors
def store_unpin(keys: KeysArgument, store: StoreOption = None) -> None:
    """Let pinned objects go again."""
    from pictool.commands.life import run_pin

    run_pin(keys, store=store, is_on=False)


@store_app.command("export")
@reports_errors
def store_export(
    archive: Annotated[str, typer.Argument(help="File to write (a tar in zstd).")],
    keys: Annotated[Optional[list[str]], typer.Argument(help="Keys; none is all.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write objects to one archive."""
    from pictool.commands.life import run_export

    run_export(archive, keys or [], store=store, as_json=as_json)


@store_app.command("import")
@reports_errors
def store_import(
    archive: Annotated[str, typer.Argument(help="What export wrote.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the objects of an archive."""
    from pictool.commands.life import run_import

    run_import(archive, store=store, as_json=as_json)


@store_app.command("push")
@reports_errors
def store_push(
    keys: Annotated[list[str], typer.Argument(help="Keys, as in git; or all.")],
    store: StoreOption = None,
    remote: RemoteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send objects to the remote."""
    from pictool.commands.transfer import run_push

    run_push(keys, store=store, remote=remote, as_json=as_json)


@store_app.command("pull")
@reports_errors
def store_pull(
    keys: Annotated[list[str], typer.Argument(help="Whole keys.")],
    store: StoreOption = None,
    remote: RemoteOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch objects from the remote."""
    from pictool.commands.transfer import run_pull

    run_pull(keys, store=store, remote=remote, as_json=as_json)
