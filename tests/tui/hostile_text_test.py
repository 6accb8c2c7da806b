"""Every screen with names, texts, answers and errors that are markup and escapes: shown, and obeyed by none."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands.hostile_text_test import TEXT, hostile_trace, put_hostile
from hostile_text import HOSTILE, NAME, steering
from textual.pilot import Pilot
from textual.widgets import Input

from pictool.errors import PicError
from pictool.store.sources import Source, add_sources
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.home_screen import HomeScreen
from pictool.tui.services import LinkForm, Listener
from tui.drive import FakeJob, drive, load, make_analysis, make_app, make_sinks, press, put_object, screen_text, settle

WIDE = (160, 50)


@dataclass
class HostileJob(FakeJob):
    """Notes and pieces of answers that are hostile."""

    def link(self, form: LinkForm, listener: Listener) -> Path | None:
        listener("note", HOSTILE)
        for piece in (HOSTILE[:-9], HOSTILE[-9:]):
            listener("text", piece)
        return super().link(form, listener)


def check(pilot: Pilot[None]) -> str:
    """The screen, on which no character steers, and nothing that was written as a link can be clicked."""
    assert isinstance(pilot.app, PicApp)
    text = screen_text(pilot.app)
    assert not steering(text.replace("\n", ""))
    return text


async def walk(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await press(pilot, key)
        check(pilot)


def test_the_store_s_objects() -> None:
    store = Store(NAME)
    key, other = put_hostile(store), put_object(store, TEXT, 3)
    add_sources(store.root, {key: Source(HOSTILE, HOSTILE)})
    shutil.copy(store.path(key), store.path(key).with_name(key[:-1] + ("0" if key[-1] != "0" else "1") + ".kvo"))

    async def scenario(pilot: Pilot[None]) -> None:
        home = check(pilot)
        assert "[red]a[/]" in home and "DAMAGED" in home and "Store [red]\\x1b[8m" in home
        await walk(pilot, "space", "s", "slash", "[", "escape", "question_mark", "escape", "o", "escape", "e")
        app = pilot.app
        assert isinstance(app, PicApp) and isinstance(app.screen, HomeScreen)
        row = next(i for i, entry in enumerate(app.screen.listed) if entry.key == key)
        app.screen.objects.move_cursor(row=row)
        app.screen.marked = {key, other}
        await walk(pilot, "x")
        assert check(pilot).count("[red]a[/]") > 1  # the names of what would be deleted
        await walk(pilot, "n", "l", "escape", "escape")
        await walk(pilot, "enter", "t")
        assert "[red]a[/]" in check(pilot)  # the architecture and the tokenizer are any text
        store.path(key).write_bytes(store.path(key).read_bytes()[:-1] + b"x")
        await walk(pilot, "t", "t", "a")

    drive(make_app(store, job=HostileJob(make_sinks())), scenario, WIDE)


def test_a_trace_and_what_the_model_says_of_it(store: Store) -> None:
    trace = hostile_trace()

    async def scenario(pilot: Pilot[None]) -> None:
        assert check(pilot).count("[red]a[/]") > 3
        await walk(pilot, "t", "t", "t", "right", "end", "a", "m", "m", "l", "h", "r", "slash", "[", "/", "escape")
        await walk(pilot, "ctrl+p", "escape", "question_mark", "escape")

    drive(make_app(store, [load(trace, NAME)], HostileJob(make_analysis(trace))), scenario, WIDE)


def test_a_comparison(store: Store) -> None:
    traces = [load(hostile_trace(), name) for name in (NAME, f"2{NAME}")]

    async def scenario(pilot: Pilot[None]) -> None:
        assert check(pilot).count("[red]a[/]") > 3
        await walk(pilot, "t", "t", "t", "t", "m", "d", "l", "right", "escape", "down", "space", "c")

    drive(make_app(store, traces), scenario, WIDE)


@pytest.mark.parametrize("answer", [hostile_trace(), PicError(HOSTILE)], ids=["linked", "failed"])
def test_the_link_form(store: Store, answer: object) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await walk(pilot, "l")
        for name, value in (("documents", HOSTILE), ("query", HOSTILE), ("trace", "[red]\x1b[8m.trace")):
            pilot.app.screen.query_one(f"#{name}", Input).value = value
        await settle(pilot)
        pilot.app.screen.query_one("#documents", Input).value = "a.txt"  # the other one is a glob without files
        await walk(pilot, "ctrl+s")
        if isinstance(answer, PicError):
            assert "c[/][/nope]" in check(pilot) and "\\x1b]52" in check(pilot)

    drive(make_app(store, job=HostileJob(answer)), scenario, WIDE)


def test_notices_and_pictures(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PicApp)
        app.show_note(HOSTILE)
        await settle(pilot)
        assert "[red]a[/][link=" in check(pilot).replace("\n", "")
        await press(pilot, "e")
        await pilot.pause(0.5)
        (picture,) = Path().glob("*.svg")
        assert not steering(picture.read_text())

    put_hostile(store)
    drive(make_app(store), scenario, WIDE)


def test_a_forgotten_escape_is_not_drawn(store: Store) -> None:
    """The last of the guards: whatever a screen forgets, every line goes through it."""

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "slash")
        pilot.app.screen.query_one(Input).value = f"a{TEXT}b"
        await settle(pilot)
        check(pilot)

    drive(make_app(store), scenario)
