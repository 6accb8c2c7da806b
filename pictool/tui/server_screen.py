"""The server screen: a running `pic serve`, read once a second: requests, queue, reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Sparkline, Static

from pictool.errors import PicError
from pictool.escapes import visible
from pictool.tui.base import PicScreen
from pictool.tui.watching import Activity, Address, Reading, activity
from pictool.tui.widgets.key_footer import KeyFooter
from pictool.tui.widgets.table import Column, RowTable

PERIOD_S = 1.0
_KEPT = 61  # readings: a minute
_COLUMNS = (Column("", 22), Column("last minute", 14, True), Column("since it started", 16, True))
_REQUESTS = (
    Column("time, UTC", 9),
    Column("tenant", 8),
    Column("tokens of its prompt, what became of them, and why", 0),
)
NO_FIGURES = "No figures yet: they appear as soon as the server answers."
NO_REQUESTS = "None, or the server shows them to the operator alone (PIC_SERVER_KEY)."
_SHARES = (("linked from objects", "linked"), ("computed again", "recomputed"), ("exact", "exact"))


class ServerScreen(PicScreen):
    """Watches a server. What it said last stays while it does not answer."""

    DEFAULT_CSS = """
    ServerScreen #title { height: 2; padding: 0 1; background: $boost; text-wrap: nowrap; text-overflow: ellipsis; }
    ServerScreen .history { height: 4; padding: 0 1; }
    ServerScreen .history Static { width: 28; }
    ServerScreen .history Sparkline { width: 1fr; height: 3; }
    ServerScreen RowTable { height: 1fr; margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "pause"),
        Binding("r", "requests", "last requests"),
    ]
    export_name = "server"

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._address = address
        self.readings: deque[Reading] = deque(maxlen=_KEPT)
        self.problem = ""
        self.is_paused = self._is_reading = False

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with Vertical():
            for name in ("requests", "waiting"):
                with Horizontal(classes="history"):
                    yield Static(id=f"{name}-now")
                    yield Sparkline([], id=name)
            yield RowTable(_COLUMNS, id="counts")
            yield RowTable(_REQUESTS, id="last")
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#last").display = False
        self.query_one("#counts").focus()
        self._show()
        self._read_soon()
        self.set_interval(PERIOD_S, self._read_soon)

    def action_pause(self) -> None:
        self.is_paused = not self.is_paused
        self._show()

    def action_requests(self) -> None:
        """Show the last requests in place of the figures, or these again."""
        for table in self.query(RowTable):
            table.display = not table.display
            if table.display:
                table.focus()

    def _read_soon(self) -> None:
        if not self.is_paused and not self._is_reading:
            self._is_reading = True
            self.run_worker(self._read, thread=True, group="watch")

    def _read(self) -> None:
        try:
            reading, problem = self._address.read(), ""
        except PicError as error:
            reading, problem = None, str(error)
        self.app.call_from_thread(self._take, reading, problem)

    def _take(self, reading: Reading | None, problem: str) -> None:
        self._is_reading, self.problem = False, problem
        if reading is not None:
            self.readings.append(reading)
        if self.query("#title"):  # none once it is closed
            self._show()

    @property
    def lately(self) -> Activity | None:
        """What happened in the last minute, or since this screen was opened; None before the second reading."""
        return activity(self.readings[0], self.readings[-1]) if len(self.readings) > 1 else None

    def _show(self) -> None:
        self.query_one("#title", Static).update(Text(self._title()))
        self.query(".history").set(display=bool(self.readings))
        if not self.readings:
            self.query_one("#counts", RowTable).show_rows([], empty=NO_FIGURES)
            return
        pairs = list(zip(self.readings, list(self.readings)[1:], strict=False))
        rates = [activity(before, now).rate for before, now in pairs]
        waiting = [float(_number(reading.health, "waiting")) for reading in self.readings]
        last = self.readings[-1].health
        self._show_history("requests", rates, f"{rates[-1] if rates else 0:.1f} requests/s")
        self._show_history(
            "waiting", waiting, f"{_number(last, 'waiting')} waiting, {_number(last, 'active')} take turns"
        )
        self.query_one("#counts", RowTable).show_rows(count_rows(self.lately, activity(None, self.readings[-1])))
        self.query_one("#last", RowTable).show_rows(request_rows(last), empty=NO_REQUESTS)

    def _show_history(self, name: str, values: list[float], now: str) -> None:
        scale = f"chart: 0 to {max(values, default=0):.3g}\nin {len(self.readings)} s"
        self.query_one(f"#{name}-now", Static).update(Text(f"{now}\n{scale}"))
        self.query_one(f"#{name}", Sparkline).data = values or [0.0]

    def _title(self) -> str:
        again = "" if self.is_paused else "; tries again every second"
        problem = self.problem.removeprefix(f"{self._address.url}: ")  # the line above names it
        state = f"{problem}{again}" if problem else ("paused" if self.is_paused else "read once a second")
        if not self.readings:
            return f"{visible(self._address.url)}\n{visible(state)}"
        health = self.readings[-1].health
        kls = [f"{policy} {kl:.2g}" for policy, kl in dict(health.get("divergence_nats") or {}).items()]
        check = f"; KL of the start-up check: {', '.join(kls)}" if kls else ""
        name = f"{health.get('model')} at {self._address.url} ({health.get('policy')})"
        return f"{visible(name)}\n{visible((health.get('problem') or state) + check)}"

    def export_data(self) -> Mapping[str, Any]:
        return {"server": self._address.url, "readings": [_reading_json(reading) for reading in self.readings]}


def _number(health: Mapping[str, Any], name: str) -> int:
    value = health.get(name)
    return value if isinstance(value, int) else 0


def _reading_json(reading: Reading) -> dict[str, Any]:
    counters = {" ".join(name): value for name, value in reading.counters.items()}
    return {"at_s": reading.at, "health": dict(reading.health), "counters": counters}


def count_rows(lately: Activity | None, always: Activity) -> list[tuple[str, str, str]]:
    """The table: a line a figure, for the last minute and for ever."""
    sources = list(always.sources)
    names = [
        "answered", "refused, or failed", "TTFT p50, ms", "TTFT p99, ms", "prompt tokens",
        *(f"  {name}" for name, _ in _SHARES), "generated tokens", *(f"documents: {visible(name)}" for name in sources),
    ]  # fmt: skip
    known = _figures(always, sources)
    return list(zip(names, [""] * len(known) if lately is None else _figures(lately, sources), known, strict=True))


def _figures(of: Activity, sources: Sequence[str]) -> list[str]:
    kinds = [kind for _, kind in _SHARES]
    prompt = sum(of.tokens.get(kind, 0.0) for kind in kinds)
    ttft = ["", ""] if of.ttft is None else [f"{seconds * 1e3:.1f}" for seconds in of.ttft]
    counts = [of.tokens.get("generated", 0.0), *(of.sources.get(name, 0.0) for name in sources)]
    return [
        f"{of.answered:,.0f}", f"{of.refused:,.0f}", *ttft, f"{prompt:,.0f}",
        *(f"{of.share(kind):.0%}" for kind in kinds), *(f"{count:,.0f}" for count in counts),
    ]  # fmt: skip


def request_rows(health: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The last requests, a line for each: time, tenant, and what became of its prompt."""
    listed, names = health.get("last_requests"), ("at", "tenant", "parts")
    requests = [request for request in listed if isinstance(request, dict)] if isinstance(listed, list) else []
    return [tuple(visible(str(request.get(name, ""))) for name in names) for request in requests]
