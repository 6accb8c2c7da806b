"""The pager: on a terminal only, whole, with escapes only of our own, and never in the way."""

from __future__ import annotations

import os
from contextlib import redirect_stdout

import pytest

from pictool.commands.console import pager


class Terminal:
    """A standard output that says that it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the pager gets."""
    texts = list[str]()
    monkeypatch.setattr("pydoc.pager", texts.append)
    return texts


def test_a_terminal_s_output_goes_through_the_pager(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LESS", raising=False)
    terminal = Terminal()
    with redirect_stdout(terminal), pager.paged():  # type: ignore[type-var]
        print("one")
        print("two \x1b[2J")
    assert (shown, terminal.text, os.environ["LESS"]) == (["one\ntwo \\x1b[2J\n"], "", "FRX")


def test_what_was_printed_before_an_error_is_shown(shown: list[str]) -> None:
    with pytest.raises(ValueError), redirect_stdout(Terminal()), pager.paged():  # type: ignore[type-var]
        print("one")
        raise ValueError
    assert shown == ["one\n"]


def test_a_pipe_has_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "false")
    with pager.paged():
        print("one")
    assert capsys.readouterr().out == "one\n"
