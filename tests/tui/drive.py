"""Driving the app in a test: an app of traces made by hand, a job that answers what it is told to, and a pilot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from textual.pilot import Pilot
from traces import make_trace

from pictool.commands.tui import make_exports
from pictool.core import Geometry, Target
from pictool.store.format import CompiledChunk, ObjectMeta
from pictool.store.store import Store
from pictool.trace.analysis import Look
from pictool.trace.attention import AttentionMap
from pictool.trace.deviation import Against, AttentionDeviation, GeneratedAgainst, KVDeviation, NeighbourCorrelation
from pictool.trace.format import Trace, write_trace
from pictool.trace.sinks import SinkProfile
from pictool.tui.app import PicApp
from pictool.tui.export import seen_lines
from pictool.tui.opened import Opened
from pictool.tui.services import Cancelled, LinkForm, Listener, PolicyChoice, Services

Scenario = Callable[[Pilot[None]], Awaitable[None]]
SIZE = (100, 34)
TARGET = Target("LlamaForCausalLM", "a" * 64, "b" * 64, "float32", Geometry(2, 1, 4))


@dataclass
class FakeJob:
    """Answers at once; with `waits`, only when it is let go, or cancelled."""

    answer: Any = None  # a Look, a trace to write, or an exception
    waits: bool = False
    asked: list[Any] = field(default_factory=list)
    _go: threading.Event = field(default_factory=threading.Event)
    _is_cancelled: bool = False

    def policies(self) -> Sequence[PolicyChoice]:
        return [PolicyChoice("legolink", {"k": 16}), PolicyChoice("cacheblend", {"ratio": 0.15, "on": "v"})]

    def link(self, form: LinkForm, listener: Listener) -> Path:
        self.asked.append(form)
        listener.note("compiled a.txt (3 tokens)")
        listener.text(" yes,")
        listener.text(" it does")
        self._wait()
        write_trace(Path(form.trace), self._answer())
        return Path(form.trace)

    def look(self, trace: Trace, name: str, layer: int | None, listener: Listener) -> Look:
        self.asked.append((name, layer))
        listener.note("loading the model")
        self._wait()
        found = self._answer()
        assert isinstance(found, Look)
        return found

    def sinks(self, key: str, listener: Listener) -> SinkProfile:
        self.asked.append(key)
        listener.note("loading the model")
        self._wait()
        found = self._answer()
        assert isinstance(found, SinkProfile)
        return found

    def cancel(self) -> None:
        self._is_cancelled = True
        self._go.set()

    def _wait(self) -> None:
        if self.waits:
            assert self._go.wait(20)
        if self._is_cancelled:
            raise Cancelled

    def _answer(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def opened(trace: Trace, name: str = "hand.trace") -> Opened:
    """A trace as it is read from its file."""
    write_trace(Path(name), trace)
    return Opened.read(Path(name))


def make_app(store: Store, traces: Sequence[Opened] = (), job: FakeJob | None = None) -> PicApp:
    return PicApp(store, traces, Services(job or FakeJob(), make_exports()))


def drive(app: PicApp, scenario: Scenario, size: tuple[int, int] = SIZE) -> None:
    """Run the app without a terminal, and let it settle first."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
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


def screen_text(app: PicApp) -> str:
    """What is seen."""
    return "\n".join(line.text.rstrip() for line in seen_lines(app))


def make_look(trace: Trace, seed: int = 0) -> Look:
    """A look of random numbers: 2 heads; the rows of the tail and of all generated tokens but the last."""
    draw, layers, n = np.random.default_rng(seed), len(trace.rows), trace.layout.num_tokens
    rows, columns = n - trace.layout.num_context + len(trace.generated) - 1, n + len(trace.generated) - 1
    scores = draw.normal(size=(layers, 2, rows, columns)).astype(np.float32)
    for row in range(rows):
        scores[:, :, row, trace.layout.num_context + row + 1 :] = -np.inf
    seen = AttentionMap(scores, tuple(range(layers)), trace.layout.starts, n)
    key, value, cosine, tokens, gained = draw.random((5, layers, n)).astype(np.float32)
    against = Against(
        KVDeviation(key, value, cosine), AttentionDeviation(draw.random(layers), tokens, gained),
        NeighbourCorrelation(draw.random(layers - 2)),
        tuple(GeneratedAgainst(one.id, 0.5, 0.25, 0.75, 2, 0.1, 0.2) for one in trace.generated),
    )  # fmt: skip
    return Look(seen, against, tuple(" no" for _ in trace.generated))


def make_profile(seed: int = 0) -> SinkProfile:
    """A profile of random numbers: 2 layers, 3 heads, 5 tokens, 2 of them first."""
    draw = np.random.default_rng(seed)
    by_offset = draw.dirichlet(np.ones(6), size=(2, 3))
    return SinkProfile(2, 3, by_offset[..., :2].sum(-1), by_offset[..., 5], by_offset[..., :5], 0.4)


def put_object(store: Store, text: str, num_tokens: int, sinks: int = 0) -> str:
    """An object of this text, with numbers from 0 up; returns its key."""
    tokens = np.arange(num_tokens, dtype=np.int32) + len(text)
    numbers = np.arange(4 * num_tokens, dtype="<f4").tobytes()
    meta = ObjectMeta(TARGET.key(tokens, sinks, "none"), TARGET, num_tokens, sinks, "none")
    store.put(CompiledChunk(meta, text, tokens, [(numbers, numbers)] * 2))
    return meta.key


__all__ = ["make_trace"]
