"""Help texts: of every command, at 80 columns, with an example; the version; completion."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import pictool
from commands.run import pic
from pictool.commands.app import COMMANDS, app
from pictool.linker.policies import policies


def every_command() -> Iterator[list[str]]:
    for name in COMMANDS:
        yield from _below([name], typer.main.get_command(import_module(f"pictool.commands.{name}").app))


def _below(words: list[str], command: Any) -> Iterator[list[str]]:
    """A command, or those of a group."""
    if not hasattr(command, "commands"):
        yield words
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _below([*words, verb], inner)


@pytest.mark.parametrize("command", [[], *every_command()], ids=" ".join)
def test_help_fits_80_columns_and_has_an_example(command: list[str]) -> None:
    outcome = pic(*command, "--help")
    assert outcome.code == 0 and max(map(len, outcome.out.splitlines())) <= 80
    assert not command or f"\n    pic {' '.join(command)}" in outcome.out


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_no_option_s_help_names_a_policy(command: list[str]) -> None:
    """A list of them would leave out those of other packages; `full` and `prefix` are words, too."""
    _, options = pic(*command, "--help").out.split("\nOptions:\n")
    named = [name for name in policies() if re.search(rf"(?<![\w-]){name}(?![\w-])", options)]
    assert set(named) <= {"full", "prefix"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    text = " ".join(pic(name, "--help").out.split())
    assert COMMANDS[name] in text and f"{name} " in pic("--help").out


def test_the_version_is_that_of_the_package() -> None:
    assert pic("--version").out == f"pic {pictool.__version__}\n"


def test_a_misspelt_command_is_told_the_right_one() -> None:
    outcome = pic("lnk")
    assert outcome.code == 2 and "No such command 'lnk'. Did you mean 'link'?" in outcome.err


@pytest.mark.parametrize(
    ("words", "completed"),
    [("pic in", ["inspect"]), ("pic store ex", ["expire", "export"]), ("pic link --tr", ["--trace"])],
)
def test_the_shell_completes_commands_and_options(words: str, completed: list[str]) -> None:
    env = {"_PIC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(app, [], env=env, prog_name="pic").stdout.split() == completed
