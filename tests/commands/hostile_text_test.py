"""What a terminal receives of names, texts, metadata and errors that try to steer it, command by command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from escapes_test import Terminal
from hostile_text import HOSTILE, MARKUP, NAME, steering
from traces import make_trace

from commands.run import write
from pictool.commands.app import run
from pictool.commands.console.progress import answers_bar, progress
from pictool.commands.console.terminal import open_screen, table
from pictool.commands.console.verbosity import note
from pictool.commands.link import Stream
from pictool.core import Geometry, Target
from pictool.escapes import GuardedStream
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.trace.format import Candidate, GeneratedToken, Trace, TracedChunk, write_trace

TEXT = HOSTILE.replace("\ud800", "")  # no file holds a surrogate


@dataclass(frozen=True)
class Shown:
    """What a terminal received."""

    code: int
    out: str
    err: str


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """Runs the program with both streams on a terminal."""

    def run_there(*arguments: object) -> Shown:
        out, err = Terminal(), Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm-256color")
            patch.setattr(sys, "argv", ["pic", *map(str, arguments)])
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as ended:
                run()
        code = ended.value.code
        assert isinstance(code, int)
        return Shown(code, out.getvalue(), err.getvalue())

    return run_there


def put_hostile(store: Store) -> str:
    """An object whose text is hostile; its key. Metadata that do not print are damage."""
    target = Target(MARKUP, "a" * 64, "b" * 64, "float32", Geometry(1, 1, 1))
    tokens = np.asarray([7], dtype=np.int32)
    meta = ObjectMeta(target.key(tokens, "none"), target, 1, "none")
    store.put(CompiledChunk(meta, TEXT, tokens, [(bytes(4), bytes(4))]))
    return meta.key


def hostile_trace() -> Trace:
    trace = make_trace(scores=np.arange(10, dtype=np.float32))
    return replace(
        trace, texts=("<s>", TEXT, TEXT, TEXT), pieces=(TEXT,) * 10, top=(Candidate(3, TEXT), Candidate(2, TEXT)),
        generated=(GeneratedToken(3, TEXT, -0.5), GeneratedToken(1, TEXT, -0.01)),
        chunks=(TracedChunk(TEXT, "1" * 64), TracedChunk(TEXT, "2" * 64, after=((4,),))),
        report={**trace.report, "answer": TEXT, "algo": TEXT, "model": TEXT, "engine": TEXT, "params": {TEXT: TEXT}},
    )  # fmt: skip


def test_names_and_texts_of_objects(on_terminal: Callable[..., Shown]) -> None:
    store = Store(NAME)
    key = put_hostile(store)
    for command in (("ls",), ("ls", "--json"), ("ls", "--stats")):
        shown = on_terminal("store", *command, "--store", store.root)
        assert shown.code == 0 and not steering(shown.out + shown.err), command
        if "--json" in command:
            assert json.loads(shown.out)[0]["text"] == TEXT
    for options in ((), ("--text",), ("--json", "--text")):
        shown = on_terminal("inspect", store.path(key), *options)
        assert shown.code == 0 and not steering(shown.out + shown.err), options
    store.path(key).write_bytes(store.path(key).read_bytes()[:-1] + b"x")
    write(store.path("c" * 64), store.path(key).read_bytes())
    for command in (("ls",), ("verify",), ("verify", "--json"), ("verify", "--repair")):
        shown = on_terminal("store", *command, "--store", store.root)
        assert not steering(shown.out + shown.err), command


def test_traces(on_terminal: Callable[..., Shown]) -> None:
    write_trace(Path(NAME), hostile_trace())
    for command in (("inspect", NAME, "--text"), ("inspect", NAME, "--json"), ("inspect", NAME, NAME, "--diff")):
        shown = on_terminal(*command)
        assert shown.code == 0 and not steering(shown.out + shown.err), command
    shown = on_terminal("inspect", NAME)
    assert MARKUP[:20] in shown.out and "\\x1b]52" in shown.out


def test_errors_name_what_was_given(on_terminal: Callable[..., Shown], model: Path) -> None:
    write(NAME, b"\xff\xfe no text")
    for command in (
        ("compile", NAME, "-m", model), ("link", "none\x1b[8m\r", "-q", "why?", "-m", model), ("inspect", NAME),
        ("link", NAME, "-q", "\u202ewhy", "-m", NAME),
        ("link", "-q", "a", "--algo", HOSTILE, "-m", model), ("store", "ls", "--store", NAME), (NAME,),
        ("link", f"--{NAME}"), ("store", "pull", "c" * 64, "--remote", f"http://127.0.0.1:1/{NAME}"),
    ):  # fmt: skip
        shown = on_terminal(*command)
        assert shown.code in (1, 2) and not steering(shown.out + shown.err), command
        assert "\\x1b" in shown.err or "\\u202e" in shown.err, shown.err
        assert shown.code == 2 or shown.err.count("\n") == 1


def test_a_streamed_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", GuardedStream(terminal))  # type: ignore[arg-type]
    stream = Stream()
    for piece in (" a\x1b", "[2Jb\n\tc", "\r", "\x9b", "2J "):
        stream(piece)
    assert terminal.getvalue() == "a\\x1b[2Jb\n\tc\\r\\x9b2J"


def test_screens_draw_markup_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", Terminal())
    screen = open_screen(300)
    screen.print(HOSTILE)
    screen.print(table([MARKUP], [[HOSTILE]]))
    assert isinstance(sys.stdout, Terminal)
    assert not steering(sys.stdout.getvalue()) and sys.stdout.getvalue().count(MARKUP) == 3


def test_bars_and_what_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars move the cursor themselves; no text that they or others show does."""
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", GuardedStream(terminal))  # type: ignore[arg-type]
    link = "\x1b]8;;http://x.y\x1b\\z"
    with progress(MARKUP, 3) as advance, progress("one", 1):
        advance()
        note(f"{MARKUP} {link}")
        print(link, file=sys.stderr)
    with answers_bar(HOSTILE) as show:
        show(1, 3)
    text = terminal.getvalue()
    assert MARKUP[:20] in text and "\x1b]8" not in text and "\x1b]52" not in text and "\x9b" not in text
    assert text.count("\\x1b]8;;") == 2
    assert isinstance(sys.stderr, GuardedStream)
