"""A request whose client goes away, or whose server ends, at every checkpoint of its work."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pictool.core import Sampling
from pictool.core import Text as TextDocument
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.backends.torch.engine_thread import EngineTask
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, Linking, MarkedText, PlainText, RawPrompt
from pictool.store.store import Store
from serve.live import DOCS, QUESTION, tiny_model, until

TENANT = Tenant("default")
Ask = Callable[[TorchBackend], Awaitable[object]]


async def chat(backend: TorchBackend) -> object:
    prompt = RawPrompt((*map(MarkedText, DOCS), PlainText(QUESTION)))
    work = AnswerRequest(TENANT, prompt, Sampling(0.0), 2, linking=Linking(verifies=True))
    return [event async for event in backend.answer(work)]


async def link(backend: TorchBackend) -> object:
    documents = [TextDocument(doc + "It is linked.", str(i)) for i, doc in enumerate(DOCS)]
    spec = Spec(QUESTION, documents, parse_policy("legolink-4"), max_new_tokens=2)
    return [event async for event in backend.link(spec, TENANT, True)]


async def query(backend: TorchBackend) -> object:
    plus = {"plus": [{"user": doc + "It is queried."} for doc in DOCS[:2]]}
    call = {
        "g": {"model": "spnl/any", "input": {"cross": [plus, {"user": QUESTION}]}, "max_tokens": 2, "temperature": 0}
    }
    return await backend.execute(json.dumps({"seq": [{"monad": call}, call]}), TENANT)


async def compile_text(backend: TorchBackend) -> object:
    return await backend.compile(" ".join(DOCS) + "It is compiled.", TENANT, 20)


WORKS: list[Ask] = [chat, link, query, compile_text]


@pytest.fixture
def backends(tmp_path: Path) -> Iterator[Callable[[], TorchBackend]]:
    """Makes backends that have compiled nothing."""
    model, made = tiny_model(), list[TorchBackend]()

    def make() -> TorchBackend:
        store, settings = (
            Store(tmp_path / f"{len(made)}"),
            BackendSettings(parse_policy("legolink-4"), max_active=1, refresh_s=3600),
        )
        made.append(TorchBackend(model, store, settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def at_checkpoint(monkeypatch: pytest.MonkeyPatch, index: int, event: Callable[[EngineTask], None]) -> None:
    """Calls `event` on the engine's thread at the checkpoint of this number."""
    count, checkpoint = itertools.count(), ORIGINAL

    def counted(task: EngineTask, ends_turn: bool = False) -> None:
        if next(count) == index:
            event(task)
        checkpoint(task, ends_turn)

    monkeypatch.setattr(EngineTask, "checkpoint", counted)


ORIGINAL = EngineTask.checkpoint


async def asked(backend: TorchBackend, ask: Ask) -> list[str]:
    """The parts of an answer that do not depend on time."""
    result = await ask(backend)
    events = result if isinstance(result, list) else [result]
    return [repr(event) for event in events if not isinstance(event, dict) or "text" in event]


@pytest.mark.parametrize("ask", WORKS)
def test_a_client_goes_away(backends: Callable[[], TorchBackend], ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work ends there, and the request is answered when it is asked again."""
    want = asyncio.run(asked(backends(), ask))

    async def vanish(backend: TorchBackend, index: int) -> bool:
        loop, running = asyncio.get_running_loop(), asyncio.ensure_future(ask(backend))

        def leave(task: EngineTask) -> None:
            loop.call_soon_threadsafe(running.cancel)
            until(lambda: task.is_cancelled)

        at_checkpoint(monkeypatch, index, leave)
        (result,) = await asyncio.gather(running, return_exceptions=True)
        return isinstance(result, asyncio.CancelledError)

    for index in itertools.count():
        backend = backends()
        if not asyncio.run(vanish(backend, index)):
            break
        until(lambda backend=backend: backend.status().active == backend.status().waiting == 0)  # type: ignore[misc]
        assert asyncio.run(asked(backend, ask)) == want
    assert index >= 3


@pytest.mark.parametrize("ask", WORKS)
def test_the_server_ends(backends: Callable[[], TorchBackend], ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that runs, and one that waits, are told so."""

    async def both(backend: TorchBackend) -> list[Any]:
        return list(await asyncio.gather(ask(backend), ask(backend), return_exceptions=True))

    def end(task: EngineTask, backend: TorchBackend) -> None:
        backend._thread._is_closing = True

    for index in itertools.count():
        backend = backends()
        at_checkpoint(monkeypatch, index, partial(end, backend=backend))
        told = [outcome for outcome in asyncio.run(both(backend)) if isinstance(outcome, BaseException)]
        assert all(isinstance(error, ApiError) and error.status == 503 for error in told)
        if not told:
            break
    assert index >= 3
