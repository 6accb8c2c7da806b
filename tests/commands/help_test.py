"""Help texts: of every command, at 80 columns, with an example; the version; completion."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import safetensors
import torch
import transformers
import typer
from typer.testing import CliRunner

import pictool
from commands.run import pic, write
from pictool.commands.app import COMMANDS, app
from pictool.linker.policies import policies
from pictool.runtime import machine


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
    """A list would leave out those of other packages; auto, full and prefix are words, too, and naive is a baseline."""
    _, options = pic(*command, "--help").out.split("\nOptions:\n")
    named = [name for name in policies() if re.search(rf"(?<![\w-]){name}(?![\w-])", options)]
    assert set(named) <= {"auto", "full", "naive", "prefix"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_their_own_help_says(name: str) -> None:
    text = " ".join(pic(name, "--help").out.split())
    assert COMMANDS[name] in text and f"{name} " in pic("--help").out


def test_the_version_is_that_of_the_package_and_torch_s_build_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {"vllm": "0.32.0", "llama-cpp-python": None}
    monkeypatch.setattr(machine, "installed", lambda name: engines[name] if name in engines else version(name))
    assert pic("--version").out.splitlines() == [
        f"pic {pictool.__version__}",
        f"torch {torch.__version__}, transformers {transformers.__version__}, safetensors {safetensors.__version__}, "
        f"Python {platform.python_version()}",
        "object format 1, vllm 0.32.0",
    ]


def test_a_misspelt_command_is_told_the_right_one() -> None:
    outcome = pic("lnk")
    assert outcome.code == 2 and "'lnk'" in outcome.err and "'link'" in outcome.err


@pytest.mark.parametrize(
    ("words", "completed"),
    [("pic in", ["inspect"]), ("pic store p", ["pin", "push", "pull"]), ("pic link --tr", ["--trace"])],
)
def test_the_shell_completes_commands_and_options(words: str, completed: list[str]) -> None:
    env = {"_PIC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(app, [], env=env, prog_name="pic").stdout.split() == completed


COMPLETED = {
    "pic link a.txt --algo le": ["legolink"],
    "pic serve --allow cache": ["cacheblend"],
    "pic link x": [],
}
PROGRAM = """
import json, os, sys
from pictool.commands.app import app

for words in json.load(sys.stdin):
    os.environ.update(_PIC_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        app(prog_name="pic")
    except SystemExit:
        print("--", *sorted({"torch", "transformers"} & sys.modules.keys()))
"""


def test_the_shell_completes_policies_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps([*COMPLETED]), capture_output=True, text=True, timeout=120
    )
    found = [part.split() for part in done.stdout.split("--\n")[:-1]]
    assert dict(zip(COMPLETED, found, strict=True)) == COMPLETED and done.stderr == ""


@pytest.mark.parametrize("settings", ["unknown: 1\n", "store: none\n"])
def test_a_completion_says_nothing_of_what_is_wrong(settings: str) -> None:
    write("pic.yaml", settings)
    env = {"_PIC_COMPLETE": "complete_bash", "COMP_WORDS": "pic link a", "COMP_CWORD": "2", "PIC_STOER": "x"}
    assert CliRunner().invoke(app, [], env=env, prog_name="pic").output.strip() == ""


def test_help_and_version_are_words_as_well() -> None:
    assert pic("help", "link").out == pic("link", "--help").out and pic("help").out == pic("--help").out
    assert pic("version").out == pic("--version").out
