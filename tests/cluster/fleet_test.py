"""The home of a fleet, without Ray: its replicas are in this process, and may die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pictool.cluster.fleet import FleetHome
from pictool.cluster.replica import Refused, Replica, ReplicaLost
from pictool.cluster.residency import report_of
from pictool.cluster.torch_replica import TorchSpec
from pictool.core import Sampling
from pictool.core import Text as TextDocument
from pictool.errors import StoreError
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, load_model
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.torch_home import HomeSettings
from pictool.serve.work import Chat, Delta, Marked, Raw, Stored, Text, Turn, Work
from pictool.store.remote import Remote
from pictool.store.store import Store

SETTINGS = HomeSettings(parse_policy("legolink-4"), refresh_s=3600)
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
    spec = TorchSpec(Remote(str(tmp_path / "remote")), str(tmp_path), SETTINGS, model=str(model_dir), device="cpu")
    with closing(Replica(asyncio.run(spec.start("0")))) as replica:
        yield Calls(replica)


@pytest.fixture
def home(model: Model, tmp_path: Path, calls: Calls) -> Iterator[FleetHome]:
    with closing(FleetHome(model, Remote(str(tmp_path / "remote")), SETTINGS, calls)) as home:
        yield home


async def events_of(home: FleetHome, work: Work) -> list[Any]:
    return [event async for event in home.answer(work)]


def ask(*pieces: Any, tenant: Tenant = NOBODY, tokens: int = 6) -> Work:
    return Work(tenant, Raw((*pieces, Text("Really?"))), Sampling(0.0), tokens, num_top=1)


@pytest.mark.parametrize("dies_after", [0, 1, 3])
def test_another_replica_goes_on_where_one_died(home: FleetHome, calls: Calls, dies_after: int) -> None:
    expected = asyncio.run(events_of(home, ask(Marked(TEXT))))
    calls.deaths, calls.dies_after = 2, dies_after
    assert asyncio.run(events_of(home, ask(Marked(TEXT)))) == expected and len(calls.keys) == 4
    calls.deaths = 3
    with pytest.raises(ApiError, match="try again") as refused:
        asyncio.run(events_of(home, ask(Marked(TEXT))))
    assert refused.value.status == 503 and (home.status().waiting, home.status().active) == (0, 0)


def test_another_answer_than_what_was_sent_is_none() -> None:
    class Fickle:
        answers = 0

        async def answer(self, work: Work, exact: bool) -> AsyncGenerator[Any, None]:
            Fickle.answers += 1
            yield Delta(0, f"answer {Fickle.answers}")
            yield Delta(0, "more")

    calls = Calls(Fickle())
    calls.deaths, calls.dies_after = 1, 1
    home = FleetHome.__new__(FleetHome)
    home._calls, home._num_waiting, home._num_active = calls, 0, 0

    async def told() -> list[Any]:
        seen = []
        with pytest.raises(ApiError) as refused:
            async for event in home._call("answer", ask(), keys=(), exact=False):
                seen.append(event)  # noqa: PERF401 (what came before the error)
        return [*seen, refused.value.status]

    assert asyncio.run(told()) == [Delta(0, "answer 1"), 503]


def test_a_client_that_goes_ends_the_call(home: FleetHome, calls: Calls) -> None:
    async def leave() -> tuple[int, int]:
        events = home.answer(ask(Text("Long"), tokens=200))
        await anext(events)
        during = home.status().active
        await events.aclose()
        return during, calls.is_open

    assert asyncio.run(leave()) == (1, 0)
    assert (home.status().waiting, home.status().active) == (0, 0)


def test_a_request_is_routed_by_the_objects_that_it_wants(home: FleetHome, calls: Calls, tmp_path: Path) -> None:
    (done,) = asyncio.run(home.compile(TEXT, ALICE))
    assert home.has(done.key) and Store(tmp_path / "remote").keys() == [done.key]
    assert calls.keys.pop() == (done.key,)
    asyncio.run(events_of(home, ask(Stored(done.key), Marked(TEXT), tenant=ALICE)))
    assert calls.keys.pop() == (done.key, done.key)
    asyncio.run(events_of(home, ask(Marked(TEXT))))
    assert calls.keys.pop() not in ((done.key,), ())  # without Alice's salt
    chat = Chat((Turn("user", (Marked(TEXT), Text("\n\nReally?"))),))
    asyncio.run(events_of(home, replace(ask(tenant=ALICE), prompt=chat)))
    assert calls.keys.pop() == (done.key,)
    asyncio.run(events_of(home, ask(Text("Plain."))))
    (word,) = calls.keys.pop()
    assert len(word) < 64
    spec = Spec("Really?", [done.key, TextDocument(TEXT, "a")], parse_policy("legolink-4"))

    async def link() -> list[Any]:
        return [event async for event in home.link(spec, ALICE, False)]

    assert "report" in asyncio.run(link())[-1]
    assert calls.keys.pop() == (done.key, done.key)


def test_a_sink_kind_has_its_own_objects(home: FleetHome, calls: Calls) -> None:
    work = ask(Marked(TEXT))
    asyncio.run(events_of(home, work))
    asyncio.run(events_of(home, replace(work, linking=replace(work.linking, policy="legolink-0"))))
    assert calls.keys[0] != calls.keys[1]


def test_an_object_of_another_tenant_does_not_exist(home: FleetHome) -> None:
    (done,) = asyncio.run(home.compile(TEXT, ALICE))
    for key in (done.key, "a" * 64):
        with pytest.raises(ApiError, match="no such thing here") as refused:
            asyncio.run(events_of(home, ask(Stored(key))))
        assert (refused.value.status, refused.value.code) == (404, "cache_object_missing")


def test_an_object_that_was_removed_by_force_is_asked_for_again(home: FleetHome, calls: Calls, tmp_path: Path) -> None:
    (done,) = asyncio.run(home.compile(TEXT, NOBODY))
    for store in (Store(tmp_path / "remote"), calls.replica._store):
        store.path(done.key).unlink()
    assert home.has(done.key)
    with pytest.raises(ApiError):
        asyncio.run(events_of(home, ask(Stored(done.key))))
    assert not home.has(done.key)


def test_a_failed_check_answers_exactly(home: FleetHome, calls: Calls) -> None:
    kl = asyncio.run(home.check(0.0))
    assert kl > 0 and home.status().policy == "full" and home.status().problem is not None
    started = asyncio.run(events_of(home, ask(Marked(TEXT))))[0]
    assert started.reuse.policy == "full"
    assert calls.replica._home.policy.name == "full"  # of queries, too


def test_a_replica_reports_what_it_holds(home: FleetHome, calls: Calls) -> None:
    assert calls.replica.record_routing_stats() == report_of(())
    (done,) = asyncio.run(home.compile(TEXT, NOBODY))
    report = calls.replica.record_routing_stats()
    size = calls.replica._store.path(done.key).stat().st_size
    assert report == report_of([(done.key, size)]) and calls.replica.record_routing_stats() is report
    figures = calls.replica.figures()
    assert (figures["objects"], figures["bytes"], figures["written_bytes"]) == (1, size, size)


def test_a_remote_that_cannot_be_written_makes_no_cache(home: FleetHome, tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("in the way")
    with pytest.raises(ApiError) as refused:
        asyncio.run(home.compile(TEXT, NOBODY))
    assert refused.value.status == 503


def test_a_refusal_keeps_what_it_says() -> None:
    error = ApiError(429, "full", code="queue_full", headers={"Retry-After": "1"})
    again = Refused.of(error).error
    assert (again.status, again.message, again.code, again.headers) == (429, "full", "queue_full", error.headers)
    assert (
        Refused.of(StoreError("/a/path: is gone")).message
        == "the store cannot be used as it is; the server's log says why"
    )
