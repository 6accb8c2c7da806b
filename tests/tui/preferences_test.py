"""The theme: remembered in the user's configuration, or as light as the terminal."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from terminal import open_terminal
from textual.pilot import Pilot
from traces import make_trace

from pictool.errors import StoreError
from pictool.store.store import Store
from pictool.tui import background
from pictool.tui.app import LIGHT_THEME, PicApp
from pictool.tui.background import BackgroundQuestion, is_light
from pictool.tui.preferences import Preferences, preferences_path
from pictool.tui.services import Services
from tui.drive import drive, load, make_app, settle


def app_of(store: Store, path: Path | None, is_light: bool = False) -> PicApp:
    services: Services = make_app(store).services
    return PicApp(store, [load(make_trace())], services, None, Preferences.read(path), is_light)


def test_a_theme_is_remembered_and_a_light_terminal_gets_a_light_one(store: Store) -> None:
    path = preferences_path()
    assert path == Path(os.environ["XDG_CONFIG_HOME"]) / "pictool" / "tui.json"

    async def choose(pilot: Pilot[None]) -> None:
        assert pilot.app.theme == LIGHT_THEME and not path.exists()  # what was found out is not remembered
        pilot.app.theme = "nord"
        await settle(pilot)
        assert json.loads(path.read_text()) == {"theme": "nord"}

    async def come_back(pilot: Pilot[None]) -> None:
        assert pilot.app.theme == "nord"

    drive(app_of(store, path, is_light=True), choose)
    drive(app_of(store, path, is_light=True), come_back)


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"theme": 3}', b"[]", b"\xff", b"[" * 100_000, b" " * 70_000, b'{"theme": "no such"}']
)
def test_a_damaged_file_is_ignored_with_one_note(store: Store, content: bytes) -> None:
    path = Path("tui.json")
    path.write_bytes(content)
    app = app_of(store, path)

    async def scenario(pilot: Pilot[None]) -> None:
        notes = [notice.message for notice in pilot.app._notifications]
        assert len(notes) == 1 and notes[0].startswith("tui.json: ")
        assert pilot.app.theme == "textual-dark" and path.read_bytes() == content

    if b"no such" in content or content == b"{":  # two of them on the screen
        drive(app, scenario)
    else:
        preferences = Preferences.read(path)
        assert preferences.problem.startswith("tui.json: ") and preferences.theme is None


@given(st.binary(max_size=60) | st.text(max_size=20).map(lambda name: json.dumps({"theme": name}).encode()))
def test_whatever_is_in_the_file_it_is_read_or_ignored(content: bytes) -> None:
    Path("any.json").write_bytes(content)
    preferences = Preferences.read(Path("any.json"))
    assert (preferences.theme is None) == bool(preferences.problem)


def test_a_file_that_cannot_be_written_is_said() -> None:
    Path("file").write_text("no directory")
    with pytest.raises(StoreError, match="no theme is remembered"):
        Preferences(Path("file/tui.json")).remember_theme("nord")
    Preferences().remember_theme("nord")  # nowhere to keep it


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # as the specification says, not used
    monkeypatch.setenv("HOME", "/home/u")
    assert preferences_path() == Path("/home/u/.config/pictool/tui.json")

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert preferences_path() is None and Preferences.read(None) == Preferences()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"\x1b]11;rgb:ffff/ffff/eeee\x1b\\\x1b[?62;22c", True),
        (b"\x1b]11;rgb:1e1e/1e1e/1e1e\x07\x1b[?6c", False),
        (b"\x1b]11;rgba:e/e/e/f\x1b\\\x1b[?6c", True),
        (b"\x1b]11;rgb:00/00/ff\x1b\\\x1b[?6c", False),  # blue is dark
        (b"\x1b[?6c", False),  # a terminal that knows only the second question
        (b"nonsense", False),
    ],
)
def test_the_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: bool) -> None:
    import termios

    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(background, "WAIT_S", 60.0 if answer.endswith(b"c") else 0.01)
    leader, follower = open_terminal()
    try:
        before = termios.tcgetattr(follower)
        with BackgroundQuestion(follower, follower) as question:
            assert os.read(leader, 100) == b"\x1b]11;?\x1b\\\x1b[c"
            terminal = threading.Timer(0.01, os.write, (leader, answer))
            terminal.start()
            assert question.is_light() == expected
            terminal.join()
        assert termios.tcgetattr(follower) == before  # echo is on again
    finally:
        os.close(leader)
        os.close(follower)
    assert is_light(answer) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("15;8", False)]
)
def test_the_environment_says_it(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("COLORFGBG", value)
    with BackgroundQuestion(-1, -1) as question:  # nothing is asked
        assert question.is_light() == expected


def test_a_terminal_that_does_not_know_the_question_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    with BackgroundQuestion(-1, -1) as question:
        assert not question.is_light()
