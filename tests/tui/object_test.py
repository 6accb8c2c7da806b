"""The object view: header, text, layers, against the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent

from pictool.errors import StoreError
from pictool.store.store import Store
from pictool.tui.object_screen import ObjectScreen
from pictool.tui.widgets.table import RowTable
from tui.drive import drive, make_app, press, put_object, screen_text


def screen(pilot: Pilot[None]) -> ObjectScreen:
    assert isinstance(pilot.app.screen, ObjectScreen)
    return pilot.app.screen


def test_header_text_and_search(store: Store) -> None:
    key = put_object(store, "The harbour was\nquiet. It holds a festival.", 5, sinks=4)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        seen = screen_text(screen(pilot).pic)
        assert key in seen and "5 (compiled behind 4 dummy tokens)" in seen
        assert "2 layers, 1 KV heads of 4, float32" in seen and "quiet. It holds" in seen
        await press(pilot, "slash", *"it holds", "enter")
        assert screen(pilot).views[0].cursor == 4

    drive(make_app(store), scenario)


def test_layers_and_checksums(store: Store) -> None:
    key = put_object(store, "text", 3)
    with store.open(key) as file:
        checksums = file.checksums

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "t")
        table = screen(pilot).query_one("#layers", RowTable)
        norms = np.linalg.norm(np.arange(12).reshape(3, 4), axis=1)
        assert table.count == 4
        assert table.texts(0) == ("0", "K", f"{norms.mean():.4g}", f"{norms[0]:.4g}", "0", "11")
        await press(pilot, "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-checksums"
        table = screen(pilot).query_one("#checksums", RowTable)
        rows = {table.texts(row)[0]: table.texts(row)[1] for row in range(table.count)}
        assert rows["text"] == checksums["text"] and rows["layer 1"] == checksums["layers"][1]

    drive(make_app(store), scenario)


@pytest.mark.parametrize("what", ["gone", "damaged"])
def test_layers_of_an_object_that_changed_meanwhile(store: Store, what: str) -> None:
    path = store.path(put_object(store, "text", 3))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        if what == "gone":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[-20] ^= 1
            path.write_bytes(data)
        await press(pilot, "t")
        assert screen(pilot).query_one("#layers", RowTable).count == 0
        assert ("no such object" if what == "gone" else "does not match its checksum") in str(
            screen(pilot).query_one("#problem").render()
        )
        await press(pilot, "e", "ctrl+u", *"out.json", "enter")
        assert not Path("out.json").exists() and pilot.app._notifications

    drive(make_app(store), scenario)


def test_json(store: Store) -> None:
    put_object(store, "text", 3)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "e", "ctrl+u", *"out.json", "enter")

    drive(make_app(store), scenario)
    found = json.loads(Path("out.json").read_text())
    assert (found["tokens"], found["text"], found["layer_stats"][0]["key"]["max"]) == (3, "text", 11)


def test_an_object_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError):
        ObjectScreen(store, "0" * 64)
