"""The program `pic`. A command's module is imported when that command is used, so that `pic --help` is quick."""

from __future__ import annotations

import importlib
import io
import platform
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pictool import __version__
from pictool.commands.console.errors import GRACE_S, INTERRUPTED, drop_stdout, end_within, fail, os_problem
from pictool.commands.console.verbosity import Verbosity, set_verbosity
from pictool.commands.removed import replacement
from pictool.escapes import guard_streams

# What `pic --help` says of each command; its module has its name.
COMMANDS = {
    "ask": "Answer a question from a folder of documents, and name the sources.",
    "compile": "Compile text files to KV objects.",
    "link": "Link documents into a prompt and answer a query.",
    "query": "Run a span query: a program over model calls.",
    "estimate": "Estimate what linking would save on a log of requests.",
    "plan": "Estimate loading and recompute by device: which ratio is free, which device is cheapest.",
    "inspect": "Show the contents of an object, or the steps of a link; compare two links.",
    "store": "List, check, prune and move the objects of a store.",
    "eval": "Ask a dataset's questions under several policies.",
    "tune": "Find the cheapest policy that meets a target.",
    "bench": "Measure speed, on models of any shape with random weights.",
    "sync": "Compile new and changed files of folders; remove the objects of deleted ones.",
    "serve": "Serve a model over HTTP: OpenAI's API with explicit caches.",
    "mcp": "Let agents search and ask folders of documents, by MCP over stdin and stdout.",
    "tui": "Browse objects and traces on the terminal.",
    "config": "Show each setting and where it comes from.",
    "doctor": "Check that linking works on this machine, model and device.",
}


class _Commands(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}  # only their names

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As git has it, `pic help link` is `pic link --help`, and `pic version` is `pic --version`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if instead := replacement(args):
            fail(instead, 2)
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(importlib.import_module(f"pictool.commands.{cmd_name}").app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # plain help, in half the time
    help="Compile documents to KV objects, link them into prompts.",
    epilog="pic COMMAND --help shows the options of a command, and an example.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug's traceback is plain, and without the values of variables
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from pictool.runtime.machine import installed, torch_version
        from pictool.store.objects.header import VERSION

        libraries = [f"{name} {installed(name)}" for name in ("transformers", "safetensors")]
        engines = [f"{name} {found}" for name in ("vllm", "llama-cpp-python") if (found := installed(name))]
        print(f"pic {__version__}")
        print(", ".join([f"torch {torch_version()}", *libraries, f"Python {platform.python_version()}"]))
        print(", ".join([f"object format {VERSION}", *engines]))
        raise typer.Exit


@app.callback()
def _pic(
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", help="Print the version, and those of libraries.", callback=_print_version, is_eager=True
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print results and errors, no notes.")] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Also print what is read and loaded, and where an error came from.")
    ] = False,
) -> None:
    set_verbosity(Verbosity.QUIET if quiet else Verbosity.VERBOSE if verbose else Verbosity.NORMAL)


def run() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name or an answer that the terminal cannot show
    guard_streams()
    try:
        try:
            app()  # it exits
        finally:
            if sys.stdout is not None:  # before what runs at the exit, where a signal ends the process
                sys.stdout.flush()
    except OSError as error:  # of typer's own output, as help; commands report theirs
        drop_stdout()
        fail(os_problem(error), 1)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            end_within(GRACE_S)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left is safe to be killed, and no traceback
