"""The command `pic`: options in, one call, errors out. Imports nothing heavy before a command needs it."""

from __future__ import annotations

import io
import sys

import typer

from pictool.cli import bench, eval, inspect, link, store, tui

app = typer.Typer(
    rich_markup_mode=None,  # plain help, in half the time
    help="Compile documents to KV objects, link them into prompts.",
    no_args_is_help=True,
    add_completion=False,
)
link.register(app)
inspect.register(app)
store.register(app)
eval.register(app)
bench.register(app)
tui.register(app)


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name or an answer that the terminal cannot show
    app()
