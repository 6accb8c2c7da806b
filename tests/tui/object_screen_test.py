"""The object view: header, text, layers, against the file."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent

from pictool.errors import StoreError
from pictool.store.store import Store
from pictool.tui.object_screen import ObjectScreen
from tui.drive import drive, make_app, press, put_object, screen_text


def screen(pilot: Pilot[None]) -> ObjectScreen:
    assert isinstance(pilot.app.screen, ObjectScreen)
    return pilot.app.screen


def test_header_text_and_search(store: Store) -> None:
    key = put_object(store, "The harbour was\nquiet. It holds a festival.", 5, before=4)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        shown = screen_text(screen(pilot).pic)
        assert key in shown and "5 (compiled after 4 tokens)" in shown
        assert "2 layers, 1 KV head of 4, float32" in shown and "quiet. It holds" in shown
        await press(pilot, "slash", *"it holds", "enter")
        assert screen(pilot).views[0].cursor == 4

    drive(make_app(store), scenario)


def test_a_search_from_another_tab_shows_the_text(store: Store) -> None:
    put_object(store, "A tame ferret.", 4)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-sinks"
        screen(pilot).query_one("#sinks").focus()
        await press(pilot, "slash", *"tame", "enter")
        assert screen(pilot).query_one(TabbedContent).active == "tab-text"
        assert screen(pilot).views[0].cursor == 1 and pilot.app.focused is screen(pilot).views[0]

    drive(make_app(store), scenario, (80, 24))


def test_an_object_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError):
        ObjectScreen(store, "0" * 64)
