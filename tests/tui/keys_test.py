"""Every key of every screen and widget, pressed: what it must change. A key that has no line here fails."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import TabbedContent
from traces import make_trace

import pictool.tui
from pictool.spans.runs import read_run
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.widgets.heatmap import HeatMap
from pictool.tui.widgets.table import Choice, RowTable
from tui.drive import FakeJob, drive, load, make_analysis, make_app, make_sinks, press, put_object, settle
from tui.query_screen_test import write_example

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32))
OTHER = make_trace([(2, 3), (2,), ()])
PIECES = ("a", "b", "c", "d", "e")
Probe = Callable[[PicApp], Any]
Step = tuple[str, Any]  # a key, and what the probe says then


@dataclass(frozen=True)
class Script:
    """Keys of one class, pressed one after the other on a screen that `first` leads to; `focus` has the focus then.

    A step whose key begins with "then " only prepares, and is not checked.
    """

    owner: str
    probe: Probe
    steps: Sequence[Step]
    screen: str = "trace"
    first: Sequence[str] = ()
    focus: str | None = None
    job: Callable[[], FakeJob] = lambda: FakeJob(make_analysis(TRACE))


def top(app: PicApp) -> str:
    return type(app.screen).__name__


def tab(app: PicApp) -> str:
    return app.screen.query_one(TabbedContent).active


def cursor(app: PicApp) -> int:
    return int(app.screen.query("TokensView").first().cursor)  # type: ignore[attr-defined]


def choice(name: str) -> Probe:
    return lambda app: getattr(app.screen.color_by, name)  # type: ignore[attr-defined]


def of_home(name: str) -> Probe:
    return lambda app: getattr(app.home, name)


def row_of_tree(app: PicApp) -> int:
    return app.screen.query_one("#tree", RowTable).cursor_row


def at_cell(app: PicApp) -> int:
    return app.screen.query_one(HeatMap).column


def is_searching(app: PicApp) -> bool:
    return bool(app.focused and app.focused.has_class("-open"))


def asked(app: PicApp) -> Any:
    return app.job.requests[-1:]  # type: ignore[attr-defined]


def has_help(app: PicApp) -> bool:
    return bool(app.screen.query("HelpPanel"))


def pictures(_: PicApp) -> int:
    return len(list(Path().glob("*.svg")))


def is_ended(app: PicApp) -> bool:
    return bool(app._exit)


def focused(app: PicApp) -> str | None:
    return app.focused.id if app.focused else None


def is_folded(app: PicApp) -> bool:
    return app.screen.has_class("-folded")


def chosen(name: str) -> Probe:
    return lambda app: app.screen.query_one(f"#{name}", Choice).value


def waiting() -> FakeJob:
    return FakeJob(TRACE, waits=True)


NEXT, BEFORE = "right_square_bracket", "left_square_bracket"
SCRIPTS = [
    Script("PicScreen", has_help, [("question_mark", True), ("escape", False), ("f1", True)]),
    Script("PicScreen", top, [("escape", "HomeScreen")]),
    Script("PicScreen", top, [("escape", "HomeScreen")], "compare"),
    Script("PicScreen", top, [("escape", "HomeScreen")], "home", ["l"]),
    Script("PicScreen", pictures, [("e", 1)]),
    Script("SearchInput", is_searching, [("escape", False)], first=["slash"]),
    Script("SearchInput", is_searching, [("escape", False)], "home", ["slash"]),
    Script("PicScreen", is_ended, [("q", True)]),  # the screen that the command line named
    Script("PicScreen", top, [("q", "HomeScreen")], "home", ["enter"]),
    Script("PicScreen", has_help, [("f1", True)], "home", ["l"]),  # where ? is typed
    *(Script("ConfirmDialog", top, [(key, "HomeScreen")], "home", ["x"]) for key in ("y", "n", "escape", "q")),
    Script("ConfirmDialog", focused, [("left", "yes"), ("right", "no")], "home", ["x"]),
    Script("HomeScreen", is_searching, [("slash", True)], "home"),
    Script("HomeScreen", of_home("sort"), [("s", "tokens"), ("s", "text")], "home"),
    Script("HomeScreen", lambda app: len(app.home.marked), [("space", 1), ("space", 2)], "home"),
    Script("HomeScreen", top, [("l", "LinkScreen"), ("then escape", "")], "home"),
    Script("HomeScreen", top, [("o", "CommandPalette"), ("then escape", "")], "home"),
    Script("HomeScreen", top, [("c", "CompareScreen")], "compare", ["escape"]),
    Script("HomeScreen", is_ended, [("q", True)], "home"),
    Script("HomeScreen", top, [("x", "ConfirmDialog"), ("then n", ""), ("delete", "ConfirmDialog")], "home"),
    Script("HomeScreen", lambda app: len(app.home.listing.pins), [("p", 1), ("p", 0)], "home"),
    Script("HomeScreen", lambda app: len(app.home.marked), [("escape", 0)], "home", ["space", "space"]),
    Script("HomeScreen", is_folded, [("f", True), ("f", False)], "home"),
    Script("LinkScreen", lambda app: app.is_job_running, [("ctrl+s", True), ("ctrl+g", False)], "link", job=waiting),
    Script("ObjectScreen", lambda app: len(app.attention_sinks), [("a", 1)], "home", ["enter"],
           job=lambda: FakeJob(make_sinks())),
    Script("TextScreen", is_searching, [("slash", True)]),
    Script("TextScreen", is_folded, [("f", True), ("f", False)]),
    Script("TextScreen", cursor, [("n", 10), ("n", 5), ("N", 10)], first=["slash", "e", "enter"]),
    Script("TextScreen", cursor, [(NEXT, 1), (NEXT, 4), (BEFORE, 1)]),
    Script("TextScreen", cursor, [(NEXT, 1), (BEFORE, 0)], "compare"),
    Script("TraceScreen", choice("mode"), [("m", "score"), ("m", "computed")]),
    Script("TraceScreen", choice("layer"), [("l", 0), ("l", 1), ("L", 0), ("L", None)]),
    Script("TraceScreen", choice("head"), [("h", 0), ("h", 1), ("H", 0), ("H", None)], first=["a"]),
    Script("TraceScreen", choice("row"), [("r", 0), ("r", 1), ("R", 0), ("R", None)], first=["a"]),
    Script("TraceScreen", asked, [("a", ["0.trace"])]),
    Script("TextScreen", tab, [("t", "tab-parts"), ("t", "tab-map")]),
    Script("CompareScreen", cursor, [("d", 1), ("d", 3), ("D", 1)], "compare"),
    Script("CompareScreen", chosen("mode"), [("m", "overlap"), ("m", "computed")], "compare"),
    Script("CompareScreen", chosen("layer"), [("l", 0), ("l", 1), ("L", 0)], "compare"),
    Script("QueryScreen", row_of_tree, [("n", 4), ("n", 5), ("N", 4)], "run"),
    Script("PicScreen", is_ended, [("q", True)], "run"),
    Script("RowTable", top, [("enter", "ObjectScreen")], "home"),
    Script("HeatMap", at_cell, [("right", 1), ("left", 0)], focus="HeatMap"),
    Script("TokensView", cursor, [("right", 1), ("left", 0), ("end", 11), ("home", 0)]),
    Script("TokensView", cursor, [("down", 1), ("down", 4), ("up", 1), ("pagedown", 10), ("pageup", 0)]),
]  # fmt: skip


def bound() -> set[tuple[str, str]]:
    """Every class of the TUI that binds keys, and each of them."""
    keys = set()
    for module in pkgutil.walk_packages(pictool.tui.__path__, "pictool.tui."):
        for name, cls in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                bindings = [Binding(*b) if isinstance(b, tuple) else b for b in cls.__dict__.get("BINDINGS", ())]
                keys |= {(name, key) for binding in bindings for key in binding.key.split(",")}
    return keys


def test_every_key_has_a_line() -> None:
    pressed = {(script.owner, key) for script in SCRIPTS for key, _ in script.steps if not key.startswith("then ")}
    assert len(bound()) > 50
    assert not bound() - pressed, "press these keys in SCRIPTS"
    assert not pressed - bound(), "no such keys"


def make(script: Script, store: Store) -> PicApp:
    for index in range(0 if script.screen == "link" else 3):
        put_object(store, f"text {index}", 5 + index)
    by_screen = {"trace": [TRACE], "compare": [TRACE, OTHER]}
    traces = by_screen.get(script.screen, [])
    run = read_run(write_example(Path("run"))) if script.screen == "run" else None
    return make_app(store, [load(trace, f"{index}.trace") for index, trace in enumerate(traces)], script.job(), run)


@pytest.mark.parametrize(
    "script", SCRIPTS, ids=lambda script: f"{script.owner}-{'-'.join(key for key, _ in script.steps)}"[:60]
)
def test_the_key_does_what_it_must(script: Script, store: Store) -> None:
    app = make(script, store)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, *(["l", *fill_in(app)] if script.screen == "link" else script.first))
        if script.focus:
            app.screen.query_one(script.focus).focus()
            await settle(pilot)
        for key, expected in script.steps:
            if key.startswith("then "):
                await press(pilot, key.removeprefix("then "))
                continue
            assert script.probe(app) != expected, f"{key}: nothing to change"
            await pilot.press(key)
            await (pilot.pause(0.3) if key == "ctrl+s" else settle(pilot))
            assert script.probe(app) == expected, key

    drive(app, scenario)


def fill_in(app: PicApp) -> list[str]:
    """Keys that fill in the documents and the query of the link form."""
    return [*"a.txt", "tab", *"why"]
