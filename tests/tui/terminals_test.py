"""Every screen on every kind of terminal: narrow, low, without colour, resized; nothing crashes, nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from traces import make_trace

from pictool.store.store import Store
from pictool.tui.trace_screen import TraceScreen
from pictool.tui.widgets.token_text import TokensView
from tui.drive import (
    FakeJob,
    drive,
    load,
    make_analysis,
    make_app,
    press,
    put_object,
    screen_lines,
    screen_text,
    settle,
)

PIECES = ("<s>", "a", " \x1b[31mred", "東京", "\u202e", "e" * 90, "\n", " g", " h", "?")
TRACE = make_trace(pieces=PIECES, scores=np.arange(10, dtype=np.float32))
SIZES = [(60, 24), (40, 12), (20, 6), (200, 60)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_screen_at_every_size(store: Store, size: tuple[int, int]) -> None:
    put_object(store, "some\x1b[31m text\u202e", 5)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "a", "l", "m", "t", "t", "t", "end")
        assert_fits(pilot, size)
        await press(pilot, "escape", "enter", "t", "t")
        assert_fits(pilot, size)
        await press(pilot, "escape", "l")
        assert_fits(pilot, size)

    drive(make_app(store, [load(TRACE)], FakeJob(make_analysis(TRACE))), scenario, size)


def assert_fits(pilot: Pilot[None], size: tuple[int, int]) -> None:
    lines = screen_lines(pilot.app)
    assert len(lines) == size[1] and {cell_len(line.text) for line in lines} == {size[0]}
    assert not any(char in line.text for line in lines for char in "\x1b\u202e")


def test_a_resize_keeps_the_cursor_in_view(store: Store) -> None:
    trace = make_trace()

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "end")
        for size in ((60, 20), (30, 16), (150, 50), (60, 24)):
            await pilot.resize_terminal(*size)
            await settle(pilot)
            view = pilot.app.screen.query_one(TokensView)
            line = int(view.wrapped.line_of[view.cursor])
            assert view.cursor == 11 and view.scroll_offset.y <= line < view.scroll_offset.y + view.size.height
            assert_fits(pilot, size)

    drive(make_app(store, [load(trace)]), scenario)


@pytest.mark.parametrize("keys", [["ctrl+p", "s"], ["escape", "l"], ["o"], ["shift+tab", "shift+tab"]], ids="-".join)
def test_without_colour_what_has_the_focus_is_seen(
    store: Store, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """Some cells stand out: reversed, or underlined."""
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        await pilot.pause(0.5)
        styles = [style for line in screen_lines(pilot.app) for _, style, _ in line if style]
        assert any(style.reverse or style.underline for style in styles)
        assert all(ink is None or ink.is_default for style in styles for ink in (style.color, style.bgcolor))

    drive(make_app(store, [load(make_trace())]), scenario)


def test_without_colour_steps_are_told_by_other_means(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(pilot: Pilot[None]) -> None:
        screen = pilot.app.screen
        assert isinstance(screen, TraceScreen) and pilot.app.no_color
        styles = [style for line in screen_lines(pilot.app) for _, style, _ in line if style]
        inks = [ink for style in styles for ink in (style.color, style.bgcolor)]
        assert all(ink is None or ink.is_default for ink in inks)
        assert "@" in screen_text(screen.pic)  # the map is drawn with characters
        view = screen.views[0]
        marks = {token: (view._style(token).underline, view._style(token).reverse) for token in (1, 2, 8)}
        assert marks == {1: (None, None), 2: (True, False), 8: (True, True)}

    drive(make_app(store, [load(make_trace([(2,), (), ()]))]), scenario)
