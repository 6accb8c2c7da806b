"""The object view: header, text, layers, against the file."""

from __future__ import annotations

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent

from pictool.errors import ForeignObjectError, StoreError
from pictool.store.store import Store
from pictool.tui.object_screen import ObjectScreen, fixup_colors
from pictool.tui.widgets.table import RowTable
from tui.drive import FakeJob, drive, make_app, notes, press, put_object, screen_text, texts


def screen(pilot: Pilot[None]) -> ObjectScreen:
    assert isinstance(pilot.app.screen, ObjectScreen)
    return pilot.app.screen


def test_header_text_and_search(store: Store) -> None:
    key = put_object(store, "The harbour was\nquiet. It holds a festival.", 5, sinks=4)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        shown = screen_text(screen(pilot).pic)
        assert key in shown and "5 (compiled after 4 dummy tokens)" in shown
        assert "2 layers, 1 KV head of 4, float32" in shown and "quiet. It holds" in shown
        await press(pilot, "slash", *"it holds", "enter")
        assert screen(pilot).views[0].cursor == 4

    drive(make_app(store), scenario)


TABLE = [0.0, 0.5, 2.0, 0.25]
PIECES = ("A", " tame", " ferret", ".")


def test_the_table_of_fixups_as_heat(store: Store) -> None:
    """The table needs no model; the text is coloured once the tokenizer has cut it."""
    key = put_object(store, "A tame ferret.", 4, fixups=TABLE)
    job = FakeJob(PIECES)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        app = screen(pilot).pic
        assert "press h to colour the text by its table of fixups" in screen_text(app)
        table = screen(pilot).query_one("#fixups", RowTable)
        assert not job.requests
        assert [texts(table, row)[:2] for row in range(4)] == [
            ("2", "2.000"), ("1", "0.500"), ("3", "0.250"), ("0", "0.000")
        ]  # fmt: skip
        assert [texts(table, row)[2] for row in (0, 1, 3)] == ["█" * 10, "█" * 2, ""]
        await press(pilot, "h")
        assert job.requests == [("pieces", key)] and screen(pilot).views[0].token_text.pieces == PIECES
        assert screen(pilot).views[0]._steps.tolist() == fixup_colors(np.asarray(TABLE, dtype="<f2")).steps.tolist()
        assert screen(pilot).views[0]._steps.tolist() == [0, 2, 9, 1] and texts(table, 0)[4] == " ferret"
        await press(pilot, "right", "right")
        assert "token 2 « ferret» 2" in screen_text(app)
        screen(pilot).query_one(TabbedContent).active = "tab-fixups"
        table.focus()
        await press(pilot, "down", "enter")
        assert screen(pilot).views[0].cursor == 1
        await press(pilot, "h")
        assert (
            screen(pilot).query_one(TabbedContent).active == "tab-text" and pilot.app.focused is screen(pilot).views[0]
        )
        await press(pilot, "slash", *"ferret", "enter")  # words again, which are searched
        assert screen(pilot).pieces is None and screen(pilot).views[0].cursor == 2
        job.answer = ForeignObjectError("x: its tokens are another tokenizer's")
        await press(pilot, "h")
        assert "another tokenizer's" in notes(pilot)
        assert "press h" in screen_text(app)
        screen(pilot).query_one(TabbedContent).active = "tab-sinks"
        screen(pilot).query_one("#sinks").focus()
        await press(pilot, "slash", *"tame", "enter")  # the text is shown
        assert screen(pilot).views[0].cursor == 1 and pilot.app.focused is screen(pilot).views[0]

    drive(make_app(store, job=job), scenario, (80, 24))


def test_an_object_without_a_table_says_how_it_gets_one(store: Store) -> None:
    put_object(store, "text", 3)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        assert "no table of fixups to colour it by (pic compile --probes 4)" in screen_text(screen(pilot).pic)
        await press(pilot, "h")
        assert "pic compile --probes 4 FILE" in notes(pilot)

    drive(make_app(store), scenario, (80, 24))


def test_an_object_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError):
        ObjectScreen(store, "0" * 64)
