"""Upkeep from the first screen: delete after a question, pin, preview."""

from __future__ import annotations

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from pictool.store.eviction import pin, pinned
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.base import ConfirmDialog
from pictool.tui.home_screen import HomeScreen
from pictool.tui.widgets.table import RowTable
from tui.drive import drive, make_app, notes, press, put_object, screen_text, texts

SMALL = (80, 24)


@pytest.fixture
def keys(store: Store) -> list[str]:
    return sorted(put_object(store, f"{name} is here.", size) for name, size in (("apple", 5), ("pear", 9), ("fig", 7)))


def app_of(pilot: Pilot[None]) -> PicApp:
    assert isinstance(pilot.app, PicApp)
    return pilot.app


def is_red(app: PicApp, row: int) -> bool:
    """Whether a row of the objects is drawn in the colour of errors."""
    return all(cell.style == "red" for cell in app.home.objects.get_row_at(row))


def test_deleting_asks_first_and_leaves_what_is_pinned(store: Store, keys: list[str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        await press(pilot, "x")
        assert isinstance(app.screen, ConfirmDialog)
        text = screen_text(app)
        assert "Delete 1 object, 1." in text
        assert keys[0][:12] in text and "is here.»" in text
        await press(pilot, "enter")  # no is the default
        assert isinstance(app.screen, HomeScreen) and store.keys() == keys
        await press(pilot, "space", "p")  # the marked one alone
        assert pinned(store.root) == {keys[0]} and texts(app.home.query_one("#objects", RowTable), 0)[0] == "✓P"
        await press(pilot, "x")
        assert isinstance(app.screen, HomeScreen) and "pinned ones stay" in notes(pilot)
        await press(pilot, "space", "x")
        await press(pilot, "y")
        assert store.keys() == [keys[0], keys[2]] and [stored.key for stored in app.home.listed] == store.keys()
        assert app.home.marked == {keys[0]} and "deleted 1 object" in notes(pilot)
        await press(pilot, "p")
        assert not pinned(store.root)

    drive(make_app(store), scenario, SMALL)


def test_what_happened_meanwhile_is_said_and_nothing_else_is_deleted(store: Store, keys: list[str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "space", "space", "x")
        store.path(keys[1]).unlink()
        await press(pilot, "y")
        assert "no such object" in notes(pilot) and store.keys() == [keys[0], keys[2]]
        pin(store.root, keys[0])  # by another process, after the question
        await press(pilot, "escape", "home", "space", "x")
        assert "pinned ones stay" in notes(pilot) or isinstance(pilot.app.screen, ConfirmDialog)

    drive(make_app(store), scenario, SMALL)


def test_what_cannot_be_read_is_red(store: Store, keys: list[str]) -> None:
    store.path(keys[2]).write_bytes(b"nonsense")

    async def scenario(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        assert [is_red(app, row) for row in range(3)] == [False, False, True]
        assert texts(app.home.objects, 2)[3].startswith("DAMAGED: not an object")  # why; the path is in the preview

    drive(make_app(store), scenario, SMALL)


def test_a_preview_of_the_object_under_the_cursor(store: Store, keys: list[str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        for key in keys:
            facts, text = str(app.home.query_one("#preview", Static).render()).split("\n")
            stored = store.describe(key)
            assert stored is not None and text == stored.text
            assert facts == f"{key[:12]}  LlamaForCausalLM  float32"
            await press(pilot, "down")
        await press(pilot, "f")
        assert not app.home.query_one("#preview").region.height
        await pilot.resize_terminal(80, 12)
        await press(pilot, "f")
        assert not app.home.query_one("#preview").region.height  # no room

    drive(make_app(store), scenario, SMALL)


def test_the_traces_are_not_taken_for_objects(store: Store, keys: list[str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app_of(pilot).home.traces.display = True
        app_of(pilot).home.traces.focus()
        await press(pilot, "x", "p")
        assert isinstance(pilot.app.screen, HomeScreen) and store.keys() == keys and not pinned(store.root)
        assert notes(pilot).startswith("no object to delete")

    drive(make_app(store), scenario, SMALL)
