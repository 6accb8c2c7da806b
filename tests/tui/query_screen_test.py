"""The tree of a query's run: what each call reused, and its trace by enter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot
from traces import make_trace

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.commands.tui import named_store, open_app
from pictool.errors import InputError
from pictool.spans.dsl import g, plus, repeat
from pictool.spans.outcome import CallRecord
from pictool.spans.runs import write_run
from pictool.trace.format import write_trace
from pictool.tui.app import PicApp
from pictool.tui.query_screen import QueryScreen
from pictool.tui.trace_screen import TraceScreen
from pictool.tui.widgets.table import RowTable
from tui.drive import FakeJob, drive, press, screen_text

OWN = {
    "answer": "it does", "algo": "legolink",
    "tokens": {"context": 80, "recomputed": 20.0, "prompt": 91, "generated": 3},
    "timing": {"ttft_s": 0.0125},
}  # fmt: skip
INNER = ("g", "input", "cross", 0, "plus", 0, "repeat")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_example(tmp_path / "run")


def write_example(folder: Path) -> Path:
    """The run of a query of three calls, one of them shared."""
    first = CallRecord((*INNER, 0), "it does", (), dict(OWN), ())
    calls = [
        first,
        CallRecord((*INNER, 1), "it does", (), first.own, (), is_shared=True),
        CallRecord((), "no\x1b[2J", (), dict(OWN), ()),
    ]
    query = g(plus(repeat(2, g("Does it?", temperature=0))), "Which one?")
    folder.mkdir()
    write_trace(folder / "0001.trace", make_trace([(1, 2), (2,), ()]))
    write_run(folder, query, calls, {first.path: "0001.trace"}, {"answer": "no\x1b[2J", "error": None})
    return folder


def app_of(*names: Path) -> PicApp:
    return open_app([str(name) for name in names], Settings(), FakeJob())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_shows_what_each_call_reused(run: Path, width: int) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app.screen, QueryScreen)
        text = screen_text(pilot.app)  # type: ignore[arg-type]
        assert "2 calls, 1 shared; 120 of 160 tokens of context reused (75%)"[: width - 4] in text
        lines = [line for line in text.splitlines() if "output" in line]
        assert width < 80 or "answer" in text
        assert "80" in lines[0] and "20.0" in lines[0] and ("75%" in lines[0]) and "shared" in lines[1]
        assert "\x1b" not in text
        await press(pilot, "n")
        assert "legolink: prompt of 91 tokens, 3 generated; enter" in screen_text(pilot.app)  # type: ignore[arg-type]

    drive(app_of(run), scenario, (width, 24))


def test_enter_opens_the_trace_of_a_call(run: Path) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        assert "no trace" in list(pilot.app._notifications)[-1].message
        await press(pilot, "down", "enter")
        assert "n goes to the next one" in list(pilot.app._notifications)[-1].message
        await press(pilot, "n", "n")
        table = pilot.app.screen.query_one("#tree", RowTable)
        assert "output 2" in table.texts(table.cursor)[0]
        await press(pilot, "N", "enter")
        assert isinstance(pilot.app.screen, TraceScreen)
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, QueryScreen)

    drive(app_of(run / "run.json"), scenario)


def test_it_is_opened_by_the_dialog_and_exported(run: Path, tmp_path: Path) -> None:
    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "o", *"run", "enter")
        assert isinstance(pilot.app.screen, QueryScreen)
        await press(pilot, "e", *["backspace"] * 20, *"a.json", "enter")

    assert tmp_path == Path.cwd()
    drive(app_of(), scenario)
    assert json.loads(Path("a.json").read_text())["format"] == "pic query run"


def test_a_run_is_no_store_and_is_shown_alone(run: Path) -> None:
    assert named_store([str(run)], Settings()) is None
    with pytest.raises(UsageError, match="must be shown alone"):
        app_of(run, run)
    (run / "run.json").write_text("{}")
    with pytest.raises(InputError, match="is no run of a query"):
        app_of(run)
