"""The pager: on a terminal only, whole, with escapes only of our own, and never in the way."""

from __future__ import annotations

from contextlib import redirect_stdout
from pathlib import Path

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


def page(*lines: str) -> str:
    """What a terminal gets of these lines, beside the pager."""
    terminal = Terminal()
    with redirect_stdout(terminal), pager.paged():  # type: ignore[type-var]
        for line in lines:
            print(line)
    return terminal.text


def test_a_terminal_s_output_goes_through_the_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "sh -c 'cat > shown; echo $LESS > options'")
    monkeypatch.delenv("LESS", raising=False)
    assert page("one", "two \x1b[2J") == ""
    assert Path("shown").read_text() == "one\ntwo \\x1b[2J\n" and Path("options").read_text() == "FRX\n"


@pytest.mark.parametrize("named", ["", "cat"])
def test_no_pager_prints(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", named)
    assert page("one") == "one\n"


def test_a_pager_that_is_not_there_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "no-such-pager")
    assert page("one") == "one\n"


def test_one_that_is_left_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "true")
    page(*("x" * 1000 for _ in range(1000)))


def test_what_was_printed_before_an_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "sh -c 'cat > shown'")
    with pytest.raises(ValueError), redirect_stdout(Terminal()), pager.paged():  # type: ignore[type-var]
        print("one")
        raise ValueError
    assert Path("shown").read_text() == "one\n"


def test_a_pipe_has_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER", "false")
    with pager.paged():
        print("one")
    assert capsys.readouterr().out == "one\n"
