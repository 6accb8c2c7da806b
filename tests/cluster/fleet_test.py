"""The backend of a fleet, without Ray: its replicas are in this process, and may die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serve.live import serving_backend, until

from pictool.cluster.fleet import FleetBackend
from pictool.cluster.replica import ErrorReply, Replica, ReplicaLost
from pictool.cluster.residency import report_of
from pictool.cluster.torch_replica import TorchSpec
from pictool.core import Sampling
from pictool.core import Text as TextDocument
from pictool.errors import StoreError
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    ChatPrompt,
    DeltaEvent,
    MarkedText,
    ObjectReference,
    PlainText,
    RawPrompt,
    Turn,
)
from pictool.store.remote.remote import Remote
from pictool.store.store import Store

SETTINGS = BackendSettings(parse_policy("legolink-4"), refresh_s=3600)
NOBODY, ALICE = Tenant("default"), Tenant("alice", "0123456789abcdef" * 4)
TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"


class Calls:
    """Calls of one replica that notes what they want. `dies_after` events of a call it is lost, so often."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica
        self.keys: list[tuple[str, ...]] = []
        self.deaths, self.dies_after = 0, 0
        self.is_open = 0

    async def __call__(
        self, method: str, *arguments: Any, keys: tuple[str, ...], **named: Any
    ) -> AsyncGenerator[Any, None]:
        self.keys.append(keys)
        self.is_open += 1
        try:
            number = 0
            async with aclosing(getattr(self.replica, method)(*arguments, **named)) as events:
                async for event in events:
                    if self.deaths and number == self.dies_after:
                        self.deaths -= 1
                        raise ReplicaLost("it was killed")
                    yield event
                    number += 1
        finally:
            self.is_open -= 1


@pytest.fixture
def model(model_dir: Path) -> Model:
    return load_model(str(model_dir), "cpu")


@pytest.fixture
def calls(model_dir: Path, tmp_path: Path) -> Iterator[Calls]:
    spec = TorchSpec(
        Remote(str(tmp_path / "remote")), str(tmp_path / "tiers"), SETTINGS, model=str(model_dir), device="cpu"
    )
    with closing(Replica(asyncio.run(spec.start("0")))) as replica:
        yield Calls(replica)


@pytest.fixture
def backend(model: Model, tmp_path: Path, calls: Calls) -> Iterator[FleetBackend]:
    with closing(FleetBackend(model, Remote(str(tmp_path / "remote")), SETTINGS, calls)) as backend:
        yield backend


async def events_of(backend: FleetBackend, work: AnswerRequest) -> list[Any]:
    return [event async for event in backend.answer(work)]


def ask(*pieces: Any, tenant: Tenant = NOBODY, tokens: int = 6) -> AnswerRequest:
    return AnswerRequest(tenant, RawPrompt((*pieces, PlainText("Really?"))), Sampling(0.0), tokens, num_top=1)


@pytest.mark.parametrize("dies_after", [0, 1, 3])
def test_another_replica_goes_on_where_one_died(backend: FleetBackend, calls: Calls, dies_after: int) -> None:
    expected = asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    calls.deaths, calls.dies_after = 2, dies_after
    assert asyncio.run(events_of(backend, ask(MarkedText(TEXT)))) == expected and len(calls.keys) == 4
    calls.deaths = 3
    with pytest.raises(ApiError, match="try again") as refused:
        asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    assert refused.value.status == 503 and (backend.status().waiting, backend.status().active) == (0, 0)


def test_tokens_are_counted_by_a_replica(backend: FleetBackend) -> None:
    chat = ChatPrompt((Turn("user", (MarkedText(TEXT), PlainText("\n\nReally?"))),))
    started, *_ = asyncio.run(events_of(backend, AnswerRequest(NOBODY, chat, Sampling(0.0), 2)))
    assert asyncio.run(backend.count(chat, NOBODY)) == started.reuse.num_tokens > 20


def test_another_answer_than_what_was_sent_is_none() -> None:
    class Fickle:
        answers = 0

        async def answer(self, work: AnswerRequest, exact: bool) -> AsyncGenerator[Any, None]:
            Fickle.answers += 1
            yield DeltaEvent(0, f"answer {Fickle.answers}")
            yield DeltaEvent(0, "more")

    calls = Calls(Fickle())
    calls.deaths, calls.dies_after = 1, 1
    backend = FleetBackend.__new__(FleetBackend)
    backend._calls, backend._num_waiting, backend._num_active, backend._endings, backend._is_closed = (
        calls,
        0,
        0,
        set(),
        False,
    )

    async def told() -> list[Any]:
        seen = []
        with pytest.raises(ApiError) as refused:
            async for event in backend._call("answer", ask(), keys=(), exact=False):
                seen.append(event)  # noqa: PERF401 (what came before the error)
        return [*seen, refused.value.status]

    assert asyncio.run(told()) == [DeltaEvent(0, "answer 1"), 503]


def test_a_client_that_goes_ends_the_call(backend: FleetBackend, calls: Calls) -> None:
    async def leave() -> tuple[int, int]:
        events = backend.answer(ask(PlainText("Long"), tokens=200))
        await anext(events)
        during = backend.status().active
        await events.aclose()
        return during, calls.is_open

    assert asyncio.run(leave()) == (1, 0)
    assert (backend.status().waiting, backend.status().active) == (0, 0)


class Silent:
    """A replica of one answer after another, each without an end: `num_first` events, then nothing."""

    def __init__(self, num_first: int) -> None:
        self.num_first, self.num_open = num_first, 0

    async def answer(self, work: AnswerRequest, exact: bool) -> AsyncGenerator[Any, None]:
        self.num_open += 1
        try:
            for number in range(self.num_first):
                yield DeltaEvent(0, f"{number} ")
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def execute(self, query: str, tenant: Tenant, exact: bool) -> AsyncGenerator[Any, None]:
        async for _ in self.answer(ask(), exact):
            yield ["never"]


def test_at_the_end_calls_that_run_and_that_wait_are_told(model: Model, tmp_path: Path) -> None:
    """By a server over replicas: a stream ends with an event, what has not begun with 503; replicas are told."""
    replica = Silent(0)
    calls = Calls(replica)
    backend = FleetBackend(model, Remote(str(tmp_path / "remote")), SETTINGS, calls)
    message = {"role": "user", "content": "Really?"}
    body = {"model": backend.model, "messages": [message], "max_tokens": 9}
    with ThreadPoolExecutor(3) as threads, serving_backend(backend, Store(tmp_path / "store")) as live:
        query = {"g": {"model": "any", "input": {"user": "Really?"}}}
        waiting = [
            threads.submit(live.client.post, "/v1/chat/completions", json=body),
            threads.submit(live.client.post, "/v1/query/execute", json=query),
        ]
        until(lambda: replica.num_open == 2)
        replica.num_first = 2
        with live.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            assert "data: " in next(lines) and backend.status().active == 1 and backend.status().waiting == 2
            threads.submit(backend.close).result(60)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_ends"
        for refused in waiting:
            response = refused.result(60)
            assert response.status_code == 503 and response.json()["error"]["code"] == "server_ends"
        assert live.error(503, "POST", "/v1/chat/completions", json=body)["code"] == "server_ends"
        marked = message | {"cache_control": {}, "content": TEXT}
        assert (
            live.error(503, "POST", "/v1/chat/completions", json=body | {"messages": [marked, message]})["param"]
            is None
        )
        assert replica.num_open == calls.is_open == backend.status().waiting == backend.status().active == 0


def test_a_request_is_routed_by_the_objects_that_it_wants(backend: FleetBackend, calls: Calls, tmp_path: Path) -> None:
    (done,) = asyncio.run(backend.compile(TEXT, ALICE))
    assert backend.has(done.key) and Store(tmp_path / "remote").keys() == [done.key]
    assert calls.keys.pop() == (done.key,)
    asyncio.run(events_of(backend, ask(ObjectReference(done.key), MarkedText(TEXT), tenant=ALICE)))
    assert calls.keys.pop() == (done.key, done.key)
    asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    assert calls.keys.pop() not in ((done.key,), ())  # without Alice's salt
    chat = ChatPrompt((Turn("user", (MarkedText(TEXT), PlainText("\n\nReally?"))),))
    asyncio.run(events_of(backend, replace(ask(tenant=ALICE), prompt=chat)))
    assert calls.keys.pop() == (done.key,)
    asyncio.run(events_of(backend, ask(PlainText("Plain."))))
    (word,) = calls.keys.pop()
    assert len(word) < 64
    spec = Spec("Really?", [done.key, TextDocument(TEXT, "a")], parse_policy("legolink-4"))

    async def link() -> list[Any]:
        return [event async for event in backend.link(spec, ALICE, False)]

    assert "report" in asyncio.run(link())[-1]
    assert calls.keys.pop() == (done.key, done.key)


def test_a_sink_kind_has_its_own_objects(backend: FleetBackend, calls: Calls) -> None:
    work = ask(MarkedText(TEXT))
    asyncio.run(events_of(backend, work))
    asyncio.run(events_of(backend, replace(work, linking=replace(work.linking, policy="legolink-0"))))
    assert calls.keys[0] != calls.keys[1]


def test_an_object_of_another_tenant_does_not_exist(backend: FleetBackend) -> None:
    (done,) = asyncio.run(backend.compile(TEXT, ALICE))
    for key in (done.key, "a" * 64):
        with pytest.raises(ApiError, match="no such thing here") as refused:
            asyncio.run(events_of(backend, ask(ObjectReference(key))))
        assert (refused.value.status, refused.value.code) == (404, "cache_object_missing")


def test_an_object_that_was_removed_by_force_is_asked_for_again(
    backend: FleetBackend, calls: Calls, tmp_path: Path
) -> None:
    (done,) = asyncio.run(backend.compile(TEXT, NOBODY))
    for store in (Store(tmp_path / "remote"), calls.replica._store):
        store.path(done.key).unlink()
    assert backend.has(done.key)
    with pytest.raises(ApiError):
        asyncio.run(events_of(backend, ask(ObjectReference(done.key))))
    assert not backend.has(done.key)


def test_a_failed_check_answers_exactly(backend: FleetBackend, calls: Calls) -> None:
    kl = asyncio.run(backend.check(0.0))
    assert kl > 0 and backend.status().policy == "full" and backend.status().problem is not None
    started = asyncio.run(events_of(backend, ask(MarkedText(TEXT))))[0]
    assert started.reuse.policy == "full"
    assert calls.replica._backend.policy.name == "full"  # of queries, too


def test_a_replica_reports_what_it_holds(backend: FleetBackend, calls: Calls) -> None:
    assert calls.replica.record_routing_stats() == report_of(())
    (done,) = asyncio.run(backend.compile(TEXT, NOBODY))
    report = calls.replica.record_routing_stats()
    size = calls.replica._store.path(done.key).stat().st_size
    assert report == report_of([(done.key, size)]) and calls.replica.record_routing_stats() is report
    figures = calls.replica.figures()
    assert (figures["objects"], figures["bytes"], figures["written_bytes"]) == (1, size, size)


def test_a_remote_that_cannot_be_written_makes_no_cache(backend: FleetBackend, tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("in the way")
    with pytest.raises(ApiError) as refused:
        asyncio.run(backend.compile(TEXT, NOBODY))
    assert refused.value.status == 503


def test_a_refusal_keeps_what_it_says() -> None:
    error = ApiError(429, "full", code="queue_full", headers={"Retry-After": "1"})
    again = ErrorReply.of(error).error
    assert (again.status, again.message, again.code, again.headers) == (429, "full", "queue_full", error.headers)
    assert (
        ErrorReply.of(StoreError("/a/path: is gone")).message
        == "the store cannot be used as it is; the server's log says why"
    )
