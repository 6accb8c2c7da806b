"""The trace screen: every key, the mouse, search, what the model answers or refuses, and its words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import TabbedContent
from traces import make_trace

from pictool.errors import TraceError
from pictool.store.store import Store
from pictool.trace.counts import count_rows
from pictool.tui.token_colors import ColorBy, token_colors
from pictool.tui.trace_screen import TraceScreen, part_rows, token_line
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import RowTable
from pictool.tui.widgets.token_text import TokensView
from tui.drive import FakeJob, drive, load, make_analysis, make_app, notes, press, screen_text, settle, texts

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32))
ANALYSIS = make_analysis(TRACE)


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

    drive(make_app(store, [load(TRACE)]), scenario)


def test_parts_are_gone_through(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        starts = []
        for _ in range(5):
            await press(pilot, "]")
            starts.append(tokens(pilot).cursor)
        assert starts == [1, 4, 8, 10, 10]
        await press(pilot, "[")
        assert tokens(pilot).cursor == 8

    drive(make_app(store, [load(TRACE)]), scenario)


def test_a_click_on_a_token_a_cell_and_a_choice(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await pilot.click(TokensView, offset=(1 + 2, 3))  # padding, "a b": the third cell
        await settle(pilot)
        assert tokens(pilot).cursor == 2
        await pilot.click(HeatMap, offset=(9 + 5, 1))
        await settle(pilot)
        assert tokens(pilot).cursor == 5
        await pilot.click("#layer")
        await press(pilot, "down", "enter")
        assert screen(pilot).color_by.layer == 0

    drive(make_app(store, [load(TRACE)]), scenario)


def test_layers_and_modes_by_key(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        for layer in (0, 1, 2):
            await press(pilot, "l")
            assert screen(pilot).color_by.layer == layer
            expected = token_colors(TRACE, None, ColorBy(layer=layer))
            assert (tokens(pilot)._steps == expected.steps).all() and screen(pilot).token_colors.row == layer
        await press(pilot, "L", "L", "L")
        assert screen(pilot).color_by.layer is None
        await press(pilot, "m")
        assert screen(pilot).color_by.mode == "score" and "the policy's score" in screen_text(screen(pilot).pic)
        await press(pilot, "m", "h")
        assert screen(pilot).color_by == ColorBy()

    drive(make_app(store, [load(TRACE)]), scenario)


def test_the_map_is_moved_in(store: Store) -> None:
    trace = make_trace()

    async def scenario(pilot: Pilot[None]) -> None:
        heat = screen(pilot).query_one(HeatMap)
        heat.focus()
        await press(pilot, "right", "right", "l")
        assert (heat.column, heat.row) == (2, 0) and tokens(pilot).cursor == 2
        await press(pilot, "left")
        assert heat.column == tokens(pilot).cursor == 1

    drive(make_app(store, [load(trace)]), scenario)


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
        assert "/ searches" in notes(pilot)

    drive(make_app(store, [load(TRACE)]), scenario)


def test_the_model_is_asked_and_its_answer_shown(store: Store) -> None:
    job = FakeJob(ANALYSIS)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a")
        assert job.requests == ["hand.trace"] and screen(pilot).color_by.mode == "attention"
        await press(pilot, "l", "h", "h", "r")
        assert screen(pilot).color_by == ColorBy("attention", 0, 1, 0)
        expected = token_colors(TRACE, ANALYSIS, ColorBy("attention", 0, 1, 0))
        assert np.array_equal(screen(pilot).token_colors.values, expected.values, equal_nan=True)
        await press(pilot, "H", "R", "t")
        assert screen(pilot).color_by == ColorBy("attention", 0, 0, None)
        assert screen(pilot).query_one(TabbedContent).active == "tab-parts"
        for mode in ("kv", "attention-dev", "computed"):
            await press(pilot, "m")
            assert screen(pilot).color_by.mode == mode

    drive(make_app(store, [load(TRACE)], job), scenario)


def test_another_model_is_refused_in_words(store: Store) -> None:
    job = FakeJob(TraceError("hand.trace: traced with model aaaa, but this model has model cccc"))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a")
        assert screen(pilot).analysis is None and screen(pilot).color_by.mode == "computed"
        assert "traced with model aaaa" in notes(pilot)
        job.answer = ANALYSIS
        await press(pilot, "a")
        assert screen(pilot).analysis is ANALYSIS or screen(pilot).analysis is not None

    drive(make_app(store, [load(TRACE)], job), scenario)


def test_a_question_is_cancelled_by_escape(store: Store) -> None:
    job = FakeJob(ANALYSIS, waits=True)

    async def scenario(pilot: Pilot[None]) -> None:
        await pilot.press("a")
        await pilot.pause(0.2)
        assert screen(pilot).pic.is_job_running and "escape cancels" in screen_text(screen(pilot).pic)
        await pilot.press("a")  # one at a time
        await press(pilot, "escape")
        assert screen(pilot).analysis is None and not screen(pilot).pic.is_job_running
        assert len(job.requests) == 1
        await press(pilot, "escape")
        assert not isinstance(pilot.app.screen, TraceScreen)

    drive(make_app(store, [load(TRACE)], job), scenario)


def test_tabs_have_the_numbers_of_the_view(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-parts"
        table, starts = screen(pilot).query_one("#parts", RowTable), (*TRACE.layout.starts, TRACE.layout.num_tokens)
        for index, (start, end) in enumerate(pairwise(starts)):
            computed = TRACE.rows[:, start:end].sum() / len(TRACE.rows)
            assert texts(table, index)[1:4] == (str(start), str(end - start), f"{computed:.1f}")

    drive(make_app(store, [load(TRACE)]), scenario)


def test_where_nothing_is_coloured_it_says_what_colours(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        hint = "no context token has a colour (layers that computed it); a: attention"
        assert hint in screen_text(screen(pilot).pic)
        await press(pilot, "a")
        assert "a: attention" not in screen_text(screen(pilot).pic)

    plain = make_trace([(), (), ()])
    drive(make_app(store, [load(plain)], FakeJob(make_analysis(plain))), scenario)


@pytest.mark.parametrize("height", [24, 40])
def test_the_pane_below_folds_and_the_text_takes_its_room(store: Store, height: int) -> None:
    """A low terminal shows the text alone at first."""

    async def scenario(pilot: Pilot[None]) -> None:
        if height == 24:
            assert tokens(pilot).size.height >= 14
            await press(pilot, "f")
        before = tokens(pilot).size.height
        await press(pilot, "f")
        assert tokens(pilot).size.height >= before + 8 and not screen(pilot).query_one(HeatMap).region.height
        await press(pilot, "f")
        assert tokens(pilot).size.height == before

    drive(make_app(store, [load(TRACE)]), scenario, (80, height))


def test_words_of_a_token() -> None:
    trace = replace(TRACE, scores=np.arange(10, dtype=np.float32) - 3)
    colors = token_colors(trace, ANALYSIS, ColorBy("attention"))
    line = token_line(trace, ANALYSIS, colors, 5).plain
    assert line.startswith("2+1 «e»  id 5, position 5, computed at 3 of 3 layers, score 2, |d(K,V)| ")
    assert line.endswith(f"share of attention: {colors.values[5]:.4g}")
    line = token_line(trace, ANALYSIS, colors, 11).plain
    assert line.startswith(
        "answer+1 «</s>»  id 1, logprob -0.01, KL 0.5, p 0.2500, under full 0.7500, full's choice ' no'"
    )


def test_parts_of_one_layer() -> None:
    rows = part_rows(count_rows(TRACE), 1)
    assert [row[:4] for row in rows] == [
        ("head", "0", "1", "0.0"), ("1", "1", "3", "1.0"), ("2", "4", "4", "1.0"), ("tail", "8", "2", "2.0"),
    ]  # fmt: skip
