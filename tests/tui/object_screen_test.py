"""The object view: header, text, layers, against the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent

from pictool.errors import ForeignObjectError, StoreError
from pictool.store.store import Store
from pictool.tui.object_screen import ObjectScreen, fixup_colors
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import RowTable
from tui.drive import FakeJob, drive, make_app, make_sinks, press, put_object, screen_text, told


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
        assert not Path("out.json").exists() and told(pilot)

    drive(make_app(store), scenario)


def test_sinks_are_asked_of_the_model_once(store: Store) -> None:
    key, sinks = put_object(store, "text", 5), make_sinks()
    job = FakeJob(sinks)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "t", "t", "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-sinks"
        assert "a asks the model" in screen_text(screen(pilot).pic) and not job.requests
        await press(pilot, "a")
        table = screen(pilot).query_one("#sinks", RowTable)
        share = 100 * sinks.initial_share
        assert f"draw {share.mean():.1f} % of the attention of the 3 behind (40.0" in screen_text(screen(pilot).pic)
        assert table.count == 7 and table.texts(0)[:3] == ("all", "", f"{share.mean():.1f}")
        for row in range(6):
            texts = table.texts(1 + row)
            assert texts[:3] == (str(row // 3), str(row % 3), f"{share[row // 3, row % 3]:.1f}")
            assert texts[3] == "█" * round(share[row // 3, row % 3] / 10)
            assert texts[4] == f"{100 * sinks.dummy_share[row // 3, row % 3]:.1f}"
            drawn = [f"{100 * share:.1f}" for share in sinks.share_by_offset[row // 3, row % 3]]
            assert texts[5:] == (*drawn, *[""] * 7)
        await press(pilot, "e", "ctrl+u", *"out.json", "enter")
        await press(pilot, "escape", "enter", "a")  # the answer is kept
        assert screen(pilot).query_one("#sinks", RowTable).count == 7

    drive(make_app(store, job=job), scenario)
    assert job.requests == [key]
    assert np.allclose(json.loads(Path("out.json").read_text())["sink_profile"]["share"], sinks.initial_share)


def test_asking_for_sinks_is_cancelled_or_refused(store: Store) -> None:
    put_object(store, "text", 5)
    job = FakeJob(make_sinks(), waits=True)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        await pilot.press("a")
        await pilot.pause(0.2)
        assert "loading the model (escape cancels)" in screen_text(screen(pilot).pic)
        await press(pilot, "escape")
        assert screen(pilot).query_one("#sinks", RowTable).count == 0 and "a asks" in screen_text(screen(pilot).pic)
        job.answer, job.waits, job._is_cancelled = ForeignObjectError("x: made for model aaaa"), False, False
        await press(pilot, "a")
        assert "made for model aaaa" in told(pilot)
        await press(pilot, "escape")
        assert not isinstance(pilot.app.screen, ObjectScreen)

    drive(make_app(store, job=job), scenario)


def test_browsing_is_no_use(store: Store) -> None:
    """An object that is shown here counts neither as hit nor as used."""
    key = put_object(store, "text", 5)
    os.utime(store.path(key), ns=(10**18, 10**18))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "t", "t", "e", "ctrl+u", *"out.json", "enter")

    drive(make_app(store), scenario)
    store.counters.flush()
    assert Path("out.json").exists() and store.hits() == {} and store.path(key).stat().st_mtime_ns == 10**18


def test_json(store: Store) -> None:
    put_object(store, "text", 3)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "e", "ctrl+u", *"out.json", "enter")

    drive(make_app(store), scenario)
    exported = json.loads(Path("out.json").read_text())
    assert (exported["tokens"], exported["text"], exported["layer_stats"][0]["key"]["max"]) == (3, "text", 11)


TABLE = [0.0, 0.5, 2.0, 0.25]
PIECES = ("A", " tame", " ferret", ".")


def test_the_table_of_fixups_as_heat(store: Store) -> None:
    """The map needs no model; the text is coloured once the tokenizer has cut it."""
    key = put_object(store, "A tame ferret.", 4, fixups=TABLE)
    job = FakeJob(PIECES)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        app = screen(pilot).pic
        assert "press h to colour the text by its table of fixups" in screen_text(app)
        heat_map, table = screen(pilot).query_one(HeatMap), screen(pilot).query_one("#fixups", RowTable)
        assert heat_map._values.tolist() == [TABLE] and not job.requests
        assert [table.texts(row)[:2] for row in range(4)] == [
            ("2", "2.000"), ("1", "0.500"), ("3", "0.250"), ("0", "0.000")
        ]  # fmt: skip
        assert [table.texts(row)[2] for row in (0, 1, 3)] == ["█" * 10, "█" * 2, ""]
        await press(pilot, "h")
        assert job.requests == [("pieces", key)] and screen(pilot).views[0].token_text.pieces == PIECES
        assert screen(pilot).views[0]._steps.tolist() == fixup_colors(np.asarray(TABLE, dtype="<f2")).steps.tolist()
        assert screen(pilot).views[0]._steps.tolist() == [0, 2, 9, 1] and table.texts(0)[4] == " ferret"
        await press(pilot, "right", "right")
        assert heat_map.column == 2 and "token 2 « ferret» 2" in screen_text(app)
        screen(pilot).query_one(TabbedContent).active = "tab-fixups"
        table.focus()
        await press(pilot, "down", "enter")
        assert screen(pilot).views[0].cursor == 1 and heat_map.column == 1
        heat_map.focus()
        await press(pilot, "left")
        assert screen(pilot).views[0].cursor == 0 and table.cursor == 3
        await press(pilot, "h")
        assert (
            screen(pilot).query_one(TabbedContent).active == "tab-text" and pilot.app.focused is screen(pilot).views[0]
        )
        await press(pilot, "slash", *"ferret", "enter")  # words again, which are searched
        assert screen(pilot).pieces is None and screen(pilot).views[0].cursor == 2
        job.answer = ForeignObjectError("x: its tokens are another tokenizer's")
        await press(pilot, "h")
        assert "another tokenizer's" in told(pilot)
        assert "press h" in screen_text(app)
        screen(pilot).query_one(TabbedContent).active = "tab-layers"
        screen(pilot).query_one("#layers").focus()
        await press(pilot, "slash", *"tame", "enter")  # the text is shown
        assert screen(pilot).views[0].cursor == 1 and pilot.app.focused is screen(pilot).views[0]

    drive(make_app(store, job=job), scenario, (80, 24))


def test_an_object_without_a_table_says_how_it_gets_one(store: Store) -> None:
    put_object(store, "text", 3)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        assert "no table of fixups to colour it by (pic compile --probes 4)" in screen_text(screen(pilot).pic)
        await press(pilot, "h")
        assert "pic compile --probes 4 FILE" in told(pilot)

    drive(make_app(store), scenario, (80, 24))


def test_an_object_that_is_not_there(store: Store) -> None:
    with pytest.raises(StoreError):
        ObjectScreen(store, "0" * 64)
