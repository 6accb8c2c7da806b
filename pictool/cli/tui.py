"""`pic tui`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.commands.options import JsonOption, _SETTINGS
from pictool.commands.errors import reports_errors
ModelOption, StoreOption, DeviceOption, DtypeOption = (_SETTINGS[x] for x in ("model","store","device","dtype"))


def register(app: typer.Typer) -> None:
    app.command("tui")(tui_command)


@reports_errors
def tui_command(
    names: Annotated[Optional[list[str]], typer.Argument(help="A store, or traces (two or more: compared).")] = None,
    model: ModelOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Browse objects and traces on the terminal."""
    from pictool.commands.tui import run_tui

    run_tui(names or [], model=model, store=store, device=device, dtype=dtype)
