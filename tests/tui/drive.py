"""Drive the app in a test: an app of traces made by hand, a job that returns a given answer, and a pilot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from textual.app import App
from textual.pilot import Pilot
from textual.strip import Strip
from traces import make_trace

from pictool.core import Geometry, Target
from pictool.spans.runs import QueryRun
from pictool.store.objects.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.trace.analysis import TraceAnalysis
from pictool.trace.attention import AttentionMap
from pictool.trace.attention_sinks import AttentionSinks
from pictool.trace.deviation import (
    AttentionDeviation,
    DeviationFromFull,
    GeneratedDeviation,
    KVDeviation,
)
from pictool.trace.format import Trace, write_trace
from pictool.tui.app import PicApp
from pictool.tui.services import Cancelled, LinkForm, Listener, LoadedTrace
from pictool.tui.widgets.table import RowTable

Scenario = Callable[[Pilot[None]], Awaitable[None]]
SIZE = (100, 34)
TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(2, 1, 4))


@dataclass
class FakeJob:
    """A job that answers at once; with `waits`, only when it is let go or cancelled."""

    answer: Any = None  # a TraceAnalysis, a trace to write, or an exception
    waits: bool = False
    requests: list[Any] = field(default_factory=list)
    _go: threading.Event = field(default_factory=threading.Event)
    _is_cancelled: bool = False

    def link(self, form: LinkForm, listener: Listener) -> Path | None:
        self.requests.append(form)
        listener("note", "compiled a.txt (3 tokens)")
        listener("text", " yes,")
        listener("text", " it does")
        self._wait()
        answer = self._answer()
        if not form.trace:
            listener("note", "32 of 40 tokens were reused")
            return None
        write_trace(Path(form.trace), answer)
        return Path(form.trace)

    def analyse(self, trace: Trace, name: str, listener: Listener) -> TraceAnalysis:
        self.requests.append(name)
        listener("note", "loading the model")
        self._wait()
        analysis = self._answer()
        assert isinstance(analysis, TraceAnalysis)
        return analysis

    def attention_sinks(self, key: str, listener: Listener) -> AttentionSinks:
        self.requests.append(key)
        listener("note", "loading the model")
        self._wait()
        sinks = self._answer()
        assert isinstance(sinks, AttentionSinks)
        return sinks

    def cancel(self) -> None:
        self._is_cancelled = True
        self._go.set()

    def _wait(self) -> None:
        if self.waits:
            assert self._go.wait(60)
        if self._is_cancelled:
            raise Cancelled

    def _answer(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def load(trace: Trace, name: str = "hand.trace") -> LoadedTrace:
    """A trace as it is read from its file."""
    write_trace(Path(name), trace)
    return LoadedTrace.read(Path(name))


class DrivenApp(PicApp):
    """The app, which remembers its notes: a notice is gone after some seconds."""

    notes: list[str]

    def show_note(self, text: str) -> None:
        self.notes = [*getattr(self, "notes", []), text]
        super().show_note(text)


def make_app(
    store: Store, traces: Sequence[LoadedTrace] = (), job: FakeJob | None = None, run: QueryRun | None = None
) -> DrivenApp:
    return DrivenApp(store, traces, job or FakeJob(), run)


def drive(app: PicApp, scenario: Scenario, size: tuple[int, int] = SIZE, shows_notices: bool = False) -> None:
    """Run the app without a terminal, and let it settle first."""

    async def run() -> None:
        async with app.run_test(size=size, notifications=shows_notices) as pilot:
            await settle(pilot)
            await scenario(pilot)

    asyncio.run(run())


async def settle(pilot: Pilot[None]) -> None:
    """Until the threads are done and everything is drawn."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settle(pilot)


def notes(pilot: Pilot[None]) -> str:
    """All notes of the app, line by line."""
    return "\n".join(getattr(pilot.app, "notes", []))


def screen_lines(app: App[Any]) -> list[Strip]:
    """The lines of the screen as they are drawn."""
    return app.screen._compositor.render_strips()


def texts(table: RowTable, row: int) -> tuple[str, ...]:
    """The cells of a row."""
    return tuple(str(cell) for cell in table.get_row_at(row))


def screen_text(app: App[Any]) -> str:
    """The text of the screen."""
    return "\n".join(line.text.rstrip() for line in screen_lines(app))


def make_analysis(trace: Trace, seed: int = 0) -> TraceAnalysis:
    """An analysis of random numbers: 2 heads; the rows of the tail and of all generated tokens but the last."""
    draw, layers, n = np.random.default_rng(seed), len(trace.rows), trace.layout.num_tokens
    rows, columns = n - trace.layout.num_context + len(trace.generated) - 1, n + len(trace.generated) - 1
    scores = draw.normal(size=(layers, 2, rows, columns)).astype(np.float32)
    for row in range(rows):
        scores[:, :, row, trace.layout.num_context + row + 1 :] = -np.inf
    attention = AttentionMap(scores, tuple(range(layers)), trace.layout.starts, n)
    key, value, cosine, tokens, gained = draw.random((5, layers, n)).astype(np.float32)
    deviation = DeviationFromFull(
        KVDeviation(key, value, cosine), AttentionDeviation(draw.random(layers), tokens, gained),
        tuple(GeneratedDeviation(token.id, 0.5, 0.25, 0.75, 2, 0.1, 0.2) for token in trace.generated),
    )  # fmt: skip
    return TraceAnalysis(attention, deviation, tuple(" no" for _ in trace.generated))


def make_sinks(seed: int = 0) -> AttentionSinks:
    """Attention sinks of random numbers: 2 layers, 3 heads, 5 tokens, 2 of them initial."""
    draw = np.random.default_rng(seed)
    by_offset = draw.dirichlet(np.ones(6), size=(2, 3))
    return AttentionSinks(3, by_offset[..., :2].sum(-1), by_offset[..., 5], by_offset[..., :5], 0.4)


def put_object(
    store: Store,
    text: str,
    num_tokens: int,
    before: int = 0,
    first: int | None = None,
) -> str:
    """An object of this text, with numbers from 0 up; returns its key.

    Args:
        first: the first token's id, which the others follow; by default the text's length.
    """
    after = ((1,) * before,) if before else ()
    tokens = np.arange(num_tokens, dtype=np.int32) + (len(text) if first is None else first)
    numbers = np.arange(4 * num_tokens, dtype="<f4").tobytes()
    meta = ObjectMeta(TARGET.key(tokens, "none", after=after), TARGET, num_tokens, "none", after=after)
    store.put(CompiledChunk(meta, text, tokens, [(numbers, numbers)] * 2))
    return meta.key


__all__ = ["make_trace"]
