"""`pic inspect` on terminals of every width, with colour and without: the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands.conftest import Traces
from commands.run import pic, section

ESCAPE = "\x1b["


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("kind", ["pipe", "color", "no color"])
def test_every_terminal_shows_the_same_numbers(
    kind: str, columns: int, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = traces("blend")
    more = (path, "--attention", "--against", "full", "--store", "st")
    plain = pic("inspect", *more)
    monkeypatch.setenv("COLUMNS", str(columns))
    if kind != "pipe":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLORTERM", "truecolor")
    if kind == "no color":
        monkeypatch.setenv("NO_COLOR", "1")
    shown = pic("inspect", *more)
    assert shown.code == 0
    text = strip_styles(shown.out)
    assert max(map(len, text.splitlines())) <= columns
    for title in (
        "tokens that draw most",
        "against full, by layer",
        "by generated token",
    ):
        assert numbers(text, title) == numbers(plain.out, title)


def strip_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def numbers(text: str, title: str) -> list[str]:
    """The numbers of the table below a heading; a heading may be on two lines."""
    blocks = [block for block in text.split("\n\n") if block.strip().startswith(title[:20])]
    return [word for word in blocks[0].split() if word.replace(".", "").replace("e-", "").isdigit()]


def test_marks_have_their_own_ink_and_background(by_hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they read on light and dark; without colour they are brackets."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    text = section(pic("inspect", by_hand), f"{ESCAPE}1mtext; marked")
    (line,) = (line for line in text if strip_styles(line) == "a bc")
    # rich keeps the codes of a style as it first rendered it: of 256 colours if another test had these.
    assert len(re.findall(r"\b38;[25];", line)) == len(re.findall(r"\b48;[25];", line)) == 2
    monkeypatch.setenv("NO_COLOR", "1")
    assert any(strip_styles(line) == "[a]1[ b]2c" for line in pic("inspect", by_hand).out.splitlines())
