"""The server screen, and what it makes of two readings of a server: requests, queue, reuse, quantiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from serve.live import DOCS, QUESTION, serving, tiny_model
from textual.pilot import Pilot

from pictool.commands.console.errors import UsageError
from pictool.commands.settings.settings import Settings
from pictool.commands.tui import open_app
from pictool.errors import InputError
from pictool.serve.metrics import Metrics
from pictool.serve.work import BackendStatus, Reuse
from pictool.store.store import Store
from pictool.tui.app import PicApp
from pictool.tui.server_screen import ServerScreen
from pictool.tui.services import Services
from pictool.tui.watching import Activity, Address, Reading, activity, quantile
from pictool.tui.widgets.table import RowTable
from tui.drive import FakeJob, drive, press, screen_text

NOTHING = Activity(0.0, 0, 0, {}, {}, None)


@dataclass(frozen=True)
class Scripted(Address):
    """A server whose readings are given."""

    url: str = "http://here:8000"
    key: str | None = None
    readings: list[Reading | InputError] = field(default_factory=list)

    def read(self) -> Reading:
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if isinstance(reading, InputError):
            raise reading
        return reading


def reading(at: float, answered: int, linked: int, exact: int = 50, ttft: float = 0.02, **health: object) -> Reading:
    """What a server says that answered so many requests."""
    counters = {
        ("pic_requests_total", "/v1/chat/completions", "200"): answered,
        ("pic_requests_total", "/v1/chat/completions", "429"): 2,
        ("pic_requests_total", "/health", "200"): 100,
        ("pic_tokens_total", "linked"): linked, ("pic_tokens_total", "recomputed"): 0,
        ("pic_tokens_total", "exact"): exact, ("pic_tokens_total", "generated"): 7,
        ("pic_linked_chunks_total", "recognised"): 3,
    }  # fmt: skip
    buckets = tuple((bound, answered if bound >= ttft else 0) for bound in (0.01, 0.025, 0.05, float("inf")))
    said = {
        "model": "tiny",
        "policy": "legolink-16",
        "waiting": 3,
        "active": 1,
        "divergence_nats": {"legolink-16": 0.01},
    }
    return Reading(at, said | health, counters, buckets)


def test_what_happened_is_the_difference_of_two_readings() -> None:
    lately = activity(reading(10.0, 40, 100), reading(14.0, 60, 250))
    assert (lately.seconds, lately.answered, lately.refused, lately.rate) == (4.0, 20, 0, 5.0)
    assert lately.tokens["linked"] == 150 and lately.share("linked") == 1.0 and lately.sources == {}
    ever = activity(None, reading(14.0, 60, 250))
    assert (ever.answered, ever.refused, ever.share("exact")) == (60, 2, 50 / 300) and ever.sources == {"recognised": 3}


def test_a_server_that_was_started_anew_counts_from_there() -> None:
    again = activity(reading(10.0, 40, 100), reading(14.0, 5, 10))
    assert (again.answered, again.tokens["linked"]) == (5, 10)
    assert NOTHING.rate == NOTHING.share("linked") == 0.0


def test_quantiles_are_those_of_the_observations_to_a_bucket() -> None:
    values, bounds = np.random.default_rng(0).exponential(0.05, 5000), (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, float("inf"))
    buckets = tuple((bound, float((values <= bound).sum())) for bound in bounds)
    for share in (0.1, 0.5, 0.9, 0.99):
        exact, found = np.quantile(values, share), quantile(buckets, share)
        low, high = max([0.0, *(b for b in bounds if b < exact)]), min(b for b in bounds if b >= exact)
        assert low <= found <= high
    assert quantile(((0.01, 0), (0.02, 10), (float("inf"), 10)), 0.5) == pytest.approx(0.015)
    assert quantile(((0.01, 0), (float("inf"), 10)), 0.5) == 0.01


def test_a_real_server_is_read(tmp_path: Path) -> None:
    with serving(tiny_model(), Store(tmp_path / "store")) as live:
        before = Address(live.url).read()
        parts = [{"type": "cache", "cache_id": live.cache(doc)} for doc in DOCS]
        for _ in range(3):
            live.chat([*parts, {"type": "text", "text": QUESTION}])
        live.error(
            404, "POST", "/v1/chat/completions", json={"model": "x", "messages": [{"role": "user", "content": "x"}]}
        )
        done = activity(before, Address(live.url).read())
    assert done.answered == 3 + len(DOCS) and done.refused == 1 and done.sources == {"cache": 3 * len(DOCS)}
    assert done.tokens["linked"] > 0 and done.ttft is not None and 0 < done.ttft[0] <= done.ttft[1]
    with pytest.raises(InputError, match="no server answers"):
        Address(live.url).read()


def test_the_names_of_metrics_are_the_server_s() -> None:
    metrics = Metrics(lambda: BackendStatus(0, 0, "naive"), lambda: 0)
    metrics.count_prompt(Reuse("naive", 2, 5, 6, 7, 8, "marker"))
    metrics.requests.labels("/v1/chat/completions", 200).inc()
    metrics.ttft.observe(0.02)
    text = metrics.text().decode()
    for name in ("pic_requests_total", "pic_tokens_total", "pic_linked_chunks_total", "pic_ttft_seconds_bucket"):
        assert f"\n{name}{{" in text


def app_of(*readings: Reading | InputError) -> PicApp:
    job = FakeJob()
    return PicApp(Store("st"), [], Services(job, None), server=Scripted(readings=list(readings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_screen_shows_requests_queue_and_reuse(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.tui.server_screen.PERIOD_S", 3600)
    app = app_of(reading(1.0, 40, 100), reading(3.0, 60, 250, problem="linking is off\x1b[2J"))

    async def scenario(pilot: Pilot[None]) -> None:
        screen = app.screen
        assert isinstance(screen, ServerScreen)
        while len(screen.readings) < 2:
            screen._read_soon()
            await pilot.pause(0.02)
        shown = screen_text(app)
        assert "tiny at http://here:8000 (legolink-16)" in shown and "linking is off\\x1b[2J" in shown
        assert "10.0 requests/s" in shown and "3 waiting" in shown and "chart: 0 to 10" in shown
        table = screen.query_one(RowTable)
        rows = {table.texts(index)[0].strip(): table.texts(index)[1:] for index in range(table.count)}
        assert rows["answered"] == ("20", "60") and rows["linked from objects"] == ("100%", "83%")
        assert rows["documents: recognised"] == ("0", "3") and rows["TTFT p50, ms"][0] == "17.5"
        await press(pilot, "p")
        assert screen.is_paused
        assert screen.export_data()["readings"][1]["health"]["waiting"] == 3

    drive(app, scenario, (width, 24))


@pytest.mark.parametrize("width", [80, 120])
def test_the_last_requests_and_what_became_of_their_prompts(width: int) -> None:
    told = "1,024 linked (recognised), 31 computed (too_short)"
    listed = [{"at": "10:00:01", "tenant": "alice\x1b[2J", "parts": told}, "what?", {"at": 5}]
    app = app_of(reading(1.0, 40, 100, last_requests=listed))

    async def scenario(pilot: Pilot[None]) -> None:
        screen = app.screen
        assert isinstance(screen, ServerScreen)
        while not screen.readings:
            await pilot.pause(0.02)
        assert told not in screen_text(app)
        await press(pilot, "r")
        shown = screen_text(app)
        assert "10:00:01" in shown and "alice\\x1b[2J" in shown and told in shown and "TTFT" not in shown
        await press(pilot, "r")
        assert "TTFT" in screen_text(app)

    drive(app, scenario, (width, 24))


def test_what_was_said_last_stays_while_the_server_is_away() -> None:
    app = app_of(reading(1.0, 40, 100), InputError("http://here:8000: no server answers (Connection refused)"))

    async def scenario(pilot: Pilot[None]) -> None:
        screen = app.screen
        assert isinstance(screen, ServerScreen)
        while "no server answers" not in screen.problem:
            screen._read_soon()
            await pilot.pause(0.02)
        shown = screen_text(app)
        assert "no server answers (Connection refused)" in shown and "40" in shown

    drive(app, scenario, (80, 24))


def test_a_server_that_is_down_is_tried_again_and_the_screen_says_so() -> None:
    app = app_of(InputError("http://here:8000: no server answers (Connection refused)"))

    async def scenario(pilot: Pilot[None]) -> None:
        screen = app.screen
        assert isinstance(screen, ServerScreen)
        while not screen.problem:
            await pilot.pause(0.02)
        shown = screen_text(app)
        assert "tries again every second" in shown and "No figures yet" in shown
        assert "▁" not in shown  # no chart of nothing

    drive(app, scenario, (80, 24))


def test_only_the_option_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_SERVER", "http://here:8000")
    from pictool.commands.settings.settings import read_settings
    from pictool.commands.tui import watched_server

    assert watched_server(read_settings()) is None
    assert watched_server(read_settings().override(server="http://there:8000")) == Address("http://there:8000", None)
    with pytest.raises(UsageError, match="cannot be shown beside a server"):
        open_app(["a.trace"], Settings().override(server="http://there:8000"), FakeJob())
