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

# What `pic --help` says of each command, by what people come for; its module has its name.
GROUPS = {
    "Use": {
        "ask": "Answer a question from a folder of documents, with sources.",
        "link": "Link documents into a prompt, and answer a question.",
        "compile": "Compile documents to KV objects in advance.",
        "sync": "Keep the objects of folders up to date.",
        "serve": "Serve a model over HTTP: OpenAI, Anthropic and Gemini APIs.",
        "mcp": "Let agents search and ask folders, over MCP.",
        "query": "Run a span query, a program of model calls.",
    },
    "Inspect": {
        "inspect": "Show an object or the steps of a link; compare two links.",
        "tui": "Browse objects and links in the terminal.",
        "doctor": "Check that linking is exact with this model and device.",
    },
    "Measure": {
        "estimate": "Estimate from a log of requests what linking would save.",
        "eval": "Compare policies by their answers to a dataset.",
        "tune": "Choose the cheapest policy that meets a target.",
        "bench": "Measure speed, also on random weights of any shape.",
        "plan": "Estimate loading and recompute times by storage device.",
    },
    "Manage": {
        "store": "List, verify, prune, sign and move objects.",
        "config": "Show each setting and where it comes from.",
    },
}
_NAME = 8  # characters, so that all groups have one column
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


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
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(_NAME), text) for name, text in commands.items()])


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # plain help, in half the time
    help="Compile documents to KV objects once, and link them into any prompt.",
    epilog="pic COMMAND --help shows the options of a command, and examples. Start with: pic ask FOLDER -q QUESTION",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a bug's traceback is plain, and without the values of variables
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from pictool.runtime.machine import installed, torch_version
        from pictool.store.objects.header import VERSION

        libraries = {"torch": torch_version()} | {name: installed(name) for name in ("transformers", "safetensors")}
        engines = {name: installed(name) for name in ("vllm", "llama-cpp-python")}
        print(f"pic {__version__}")
        print(*(f"{name} {found}," for name, found in libraries.items() if found), "Python", platform.python_version())
        print(", ".join([f"object format {VERSION}", *(f"{name} {found}" for name, found in engines.items() if found)]))
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
