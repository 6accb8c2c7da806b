"""No character of a text steers a terminal or hides in it; what is legible, and files and pipes, stay as they are."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
from hostile_text import HOSTILE, MARKUP, steering

from pictool.escapes import GuardedStream, guard_streams, to_json, visible, visible_lines

ROOT = Path(__file__).parents[1]
LEGIBLE = "Grüße, \u05e9\u05dc\u05d5\u05dd\u200f, می\u200cخواهم, 👩\u200d🚀, a\u0301, \ue0b0, \\x1b"  # RLM, ZWNJ, ZWJ


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def guarded(has_bars: bool = False) -> tuple[GuardedStream, io.StringIO]:
    below = Terminal()
    return GuardedStream(cast("TextIO", below), has_bars), below


def test_every_such_character_is_shown() -> None:
    c0, c1 = (chr(code) for code in range(32) if chr(code) not in "\t\n"), map(chr, range(0x7F, 0xA0))
    for character in (*c0, *c1, *"\u2028\u202a\u202e\u2066\u2069\u200b\u2060\ufeff\xad\ud800\udfff\U000e0041"):
        assert visible(f"a{character}b") == "a" + character.encode("unicode_escape").decode() + "b", ascii(character)
        assert visible_lines(f"a{character}b") == visible(f"a{character}b")


def test_what_is_legible_stays() -> None:
    assert visible(LEGIBLE) == visible_lines(LEGIBLE) == LEGIBLE and visible(MARKUP) == MARKUP
    assert visible("a\n\tb") == r"a\n\tb" and visible_lines("a\n\tb\r\nc\rd") == "a\n\tb\nc\\rd"


def test_json_is_json_without_such_characters() -> None:
    data = {HOSTILE: [HOSTILE, LEGIBLE, "a\n\tb\r\n"]}
    escaped = ast.literal_eval(repr(data).replace("\\ud800", "\\\\ud800"))  # no reader of JSON takes half of a pair
    assert (
        json.loads(to_json(data)) == escaped and not steering(to_json(data)) and LEGIBLE.split("\\")[0] in to_json(data)
    )
    to_json(data).encode()


def test_an_escape_in_pieces_is_shown_too() -> None:
    for cut in range(len(HOSTILE)):
        stream, below = guarded()
        for piece in (HOSTILE[:cut], HOSTILE[cut:]):
            stream.write(piece)
        assert below.getvalue() == visible_lines(HOSTILE)
    stream.writelines(["a\x1b\n", "[2J\tb"])
    assert below.getvalue().endswith("a\\x1b\n[2J\tb") and not steering(below.getvalue())


def test_bars_of_libraries_move_on_their_own_lines_only() -> None:
    stream, below = guarded(has_bars=True)
    for piece in ("\r 1/2", "\r 2/2", "\n", "\r 1/9", "\x1b[A", "\r 2/2"):
        stream.write(piece)
    assert below.getvalue() == "\r 1/2\r 2/2\n\r 1/9\x1b[A\r 2/2"
    stream, below = guarded(has_bars=True)
    for piece in ("pic: ", "\rfine", "\x1b[A", "\n", "\x1b[A", "\rb\x1b[2K\r", "\x1b[A\x1b[2J"):
        stream.write(piece)
    assert below.getvalue() == "pic: \\rfine\\x1b[A\n\\x1b[A\\rb\\x1b[2K\\r\\x1b[A\\x1b[2J"
    stream, below = guarded()
    stream.write("\r 1/2")
    assert below.getvalue() == "\\r 1/2"


@pytest.mark.parametrize("stdout", [Terminal, io.StringIO])
def test_a_pipe_is_written_as_it_is(stdout: type[io.StringIO], monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = stdout(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    guard_streams()
    print(HOSTILE, end="")
    print(HOSTILE, end="", file=sys.stderr)
    assert out.getvalue() == (visible_lines(HOSTILE) if stdout is Terminal else HOSTILE)
    assert err.getvalue() == visible_lines(HOSTILE)
    assert sys.stderr.isatty() is False and not sys.stderr.closed


def test_a_stream_takes_texts_only() -> None:
    with pytest.raises(TypeError):
        guarded()[0].write(b"a")  # type: ignore[arg-type]


def test_the_guard_of_a_program_that_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    guard_streams()
    assert sys.stdout is None and sys.stderr is None


def test_every_console_is_guarded_and_nothing_is_read_as_markup() -> None:
    """rich's own console, and what reads markup or another program's styles, are named in no other module."""
    for path in sorted((ROOT / "pictool").rglob("*.py")):
        called = {
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call)
        }
        assert not called & {"Console", "from_markup", "from_ansi", "render_markup"}, path
