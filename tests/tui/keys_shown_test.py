"""What a screen says of itself: the keys at the bottom, the help by pane, an empty store, tables that fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey
from traces import make_trace

from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.dialogs import HelpScreen, keys_of
from pictool.tui.widgets.key_footer import KeyFooter
from pictool.tui.widgets.table import Column, RowTable
from tui.drive import drive, load, make_app, press, put_object, screen_text, settle

TRACE, OTHER = make_trace(), make_trace([(2, 3), (2,), ()])
ALWAYS = {"help"}
SCREENS: dict[str, tuple[int, Sequence[str], set[str]]] = {
    "home": (0, [], {"open", "quit", "filter", "mark", "link", "compare", "delete"}),
    "object": (0, ["enter"], {"back", "search", "tab", "fold", "heat of fixups", "sinks"}),
    "diff": (0, ["space", "d"], {"back", "tab"}),
    "link": (0, ["l"], {"back", "link", "cancel the run"}),
    "trace": (1, [], {"back", "search", "fold", "show", "layer", "attention", "tab"}),
    "compare": (4, [], {"back", "search", "fold", "difference", "show", "layer", "texts"}),
}


def footer_keys(app: PicApp) -> list[FooterKey]:
    return list(app.screen.query_one(KeyFooter).query(FooterKey))


@pytest.mark.parametrize("name", SCREENS)
def test_the_keys_at_the_bottom_fit_into_80_columns(store: Store, name: str) -> None:
    num_traces, keys, expected = SCREENS[name]
    for index in range(3):
        put_object(store, f"text {index}", 5 + index)
    traces = [load(trace, f"{index}.trace") for index, trace in enumerate([TRACE, OTHER, TRACE, OTHER][:num_traces])]

    async def scenario(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PicApp)
        await press(pilot, *keys)
        shown = footer_keys(app)
        assert {key.description for key in shown} >= expected | ALWAYS
        await pilot.resize_terminal(38, 24)
        await settle(pilot)
        for width, keys_at in ((80, shown), (38, footer_keys(app))):
            assert sum(cell_len(f" {key.key_display} {key.description} ") for key in keys_at) <= width
        line = screen_text(app).splitlines()[-1]
        assert line.split() == [
            word for key in footer_keys(app) for word in (key.key_display, *key.description.split())
        ]
        assert "help" in line

    drive(make_app(store, traces), scenario, (80, 24))


def test_help_is_grouped_by_pane(store: Store) -> None:
    put_object(store, "text", 5)

    async def scenario(pilot: Pilot[None]) -> None:
        panes = keys_of(pilot.app.screen)
        titles = ["on this screen", "in a search line", "in a table", "on every screen"]
        assert sorted(panes) == sorted(titles) and [*panes][:1] == titles[:1] and [*panes][-1:] == titles[-1:]
        assert panes["on this screen"]["x, del"] == "delete" and panes["on this screen"]["q"] == "quit"
        assert panes["in a table"]["⏎"] == "open" and "quit" not in panes["in a table"].values()
        assert panes["on every screen"]["?"] == "help" and "q" not in panes["on every screen"]
        await press(pilot, "enter")
        panes = keys_of(pilot.app.screen)
        assert panes["on every screen"]["esc"] == "back" and panes["in a map"]["+, ="] == "zoom in"
        assert "n" in panes["on this screen"] and "token before" in panes["in a text"].values()
        await press(pilot, "question_mark")
        text = screen_text(pilot.app)  # type: ignore[arg-type]
        assert isinstance(pilot.app.screen, HelpScreen) and "on this screen" in text and "in a search line" in text
        await pilot.resize_terminal(60, 40)
        await settle(pilot)
        assert pilot.app.screen.has_class("-narrow")

    drive(make_app(store), scenario, (100, 40))


def test_an_empty_store_says_what_to_do(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, PicApp)
        text = screen_text(app)
        assert "There is no object here yet." in text and "pic compile FILE… --store " in text
        assert not app.home.query_one("#preview").display
        put_object(store, "it is here.", 5)
        app.home.refresh_store()
        await settle(pilot)
        assert "There is no object" not in screen_text(app) and app.home.query_one("#preview").display
        await press(pilot, "slash", *"zzz")
        assert "No key, file or text contains 'zzz'" in screen_text(app)

    drive(make_app(store), scenario, (80, 24))


COLUMNS = (
    Column("key", 12),
    Column("text", 0),
    Column("size", 7, True),
    Column("used", 6, True),
    Column("sinks", 5, True),
)


def test_the_text_of_a_table_has_a_third_of_the_width_before_others_are_left_out() -> None:
    table = RowTable(COLUMNS)
    table._needed = (12, 1 << 20, 7, 6, 5)
    assert table._widths(100) == [12, 62, 7, 6, 5]
    assert table._widths(60) == [12, 22, 7, 6, 5]
    assert table._widths(56) == [12, 18, 7, 6, 5]
    assert table._widths(55) == [12, 24, 7, 6, 0] and table._widths(40) == [12, 17, 7, 0, 0]


def test_columns_grow_to_their_cells_where_there_is_room() -> None:
    table = RowTable((Column("policy", 6), Column("answer", 0), Column("file", 4)))
    table.show_rows([("cacheblend ratio=0.15", "yes", "link.trace"), ("naive", "no", "a")])
    assert table._widths(60) == [21, 25, 10]
    assert table._widths(20)[0] <= 13 and sum(table._widths(20)) <= 20
    table.show_rows([])
    assert table._widths(60)[0] == 6
