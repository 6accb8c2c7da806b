"""The backend of a fleet, without Ray: its replicas are in this process, and may die."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pictool.cluster.fleet import FleetBackend, ReplicaLost
from pictool.cluster.loading import ModelSpec
from pictool.cluster.replica import KEY_DIGITS, Replica, ReplicaSpec
from pictool.core import Sampling
from pictool.core import Text as TextDocument
from pictool.errors import InputError, StoreError
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, load_model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    ChatPrompt,
    MarkedText,
    ObjectReference,
    PlainText,
    RawPrompt,
    Turn,
)
from pictool.store.remote.remote import Remote
from pictool.store.store import Store
from pictool.store.usage import read_counts

SETTINGS = BackendSettings(parse_policy("legolink-4"), refresh_s=3600)
NOBODY, ALICE = Tenant("default"), Tenant("alice", "0123456789abcdef" * 4)
TEXT = "The harbour was quiet. It holds a festival in the spring; nobody knows why.\n"


class Calls:
    """Calls of one replica that notes what they want. `dies_after` events of a call it is lost, so often."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.keys: list[tuple[str, ...]] = []
        self.deaths, self.dies_after = 0, 0
        self.is_open = 0

    async def __call__(self, method: str, *arguments: Any, keys: Mapping[str, int]) -> AsyncGenerator[Any, None]:
        self.keys.append(tuple(keys))
        self.is_open += 1
        try:
            number = 0
            async with aclosing(self.replica.call(method, *arguments, keys=keys)) as events:
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
def spec(model_dir: Path, tmp_path: Path) -> ReplicaSpec:
    model = ModelSpec(str(model_dir), "cpu")
    return ReplicaSpec(model, Remote(str(tmp_path / "remote")), str(tmp_path / "tiers"), SETTINGS)


@pytest.fixture
def calls(spec: ReplicaSpec) -> Iterator[Calls]:
    with closing(Replica(spec, "0")) as replica:
        yield Calls(replica)


@pytest.fixture
def backend(model: Model, spec: ReplicaSpec, calls: Calls) -> FleetBackend:
    return FleetBackend(model, spec.remote, SETTINGS, calls)


async def events_of(backend: FleetBackend, work: AnswerRequest) -> list[Any]:
    return [event async for event in backend.answer(work)]


def ask(*pieces: Any, tenant: Tenant = NOBODY, tokens: int = 6) -> AnswerRequest:
    return AnswerRequest(tenant, RawPrompt((*pieces, PlainText("Really?"))), Sampling(0.0), tokens, num_top=1)


def short(*keys: str) -> tuple[str, ...]:
    return tuple(key[:KEY_DIGITS] for key in keys)


def test_another_replica_answers_where_one_died_before_it_gave_anything(backend: FleetBackend, calls: Calls) -> None:
    expected = asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    calls.deaths = 2
    assert asyncio.run(events_of(backend, ask(MarkedText(TEXT)))) == expected and len(calls.keys) == 4
    calls.deaths = 3
    with pytest.raises(ApiError) as refused:
        asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    assert (refused.value.status, refused.value.code) == (503, "replica_lost")
    assert (backend.status().waiting, backend.status().active) == (0, 0)


def test_what_a_client_has_is_not_sent_twice(backend: FleetBackend, calls: Calls) -> None:
    expected = asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    calls.deaths, calls.dies_after = 1, 2

    async def listen() -> tuple[list[Any], ApiError]:
        seen = []
        with pytest.raises(ApiError) as refused:
            async for event in backend.answer(ask(MarkedText(TEXT))):
                seen.append(event)  # noqa: PERF401 (what came before the error)
        return seen, refused.value

    seen, error = asyncio.run(listen())
    assert seen == expected[:2] and (error.status, error.code) == (503, "replica_lost") and len(calls.keys) == 2
    assert (backend.status().waiting, backend.status().active) == (0, 0)


def test_tokens_are_counted_by_a_replica(backend: FleetBackend) -> None:
    chat = ChatPrompt((Turn("user", (MarkedText(TEXT), PlainText("\n\nReally?"))),))
    started, *_ = asyncio.run(events_of(backend, AnswerRequest(NOBODY, chat, Sampling(0.0), 2)))
    assert asyncio.run(backend.count(chat, NOBODY)) == started.reuse.num_tokens > 20


def test_a_client_that_goes_ends_the_call(backend: FleetBackend, calls: Calls) -> None:
    async def leave() -> tuple[int, int]:
        events = backend.answer(ask(PlainText("Long"), tokens=200))
        await anext(events)
        during = backend.status().active
        await events.aclose()
        return during, calls.is_open

    assert asyncio.run(leave()) == (1, 0)
    assert (backend.status().waiting, backend.status().active) == (0, 0)


def test_a_request_is_routed_by_the_objects_that_it_wants(backend: FleetBackend, calls: Calls, tmp_path: Path) -> None:
    (done,) = asyncio.run(backend.compile(TEXT, ALICE))
    assert backend.has(done.key) and Store(tmp_path / "remote").keys() == [done.key]
    assert calls.keys.pop() == short(done.key)
    asyncio.run(events_of(backend, ask(ObjectReference(done.key), MarkedText(TEXT), tenant=ALICE)))
    assert calls.keys.pop() == short(done.key)
    asyncio.run(events_of(backend, ask(MarkedText(TEXT))))
    assert calls.keys.pop() not in (short(done.key), ())  # without Alice's salt
    chat = ChatPrompt((Turn("user", (MarkedText(TEXT), PlainText("\n\nReally?"))),))
    asyncio.run(events_of(backend, replace(ask(tenant=ALICE), prompt=chat)))
    assert calls.keys.pop() == short(done.key)
    asyncio.run(events_of(backend, ask(PlainText("Plain."))))
    (word,) = calls.keys.pop()
    assert word.startswith("text ")
    spec = Spec("Really?", [done.key, TextDocument(TEXT, "a")], parse_policy("legolink-4"))

    async def link() -> list[Any]:
        return [event async for event in backend.link(spec, ALICE, False)]

    assert "report" in asyncio.run(link())[-1]
    assert calls.keys.pop() == short(done.key)


def test_every_policy_links_the_same_objects(backend: FleetBackend, calls: Calls) -> None:
    work = ask(MarkedText(TEXT))
    asyncio.run(events_of(backend, work))
    asyncio.run(events_of(backend, replace(work, linking=replace(work.linking, policy="naive"))))
    assert calls.keys[0] == calls.keys[1]


def test_an_object_of_another_tenant_does_not_exist(backend: FleetBackend) -> None:
    (done,) = asyncio.run(backend.compile(TEXT, ALICE))
    for key in (done.key, "a" * 64):
        with pytest.raises(ApiError, match="not found") as refused:
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


def test_a_failed_check_answers_exactly(model: Model, spec: ReplicaSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.fidelity.divergence.FEW_NATS", 0.0)
    with closing(Replica(replace(spec, limit=0.0), "0")) as replica:
        backend = FleetBackend(model, spec.remote, SETTINGS, Calls(replica))
        asyncio.run(backend.start())
        found = backend.status()
        assert found.divergence["legolink-4"] > 0 and found.policy == "full" and found.problem is not None
        started = asyncio.run(events_of(backend, ask(MarkedText(TEXT))))[0]
        assert started.reuse.policy == "full"
    with pytest.raises(InputError):
        Replica(replace(spec, limit=0.0, refuses=True), "0")


def test_a_replica_reports_what_it_holds(backend: FleetBackend, calls: Calls) -> None:
    assert calls.replica.record_routing_stats() == {"held": {}}
    (done,) = asyncio.run(backend.compile(TEXT, NOBODY))
    report = calls.replica.record_routing_stats()
    assert [*report["held"]] == [*short(done.key)] and calls.replica.record_routing_stats() is report
    size = calls.replica._store.path(done.key).stat().st_size
    assert read_counts(calls.replica._store.root).written_bytes == size


def test_a_remote_that_cannot_be_written_makes_no_cache(backend: FleetBackend, tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("in the way")
    with pytest.raises(ApiError) as refused:
        asyncio.run(backend.compile(TEXT, NOBODY))
    assert refused.value.status == 503


def test_a_refusal_keeps_what_it_says_between_processes() -> None:
    error = ApiError(429, "full", param="n", code="queue_full", headers={"Retry-After": "1"})
    again = pickle.loads(pickle.dumps(error))
    assert (again.status, again.body(), again.headers) == (429, error.body(), error.headers)


def test_an_error_of_a_replica_says_nothing_of_its_paths(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StoreError("/a/path: is gone")

    monkeypatch.setattr(calls.replica._backend, "status", fail)

    async def refused() -> list[Any]:
        return [event async for event in calls.replica.call("status")]

    (error,) = asyncio.run(refused())
    assert isinstance(error, ApiError) and error.status == 503 and "/a/path" not in error.message
