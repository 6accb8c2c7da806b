"""The trace view: every key, the mouse, search, what the model answers or refuses, export."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent
from traces import make_trace

from pictool.errors import TraceError
from pictool.store.store import Store
from pictool.tui.shades import Choice, shade_of
from pictool.tui.trace_screen import TraceScreen
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.picker import Picker
from pictool.tui.widgets.table import RowTable
from pictool.tui.widgets.tokens import TokensView
from tui.drive import FakeJob, drive, make_app, make_look, opened, press, screen_text, settle

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32))
LOOK = make_look(TRACE)


def screen(pilot: Pilot[None]) -> TraceScreen:
    assert isinstance(pilot.app.screen, TraceScreen)
    return pilot.app.screen


def tokens(pilot: Pilot[None]) -> TokensView:
    return screen(pilot).views[0]


def status(pilot: Pilot[None]) -> str:
    return str(screen(pilot).query_one("#status").render())


def test_the_cursor_tells_the_token_under_it(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        assert status(pilot).startswith("head+0 «<s>»")
        await press(pilot, "right", "right")
        assert status(pilot).startswith("1+1 « b»  id 2, position 2, computed at 2 of 3 layers, score 2")
        assert screen(pilot).query_one(HeatMap).column == 2
        await press(pilot, "end")
        assert status(pilot).startswith("answer+1 «</s>»  id 1, logprob -0.01")
        await press(pilot, "up")
        assert status(pilot).startswith("tail+0") or status(pilot).startswith("tail+1")
        await press(pilot, "home", "down")
        assert status(pilot).startswith("1+0 «a»")
        await press(pilot, "pagedown")
        assert tokens(pilot).cursor >= 8
        await press(pilot, "pageup")
        assert tokens(pilot).cursor <= 1

    drive(make_app(store, [opened(TRACE)]), scenario)


def test_parts_are_gone_through(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        seen = []
        for _ in range(5):
            await press(pilot, "]")
            seen.append(tokens(pilot).cursor)
        assert seen == [1, 4, 8, 10, 10]
        await press(pilot, "[")
        assert tokens(pilot).cursor == 8

    drive(make_app(store, [opened(TRACE)]), scenario)


def test_a_click_on_a_token_a_cell_and_a_slider(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await pilot.click(TokensView, offset=(1 + 2, 3))  # padding, "a b": the third cell
        await settle(pilot)
        assert tokens(pilot).cursor == 2
        await pilot.click(HeatMap, offset=(9 + 5, 1))
        await settle(pilot)
        assert tokens(pilot).cursor == 5 and screen(pilot).choice.layer == 1
        await pilot.click("#layer", offset=(1 + len("layer ‹") + 11, 0))
        await settle(pilot)
        assert screen(pilot).choice.layer == 2
        await pilot.click("#layer", offset=(2, 0))  # the left half: less
        await settle(pilot)
        assert screen(pilot).choice.layer == 1

    drive(make_app(store, [opened(TRACE)]), scenario)


def test_layers_and_modes_by_key(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        for layer in (0, 1, 2, 2):
            await press(pilot, "l")
            assert screen(pilot).choice.layer == layer
            wanted = shade_of(TRACE, None, Choice(layer=layer))
            assert (tokens(pilot)._steps == wanted.steps).all() and screen(pilot).shade.row == layer
        await press(pilot, "L", "L", "L")
        assert screen(pilot).choice.layer is None
        await press(pilot, "m")
        assert screen(pilot).choice.mode == "score" and "the policy's score" in screen_text(screen(pilot).pic)
        await press(pilot, "m", "h")
        assert screen(pilot).choice.mode == "computed"
        assert any("no head to choose here" in one.message for one in pilot.app._notifications)

    drive(make_app(store, [opened(TRACE)]), scenario)


def test_the_map_is_moved_in_and_zoomed(store: Store) -> None:
    trace = make_trace()

    async def scenario(pilot: Pilot[None]) -> None:
        heat = screen(pilot).query_one(HeatMap)
        heat.focus()
        await press(pilot, "right", "right", "down")
        assert (heat.column, heat.row) == (2, 0) and screen(pilot).choice.layer == 0 and tokens(pilot).cursor == 2
        await press(pilot, "up", "left")
        assert (heat.column, heat.row) == (1, None) and screen(pilot).choice.layer is None
        await press(pilot, "plus", "minus")
        assert heat.window == (0, 12)

    drive(make_app(store, [opened(trace)]), scenario)


def test_search(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"F G", "enter")
        assert tokens(pilot).cursor == 6 and tokens(pilot)._is_match.nonzero()[0].tolist() == [6, 7]
        await press(pilot, "slash", "ctrl+u", *"e", "enter")  # "e" and " yes"
        assert tokens(pilot).cursor == 10
        await press(pilot, "n")
        assert tokens(pilot).cursor == 5  # from the first again
        await press(pilot, "N")
        assert tokens(pilot).cursor == 10
        await press(pilot, "slash", "escape", "n")
        assert not tokens(pilot)._is_match.any()
        assert any("search with /" in one.message for one in pilot.app._notifications)

    drive(make_app(store, [opened(TRACE)]), scenario)


def test_the_model_is_asked_and_its_answer_shown(store: Store) -> None:
    job = FakeJob(LOOK)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a")
        assert job.asked == [("hand.trace", None)] and screen(pilot).choice.mode == "attention"
        await press(pilot, "l", "h", "h", "r")
        assert screen(pilot).choice == Choice("attention", 0, 1, 0)
        wanted = shade_of(TRACE, LOOK, Choice("attention", 0, 1, 0))
        assert np.array_equal(screen(pilot).shade.values, wanted.values, equal_nan=True)
        await press(pilot, "H", "R", "t")
        assert screen(pilot).choice == Choice("attention", 0, 0, None)
        assert screen(pilot).query_one(TabbedContent).active == "tab-parts"
        assert LOOK.attention is not None
        drawn = 100 * LOOK.attention.initial(4)[0, 0].mean(0)
        texts = [screen(pilot).query_one("#parts", RowTable).texts(row)[5] for row in range(3)]
        assert texts == [f"{one:.1f}" for one in drawn]
        for mode in ("minmax", "kv", "attention-dev", "computed"):
            await press(pilot, "m")
            assert screen(pilot).choice.mode == mode

    drive(make_app(store, [opened(TRACE)], job), scenario)


def test_the_attention_of_one_layer_is_not_shown_as_another_s(store: Store) -> None:
    assert LOOK.attention is not None
    seen = LOOK.attention
    one_layer = type(LOOK)(type(seen)(seen.scores[[1]], (1,), seen.starts, seen.num_prompt), LOOK.against, LOOK.choices)
    job = FakeJob(one_layer)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l", "l", "A")
        assert job.asked == [("hand.trace", 1)] and screen(pilot).choice == Choice("attention")
        await press(pilot, "l")  # layer 0
        assert screen(pilot).choice.layer is None and screen(pilot).query_one("#layer", Picker).value is None
        assert any("was not asked for" in one.message for one in pilot.app._notifications)

    drive(make_app(store, [opened(TRACE)], job), scenario)


def test_another_model_is_refused_in_words(store: Store) -> None:
    job = FakeJob(TraceError("hand.trace: traced with model aaaa, but this model has model cccc"))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a")
        assert screen(pilot).look is None and screen(pilot).choice.mode == "computed"
        assert any("traced with model aaaa" in one.message for one in pilot.app._notifications)
        job.answer = LOOK
        await press(pilot, "a")
        assert screen(pilot).look is LOOK or screen(pilot).look is not None

    drive(make_app(store, [opened(TRACE)], job), scenario)


def test_a_question_is_cancelled_by_escape(store: Store) -> None:
    job = FakeJob(LOOK, waits=True)

    async def scenario(pilot: Pilot[None]) -> None:
        await pilot.press("a")
        await pilot.pause(0.2)
        assert screen(pilot).asking.is_running and "escape cancels" in screen_text(screen(pilot).pic)
        await pilot.press("a")  # one at a time
        await press(pilot, "escape")
        assert screen(pilot).look is None and not screen(pilot).asking.is_running
        assert len(job.asked) == 1
        await press(pilot, "escape")
        assert not isinstance(pilot.app.screen, TraceScreen)

    drive(make_app(store, [opened(TRACE)], job), scenario)


def test_tabs_have_the_numbers_of_the_view(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "t", "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-layers"
        rows = [screen(pilot).query_one("#layers", RowTable).texts(i)[:3] for i in range(3)]
        assert rows == [("0", "3", "37.5"), ("1", "2", "25.0"), ("2", "1", "12.5")]
        await press(pilot, "t")
        answers = screen(pilot).query_one("#answers", RowTable)
        share = np.exp(3) / np.exp(TRACE.logits.astype(np.float64)).sum()
        assert answers.texts(0) == ("first token", " yes", f"{share:.4f}")
        assert answers.texts(5) == ("time", "first token", "4.0 ms")

    drive(make_app(store, [opened(TRACE)]), scenario)


@pytest.mark.parametrize("suffix", ["svg", "png", "json"])
def test_export(store: Store, suffix: str) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a", "e", "ctrl+u", *f"out.{suffix}", "enter")

    drive(make_app(store, [opened(TRACE)], FakeJob(LOOK)), scenario)
    data = Path(f"out.{suffix}").read_bytes()
    if suffix == "svg":
        words = "".join(ElementTree.fromstring(data).itertext()).replace("\xa0", " ")
        assert "answer yes" in words and "export to" not in words
    elif suffix == "png":
        from PIL import Image

        width, height = Image.open("out.png").size
        assert (width % 100, height % 34) == (0, 0)
    else:
        found = json.loads(data)
        assert found["layers"] == [3, 2, 1] and found["pieces"][1] == "a"
        assert LOOK.attention is not None and LOOK.against is not None
        assert np.allclose(found["attention"]["share"], LOOK.attention.share())
        assert np.allclose(found["against"]["key"], LOOK.against.kv.key)


@pytest.mark.parametrize("name", ["out.pdf", "no/such\0", "."])
def test_what_cannot_be_written_is_said(store: Store, name: str) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        screen(pilot)._write(Path(name.replace("\0", "") + "/x.svg" if "no" in name else name))
        await settle(pilot)
        assert pilot.app._notifications

    Path("no").write_text("a file, and no directory")
    drive(make_app(store, [opened(TRACE)]), scenario)
