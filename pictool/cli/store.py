"""`pic store`."""

from __future__ import annotations

import typer

from pictool.cli.options import JsonOption, StoreOption, reports_errors

store_app = typer.Typer(rich_markup_mode=None, help="Look into the store of objects.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(store_app, name="store")


@store_app.command("ls")
@reports_errors
def store_ls(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the objects."""
    from pictool.commands.store import run_ls

    run_ls(store=store, as_json=as_json)


@store_app.command("verify")
@reports_errors
def store_verify(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Read every object and check it."""
    from pictool.commands.store import run_verify

    run_verify(store=store, as_json=as_json)
