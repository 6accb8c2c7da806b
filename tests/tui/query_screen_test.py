"""The tree of a query's run: what each call reused, and its trace by enter."""

from __future__ import annotations

from pathlib import Path

import pytest
from traces import make_trace

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.commands.tui import named_store, open_app
from pictool.errors import InputError
from pictool.spans.dsl import g, plus, repeat
from pictool.spans.running import CallRecord
from pictool.spans.runs import write_run
from pictool.trace.format import write_trace
from pictool.tui.app import PicApp
from tui.drive import FakeJob

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


def test_a_run_is_no_store_and_is_shown_alone(run: Path) -> None:
    assert named_store([str(run)], Settings()) is None
    with pytest.raises(UsageError):
        app_of(run, run)
    (run / "run.json").write_text("{}")
    with pytest.raises(InputError):
        app_of(run)
