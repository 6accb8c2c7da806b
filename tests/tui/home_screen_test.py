"""The first screen: objects and traces, by keys and by mouse, while the store changes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from rich.filesize import decimal
from textual.pilot import Pilot
from textual.widgets import HelpPanel, Input, Static
from traces import make_trace

from pictool.store.sources import Source, add_sources
from pictool.store.store import Store
from pictool.trace.format import TracedChunk, write_trace
from pictool.tui.app import PicApp
from pictool.tui.compare_screen import CompareScreen
from pictool.tui.home_screen import HomeScreen
from pictool.tui.link_screen import LinkScreen
from pictool.tui.object_screen import ObjectScreen
from pictool.tui.services import LoadedTrace
from pictool.tui.trace_screen import TraceScreen
from pictool.tui.widgets.table import RowTable
from tui.drive import drive, load, make_app, notes, press, put_object, screen_text, settle, texts


@pytest.fixture
def keys(store: Store) -> dict[str, str]:
    return {name: put_object(store, f"{name} is here.", size) for name, size in (("apple", 5), ("pear", 9), ("fig", 7))}


def home(app: PicApp) -> HomeScreen:
    return app.home


def is_home(app: PicApp) -> bool:
    return isinstance(app.screen, HomeScreen)


def shown_keys(app: PicApp) -> list[str]:
    return [entry.key for entry in home(app).listed]


def objects(app: PicApp) -> RowTable:
    return app.home.query_one("#objects", RowTable)


def test_the_list_says_what_the_files_say(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        assert shown_keys(app) == sorted(keys.values())
        for index, key in enumerate(sorted(keys.values())):
            stored = store.describe(key)
            assert stored is not None and stored.meta is not None
            row = ("  ", key[:12], str(stored.meta.num_tokens), stored.text, decimal(stored.num_bytes), "0")
            assert texts(objects(app), index)[:6] == row and texts(objects(app), index)[7:] == ("0", "")
            assert re.fullmatch(r"\d+ (s|min)", texts(objects(app), index)[6])
        assert "3 objects" in screen_text(app)

    drive(make_app(store), scenario)


def make_app_of(pilot: Pilot[None]) -> PicApp:
    assert isinstance(pilot.app, PicApp)
    return pilot.app


def test_objects_are_named_by_the_files_that_they_came_from(store: Store, keys: dict[str, str]) -> None:
    add_sources(store.root, {keys["fig"]: Source("docs/of fruit.txt", "models/tiny")})

    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "slash", *"OF FRUIT", "enter")
        assert shown_keys(app) == [keys["fig"]] and texts(objects(app), 0)[3] == "of fruit.txt: fig is here."
        preview = str(app.home.query_one("#preview", Static).render())
        assert preview.startswith(f"{keys['fig'][:12]}  docs/of fruit.txt  models/tiny  float32")
        await press(pilot, "l")
        assert app.screen.query_one("#documents", Input).value == keys["fig"][:12]
        await press(pilot, "escape")

    drive(make_app(store), scenario)


def test_filter_and_sort(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "s")
        assert home(app).sort == "tokens" and shown_keys(app) == [keys["pear"], keys["fig"], keys["apple"]]
        await press(pilot, "slash", *"PEA", "enter")
        assert shown_keys(app) == [keys["pear"]] and "1 of 3 objects" in screen_text(app)
        await press(pilot, "slash", "escape")
        assert len(shown_keys(app)) == 3 and app.screen is home(app)
        await pilot.click("#objects", offset=(20, 0))  # the title "tokens"
        await settle(pilot)
        assert home(app).sort == "tokens"

    drive(make_app(store), scenario)


def test_hits_and_last_use_are_seen_as_they_are_written_down(store: Store, keys: dict[str, str]) -> None:
    now = time.time_ns()
    for name, hits, seconds in (("apple", 3, 7200), ("pear", 1, 40 * 86_400), ("fig", 0, 600)):
        for _ in range(hits):
            store.open(keys[name]).close()
        used = now - seconds * 10**9
        os.utime(store.path(keys[name]), ns=(used, used))
    store.counters.flush()

    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "s", "s", "s", "s")
        assert home(app).sort == "hits" and shown_keys(app) == [keys["apple"], keys["pear"], keys["fig"]]
        use = [texts(objects(app), row)[5:7] for row in range(3)]
        assert use == [("3", "2 h"), ("1", "40 d"), ("0", "10 min")]
        await press(pilot, "s")
        assert home(app).sort == "used" and shown_keys(app) == [keys["fig"], keys["apple"], keys["pear"]]
        store.open(keys["pear"]).close()  # by another process, while the list is seen
        store.counters.flush()
        app.home.refresh_store()
        await settle(pilot)
        assert shown_keys(app)[0] == keys["pear"] and texts(objects(app), 0)[5] == "2"
        assert re.fullmatch(r"\d+ s", texts(objects(app), 0)[6])
        (store.root / "store.sqlite3").write_bytes(b"no database")
        app.home.refresh_store()
        await settle(pilot)
        assert {texts(objects(app), row)[5] for row in range(3)} == {"?"}  # never a number that is none

    drive(make_app(store), scenario)


def test_an_object_opens_by_key_and_by_a_second_click(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "down", "enter")
        assert isinstance(app.screen, ObjectScreen) and app.screen.key == sorted(keys.values())[1]
        await press(pilot, "escape")
        assert is_home(app)
        await pilot.click("#objects", offset=(6, 3), times=2)
        await settle(pilot)
        assert isinstance(app.screen, ObjectScreen) and app.screen.key == sorted(keys.values())[2]

    drive(make_app(store), scenario)


def test_objects_that_come_and_go_are_seen(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "ctrl+end")
        at = home(app).listed[objects(app).cursor_row].key
        store.path(sorted(keys.values())[0]).unlink()
        new = put_object(store, "quince came later.", 4)
        app.home.refresh_store()
        await settle(pilot)
        assert set(shown_keys(app)) == {new, *sorted(keys.values())[1:]}
        assert home(app).listed[objects(app).cursor_row].key == at  # the cursor stays on its object

    drive(make_app(store), scenario)


def test_an_object_that_is_gone_or_damaged_is_said_and_not_shown(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        first, second = sorted(keys.values())[:2]
        store.path(first).unlink()
        data = bytearray(store.path(second).read_bytes())
        data[40] ^= 1
        store.path(second).write_bytes(data)  # in place: nothing tells, until it is opened
        await press(pilot, "enter")
        assert app.screen is home(app) and "no such object" in notes(pilot)
        assert first not in shown_keys(app)
        await press(pilot, "enter")
        assert app.screen is home(app) and "damaged" in notes(pilot)

    drive(make_app(store), scenario)


def test_damaged_objects_are_listed_as_such(store: Store, keys: dict[str, str]) -> None:
    store.path(keys["fig"]).write_bytes(b"nonsense of some length")

    async def scenario(pilot: Pilot[None]) -> None:
        row = next(i for i, entry in enumerate(home(make_app_of(pilot)).listed) if entry.key == keys["fig"])
        assert texts(objects(make_app_of(pilot)), row)[3].startswith("DAMAGED: ")
        await press(pilot, *"ssssssss")  # every order copes with it

    drive(make_app(store), scenario)


def test_traces_open_are_marked_and_compared(store: Store, keys: dict[str, str]) -> None:
    traces = [load(make_trace(rows), f"{i}.trace") for i, rows in enumerate([((2,), (), ()), ((3,), (), ())])]

    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        assert isinstance(app.screen, CompareScreen)  # two traces are compared
        await press(pilot, "escape")
        app.home.query_one("#traces").focus()
        await press(pilot, "space", "space", "c")
        assert isinstance(app.screen, CompareScreen)
        await press(pilot, "escape", "enter")
        assert isinstance(app.screen, TraceScreen) and app.screen.loaded.name == "1.trace"

    drive(make_app(store, traces), scenario)


def test_links_count_the_traces_that_have_an_object(store: Store) -> None:
    key = put_object(store, "linked", 3)
    trace = make_trace()
    trace = make_trace(chunks=(trace.chunks[0].__class__("a.txt", key), trace.chunks[1]))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "escape")
        assert texts(objects(make_app_of(pilot)), 0)[8] == "1"

    drive(make_app(store, [load(trace)]), scenario)


def test_a_document_that_was_linked_by_key_has_its_name(store: Store) -> None:
    known, unknown = put_object(store, "first", 3), put_object(store, "second", 4)
    add_sources(store.root, {known: Source("docs/first.txt", "m")})
    chunks = tuple(TracedChunk(str(store.path(key)), key) for key in (known, unknown))
    write_trace(Path("by-key.trace"), make_trace(chunks=chunks))
    loaded = LoadedTrace.read(Path("by-key.trace"), store.root)
    assert loaded.trace.sources == ("head", "docs/first.txt", "«def g»", "tail")
    assert loaded.counts.parts[1].source == "docs/first.txt"


async def choose(pilot: Pilot[None], name: str) -> None:
    """Open a file of the working directory."""
    await press(pilot, "o", *name)
    await pilot.pause(1)
    await press(pilot, "enter")
    await pilot.pause(0.5)
    await settle(pilot)


def test_a_trace_opens_by_its_path_and_a_corrupt_one_does_not(store: Store) -> None:
    load(make_trace(), "good.trace")
    data = bytearray(Path("good.trace").read_bytes())
    data[-3] ^= 1
    Path("bad.trace").write_bytes(data)

    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await choose(pilot, "bad.trace")
        assert app.screen is home(app) and not app.traces
        assert "bad.trace: does not match its checksum" in notes(pilot)
        await choose(pilot, "good.trace")
        assert isinstance(app.screen, TraceScreen) and len(app.traces) == 1

    drive(make_app(store), scenario)


def test_marked_objects_go_into_the_link_form(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "space", "space", "l")
        assert isinstance(app.screen, LinkScreen)
        first, second = sorted(keys.values())[:2]
        assert app.screen.query_one("#documents", Input).value == f"{first[:12]} {second[:12]}"

    drive(make_app(store), scenario)


def test_the_object_under_the_cursor_goes_into_the_link_form(store: Store, keys: dict[str, str]) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        assert pilot.app.screen.query_one("#documents", Input).value == min(keys.values())[:12]

    drive(make_app(store), scenario)


def test_an_empty_store_says_what_to_do(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        text = screen_text(app)
        assert "There is no object here yet." in text and "pic compile FILE…" in text
        put_object(store, "it is here.", 5)
        app.home.refresh_store()
        await settle(pilot)
        assert "There is no object" not in screen_text(app)
        await press(pilot, "slash", *"zzz")
        assert "No key, file or text contains 'zzz'" in screen_text(app)

    drive(make_app(store), scenario, (80, 24))


def test_help_palette_and_leaving(store: Store) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        app = make_app_of(pilot)
        await press(pilot, "question_mark")
        assert app.screen.query(HelpPanel) and "open trace" in screen_text(app)
        await press(pilot, "escape")
        assert not app.screen.query(HelpPanel)
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"filter", "sort", "link", "compare", "open trace", "export as SVG", "help"} <= titles
        await press(pilot, "ctrl+p", *"open trace")
        await pilot.pause(1)
        await press(pilot, "enter")
        await pilot.pause(0.5)
        assert app.screen.__class__.__name__ == "CommandPalette"
        await press(pilot, "escape", "escape")
        assert is_home(app)  # escape does not leave the app
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running or app._exit

    drive(make_app(store), scenario)
