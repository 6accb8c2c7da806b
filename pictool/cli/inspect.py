"""`pic inspect` and `pic diff`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.commands.options import JsonOption, _SETTINGS
from pictool.commands.errors import reports_errors
ModelOption, StoreOption, DeviceOption, DtypeOption = (_SETTINGS[x] for x in ("model","store","device","dtype"))

PlotOption = Annotated[Optional[str], typer.Option("--plot", help="Draw to this file (.svg, .png).")]


def register(app: typer.Typer) -> None:
    app.command("inspect")(inspect_command)
    app.command("diff")(diff_command)


@reports_errors
def inspect_command(
    names: Annotated[list[str], typer.Argument(help="Object files, keys or traces.")],
    text: Annotated[bool, typer.Option("--text", help="Show the text too, however long.")] = False,
    layers: Annotated[bool, typer.Option("--layers", help="Objects: norms and ranges per layer.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Attention that the chunks' first tokens draw.")] = False,
    first: Annotated[Optional[int], typer.Option("--first", min=1, help="--sinks: how many are first (4).")] = None,
    attention: Annotated[bool, typer.Option("--attention", help="Traces: tail and answer over the prompt.")] = False,
    layer: Annotated[Optional[int], typer.Option("--layer", min=0, help="--attention: of one layer (mean).")] = None,
    head: Annotated[Optional[int], typer.Option("--head", min=0, help="--attention: of one head (mean).")] = None,
    scale: Annotated[str, typer.Option("--scale", help="--attention: minmax (QK by row) or share.")] = "minmax",
    against: Annotated[Optional[str], typer.Option("--against", help="Traces: deviation from full.")] = None,
    plot: PlotOption = None,
    model: ModelOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what an object is, or what a link did."""
    from pictool.commands.inspect import InspectOptions, run_inspect

    options = InspectOptions(
        text, layers, sinks, first, attention, against, layer, head, scale, plot, model, store, device, dtype
    )
    run_inspect(names, options, as_json=as_json)


@reports_errors
def diff_command(
    a: Annotated[str, typer.Argument(help="A trace.")],
    b: Annotated[str, typer.Argument(help="Another trace of the same prompt.")],
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two links of one prompt."""
    from pictool.commands.diff import run_diff

    run_diff(a, b, plot=plot, as_json=as_json)
