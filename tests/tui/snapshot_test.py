"""The main screens as they were looked at and found good; `pytest --snapshot-update` takes new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import Input
from traces import make_trace

from pictool.store.store import Store
from tui.drive import FakeJob, load, make_analysis, make_app, press, put_object, settle

TRACE = make_trace([(1, 2, 5), (2, 5), (5,)], scores=np.arange(10, dtype=np.float32))
OTHER = make_trace([(2, 3), (2,), ()])

SCREENS: dict[str, tuple[int, list[str]]] = {
    "home": (0, ["down", "space"]), "object": (0, ["enter"]), "trace": (1, ["right", "right"]),
    "attention": (1, ["a", "l", "l", "h"]), "parts": (1, ["a", "t"]), "compare": (2, ["d"]),
    "overlap": (2, ["m", "d"]), "link": (0, ["l"]), "help": (1, ["question_mark"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [60, 100])
def test_screen(store: Store, snap_compare: Any, monkeypatch: pytest.MonkeyPatch, name: str, width: int) -> None:
    num_traces, keys = SCREENS[name]
    monkeypatch.setattr("pictool.tui.home_screen.time_ns", lambda: 0)  # every use lies ahead, so that it reads the same
    for text, size in (("The harbour was quiet.", 5), ("It holds a festival.", 9)):
        put_object(Store("st"), text, size)
    traces = [load(trace, f"{i}.trace") for i, trace in enumerate([TRACE, OTHER][:num_traces])]

    async def scenario(pilot: Pilot[None]) -> None:
        await settle(pilot)
        for key in keys:
            await press(pilot, key)
        for field in pilot.app.screen.query(Input):
            field.cursor_blink = False  # a picture must not depend on when it is taken

    app = make_app(Store("st"), traces, FakeJob(make_analysis(TRACE)))
    assert snap_compare(app, terminal_size=(width, 30), run_before=scenario)
