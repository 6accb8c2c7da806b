"""Links of one prompt side by side: one cursor, the numbers of `pic inspect --diff`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from textual.containers import Vertical
from textual.pilot import Pilot
from textual.widgets import TabbedContent
from traces import make_trace, recounted

from pictool.core import Layout
from pictool.store.store import Store
from pictool.trace.diff import diff_traces
from pictool.trace.format import GeneratedToken
from pictool.tui.compare_screen import CompareScreen, overlap_marks
from pictool.tui.home_screen import HomeScreen
from pictool.tui.token_colors import BY_ALL, ELSEWHERE, HERE
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import Choice, RowTable
from pictool.tui.widgets.token_text import TokensView
from tui.drive import drive, load, make_app, notes, press, screen_text, settle, texts

ROWS = [((2, 3), (2,), ()), ((2, 5, 6), (5,), ()), ((), (), ())]
TRACES = [make_trace(rows, logits=np.array([0, 1, 2, 3, i, 0, -1], dtype=np.float32)) for i, rows in enumerate(ROWS)]


def screen(pilot: Pilot[None]) -> CompareScreen:
    assert isinstance(pilot.app.screen, CompareScreen)
    return pilot.app.screen


def mode(pilot: Pilot[None]) -> object:
    return screen(pilot).query_one("#mode", Choice).value


def layer(pilot: Pilot[None]) -> object:
    return screen(pilot).query_one("#layer", Choice).value


def cursors(pilot: Pilot[None]) -> list[int]:
    return [view.cursor for view in screen(pilot).views]


def test_all_cursors_move_together(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "right", "right")
        assert cursors(pilot) == [2, 2, 2] and screen(pilot).query_one(HeatMap).column == 2
        assert "legolink k=2 2, legolink k=2 1, legolink k=2 0" in str(screen(pilot).query_one("#status").render())
        await press(pilot, "d")
        assert cursors(pilot) == [3, 3, 3]  # by the first alone
        await press(pilot, "d", "d", "d")
        assert cursors(pilot) == [6, 6, 6] and "no further" in notes(pilot)
        await press(pilot, "D")
        assert cursors(pilot) == [5, 5, 5]
        await pilot.click(list(screen(pilot).query(TokensView))[1], offset=(0, 1))
        await settle(pilot)
        assert cursors(pilot) == [0, 0, 0]
        await press(pilot, "slash", *"def", "enter")
        assert cursors(pilot) == [4, 4, 4]

    drive(make_app(store, [load(trace, f"{i}.trace") for i, trace in enumerate(TRACES)]), scenario, (140, 40))


def test_numbers_are_those_of_diff(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        policies = screen(pilot).query_one("#policies", RowTable)
        for index in (1, 2):
            diff = diff_traces(TRACES[0], TRACES[index])
            row = texts(policies, index)
            assert row[2:6] == (
                f"{diff.selection.overall:.3f}", str(diff.common), f"{diff.kl[0]:.3g}", f"{diff.max_logit:.3g}",
            )  # fmt: skip
        await press(pilot, "l", "t")
        assert layer(pilot) == 0 and screen(pilot).query_one(TabbedContent).active == "tab-map"
        steps = screen(pilot).views[1]._steps
        assert (steps > 0).nonzero()[0].tolist() == [2, 5, 6, 8, 9]
        await press(pilot, "L")
        assert layer(pilot) is None

    drive(make_app(store, [load(trace, f"{i}.trace") for i, trace in enumerate(TRACES)]), scenario)


@pytest.mark.parametrize("layer", [None, 0])
def test_the_overlap_is_that_of_diff(layer: int | None) -> None:
    """Of two links: by both, by either alone; at a layer, and at any."""
    a, b = TRACES[:2]
    for trace, other, index, other_index in ((a, b, 0, 1), (b, a, 1, 0)):
        steps = overlap_marks([a, b], layer)[index]
        if layer is None:
            diff = diff_traces(trace, other).selection
            both, here, elsewhere = diff.both, diff.only_a, diff.only_b
        else:
            x, y = trace.rows[layer, :8], other.rows[layer, :8]
            both, here, elsewhere = x & y, x & ~y, y & ~x
        assert (steps[:8] == BY_ALL).tolist() == both.tolist() and not steps[8:].any()
        assert (steps[:8] == HERE).tolist() == here.tolist()
        assert (steps[:8] == ELSEWHERE).tolist() == elsewhere.tolist()
        assert (overlap_marks([a, b], layer)[other_index][:8] == HERE).tolist() == elsewhere.tolist()


def test_overlap_by_key_with_counts_and_a_legend(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "m")
        assert mode(pilot) == "overlap"
        marks = overlap_marks(TRACES, None)
        for view, mark in zip(screen(pilot).views, marks, strict=True):
            assert (view._steps == mark).all() and isinstance(view.parent, Vertical)
        columns = [view.parent for view in screen(pilot).views]
        assert isinstance(columns[1], Vertical)
        assert columns[1].border_subtitle == "0 by all, 3 here, 1 elsewhere"
        assert "computed by all here, not by all elsewhere" in screen_text(screen(pilot).pic)
        await press(pilot, "l")
        assert (screen(pilot).views[0]._steps == overlap_marks(TRACES, 0)[0]).all()
        await press(pilot, "m")
        assert mode(pilot) == "computed" and screen(pilot).views[0]._steps[8] == 9

    drive(make_app(store, [load(trace, f"{i}.trace") for i, trace in enumerate(TRACES)]), scenario, (150, 40))


def test_answers_part_where_they_do(store: Store) -> None:
    said = GeneratedToken(4, " no", -1.5)
    other = make_trace(generated=(TRACES[0].generated[0], said, GeneratedToken(1, "</s>", -0.02)))

    async def scenario(pilot: Pilot[None]) -> None:
        answers = screen(pilot).query_one("#answers", RowTable)
        assert [texts(answers, row) for row in range(3)] == [
            ("", "0", " yes -0.5", " yes -0.5"), ("≠", "1", "</s> -0.01", " no -1.5"), ("≠", "2", "", "</s> -0.02")
        ]  # fmt: skip
        assert diff_traces(TRACES[0], other).common == 1
        await press(pilot, "t", "t")
        assert screen(pilot).query_one(TabbedContent).active == "tab-answers"

    drive(make_app(store, [load(TRACES[0], "0.trace"), load(other, "1.trace")]), scenario)


def test_other_prompts_are_refused(store: Store) -> None:
    layout = TRACES[0].layout
    other = make_trace(layout=Layout(layout.tokens[::-1].copy(), layout.starts))

    async def scenario(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app.screen, HomeScreen)
        assert "different prompts" in notes(pilot)
        await press(pilot, "c")
        assert isinstance(pilot.app.screen, HomeScreen)

    drive(make_app(store, [load(TRACES[0], "a.trace"), load(other, "b.trace")]), scenario)


@pytest.mark.parametrize(("width", "is_narrow"), [(60, True), (120, False)])
def test_what_does_not_fit_side_by_side_stands_below(store: Store, width: int, is_narrow: bool) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        pickers = [picker.region for picker in screen(pilot).query(Choice) if picker.display]
        assert all(picker.right <= width and picker.width > 12 for picker in pickers)
        assert screen(pilot).query_one("#legend").region.width > 40
        tops = {view.region.y for view in screen(pilot).views}
        assert (len(tops) == 2) == is_narrow

    drive(make_app(store, [load(trace, f"{i}.trace") for i, trace in enumerate(TRACES[:2])]), scenario, (width, 40))


def test_four_traces_in_80_columns_show_text(store: Store) -> None:
    """All four while the pane below is folded, as it is at first; else the focus scrolls to the others."""
    policies = ["legolink", "cacheblend", "naive", "prophet"]
    traces = [replace(TRACES[i % 3], report={**TRACES[i % 3].report, "algo": algo}) for i, algo in enumerate(policies)]

    def shown(pilot: Pilot[None]) -> int:
        return screen_text(screen(pilot).pic).count("a bc")

    async def scenario(pilot: Pilot[None]) -> None:
        assert shown(pilot) == 4 and all(policy in screen_text(screen(pilot).pic) for policy in policies)
        assert len({view.size for view in screen(pilot).views}) == 1
        assert sum(view.size.height for view in screen(pilot).views[::2]) >= 14  # of one column
        await press(pilot, "t")
        assert shown(pilot) == 2 and screen(pilot).query_one(TabbedContent).active == "tab-policies"
        screen(pilot).views[3].focus()
        await settle(pilot)
        assert screen(pilot).views[3].region.bottom <= 24
        await press(pilot, "f")
        assert shown(pilot) == 4
        await press(pilot, "slash", *"e", "enter")
        assert cursors(pilot) == [5] * 4
        await pilot.resize_terminal(60, 20)
        await settle(pilot)
        assert shown(pilot)

    drive(make_app(store, [load(trace, f"{i}.trace") for i, trace in enumerate(traces)]), scenario, (80, 24))


def test_links_that_compute_nothing_are_said_to(store: Store) -> None:
    plain = make_trace([(), (), ()])

    async def scenario(pilot: Pilot[None]) -> None:
        assert "no link computed a context token" in screen_text(screen(pilot).pic)
        await press(pilot, "l")
        assert "no link computed a context token at layer 0" in screen_text(screen(pilot).pic)

    drive(make_app(store, [load(plain, f"{i}.trace") for i in range(2)]), scenario)


def test_full_recompute_is_the_baseline_and_is_named(store: Store) -> None:
    full = replace(TRACES[2], report={**TRACES[2].report, "algo": "full", "params": {}})
    loaded = [load(TRACES[0], "a.trace"), load(full, "b.trace")]

    async def scenario(pilot: Pilot[None]) -> None:
        titles = [str(column.border_title) for column in screen(pilot).query("#texts > Vertical")]
        assert titles == ["full (baseline)", TRACES[0].label]

    drive(make_app(store, loaded), scenario, (140, 40))


@pytest.mark.parametrize("width", [107, 80, 141])
def test_texts_beside_each_other_break_and_scroll_alike(store: Store, width: int) -> None:
    """Columns of different widths, also after the terminal was resized."""
    layout = Layout.of([0], [[1] * 190, [2] * 199], [3] * 10)
    rows = np.zeros((3, 400), dtype=bool)
    rows[:, layout.num_context :] = True
    long = recounted(replace(make_trace(), layout=layout, rows=rows, pieces=(" word",) * 400))
    loaded = [load(long, f"{i}.trace") for i in range(3)]

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "pagedown")
        await pilot.resize_terminal(width, 40)
        await settle(pilot)
        await press(pilot, "down", "down")
        shown = screen(pilot).views
        assert len({view.wrapped.width for view in shown}) == 1 and len(shown) > 1
        assert len({view.scroll_offset.y for view in shown}) == 1 and shown[0].scroll_offset.y > 0
        shown[1].scroll_to(y=2, animate=False, immediate=True)
        await settle(pilot)
        assert {view.scroll_offset.y for view in shown} == {2}

    drive(make_app(store, loaded), scenario, (120, 34))
