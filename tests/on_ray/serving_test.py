"""Replicas of a server on a cluster of three nodes: answers, tenants, what is fetched, and one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from serve.live import DOCS, QUESTION, Live, serving, serving_backend
from serve.query_test import CALL

from benchmarks.fleet import state
from benchmarks.serve_fleet import Fleet, actors, kill_one, run_all, running
from pictool.cluster import serving as serving_on_ray
from pictool.core import Sampling
from pictool.serve.answers import AnswerCollector
from pictool.serve.errors import ApiError, queue_full
from pictool.serve.schema import MAX_N
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import AnswerRequest, ObjectReference, PlainText, RawPrompt
from pictool.store.store import Store

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

OBJECTS = 70
ALICE, BOB = "a" * 20, "b" * 20
KEYS = Keys({ALICE: Tenant("alice", "0123456789abcdef" * 4), BOB: Tenant("bob", "fedcba9876543210" * 4)})


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    with running(cluster.address, str(tiny_dir), root, OBJECTS, held=OBJECTS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def both(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live]]:
    """The fleet and a single server, over HTTP."""
    root = tmp_path_factory.mktemp("single")
    with (
        serving(fleet.model, Store(root), KEYS, fleet.settings, key=ALICE) as single,
        serving_backend(fleet.backend, Store(fleet.root / "store"), KEYS, key=ALICE) as many,
    ):
        yield many, single


def events_of(live: Live, body: dict[str, Any]) -> list[str]:
    with live.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        return [line for line in response.iter_lines() if line]


# Answers


@pytest.mark.parametrize("policy", ["legolink-4", "full", "cacheblend-30", "prefix", "legolink-1"])
def test_answers_are_those_of_a_single_server(both: tuple[Live, Live], policy: str) -> None:
    """Tokens, log-probabilities, counts, streams; documents named by caches and in the request."""
    answers = []
    for live in both:
        caches = [live.cache(text) for text in DOCS]
        content = [
            *({"type": "cache", "cache_id": name} for name in caches), {"type": "document", "text": "Said here. " * 8},
            {"type": "text", "text": f"\n\n{QUESTION}"},
        ]  # fmt: skip
        more = {"logprobs": True, "top_logprobs": 3, "pic": {"policy": policy}}
        answers.append(live.chat(content, **more))
        answers.append(live.chat(content, temperature=0.9, seed=5, n=2, **more))
    for ours, theirs in zip(answers[:2], answers[2:], strict=True):
        assert ours["usage"] == theirs["usage"] and ours["pic"] == theirs["pic"]
        for one, other in zip(ours["choices"], theirs["choices"], strict=True):
            assert one["message"] == other["message"] and one["finish_reason"] == other["finish_reason"]
            tokens, expected = one["logprobs"]["content"], other["logprobs"]["content"]
            assert [token["token"] for token in tokens] == [token["token"] for token in expected]
            np.testing.assert_allclose(
                [token["logprob"] for token in tokens], [token["logprob"] for token in expected], atol=1e-4
            )


def test_streams_queries_and_refusals_are_those_of_a_single_server(both: tuple[Live, Live]) -> None:
    said = []
    for live in both:
        name = live.cache(DOCS[0])
        body = {
            "model": "tiny", "temperature": 0, "max_tokens": 6, "cache_ids": [name],
            "messages": [{"role": "user", "content": QUESTION}],
        }  # fmt: skip
        lines = events_of(live, body)
        assert lines[-1] == "data: [DONE]"
        texts = [line.split('"delta": ')[1].split("}")[0] for line in lines[:-1]]
        refused = [
            live.error(400, "POST", "/v1/chat/completions", json=body | {"pic": {"policy": "nope"}}),
            live.error(404, "POST", "/v1/chat/completions", json=body | {"cache_ids": [f"cache-{'0' * 32}"]}),
            live.error(400, "POST", "/v1/query/execute", content=b"{}"),
        ]
        response = live.client.post("/v1/query/execute", json=CALL)
        assert response.status_code == 200, response.text
        said.append((texts, refused, response.json()["choices"][0]["text"]))
    assert said[0] == said[1]


def test_a_lease_is_good_on_every_replica_and_for_its_tenant_alone(fleet: Fleet, both: tuple[Live, Live]) -> None:
    many = both[0]
    name = many.cache("A text that only Alice has. " * 3)
    listed = many.ok("GET", f"/v1/caches/{name}")
    assert listed["status"] == "ready"
    alice, bob = (next(part for part in KEYS.tenants if part.name == owner) for owner in ("alice", "bob"))
    lease = many.service.leases.find(name, alice.id)
    assert lease is not None
    key = lease.objects[0].key

    async def answers(tenant: Tenant) -> list[list[Any]]:
        """As routed by other words than the object's key, so by every replica."""
        work = AnswerRequest(tenant, RawPrompt((ObjectReference(key), PlainText(QUESTION))), Sampling(0.0), 4)
        return [
            [event async for event in fleet.backend._calls("answer", work, keys={f"text {number}": 0})]
            for number in range(40)
        ]

    first, *others = asyncio.run(answers(alice))
    assert len(first) > 2 and all(answer == first for answer in others)
    assert fleet.num_holders(key) == 3
    theirs = many.client_of(BOB)
    assert theirs.get(f"/v1/caches/{name}").status_code == 404
    body = {"model": "tiny", "prompt": QUESTION, "cache_ids": [name]}
    assert theirs.post("/v1/completions", json=body).status_code == 404
    for refused in asyncio.run(answers(bob)):
        assert [(part.status, part.code) for part in refused] == [(404, "cache_object_missing")]


def test_a_client_that_vanishes_ends_its_call(fleet: Fleet, both: tuple[Live, Live]) -> None:
    many = both[0]
    # 9 MB: more than the sockets hold, so that the call lasts for as long as nobody reads.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Long"}], "max_tokens": 400, "n": MAX_N}
    body |= {"stream": True, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    with many.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
        assert fleet.backend.status().active == 1
    for _ in range(100):
        if not (sum(ongoing()) or fleet.backend.status().active):
            break
        time.sleep(0.05)
    assert sum(ongoing()) == 0 and fleet.backend.status().active == 0


def test_where_all_replicas_are_full_it_says_what_a_full_queue_says() -> None:
    from ray.serve.exceptions import BackPressureError

    class Full:
        """A handle whose replicas take nothing."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self

        async def __aiter__(self) -> Any:
            raise BackPressureError(num_queued_requests=3, max_queued_requests=3)
            yield

    async def ask() -> None:
        async for _ in serving_on_ray.calls_of(Full())("answer", keys={}):
            pass

    with pytest.raises(ApiError) as refused:
        asyncio.run(ask())
    want = queue_full()
    assert (refused.value.status, refused.value.body(), refused.value.headers) == (429, want.body(), want.headers)


def ongoing() -> list[int]:
    """Calls that replicas have."""
    import ray

    found: list[int] = ray.get([actor.get_num_ongoing_requests.remote() for actor in actors()])
    return found


# Objects, and faults


def test_residency_fetches_an_object_once_and_round_robin_as_often_as_there_are_replicas(fleet: Fleet) -> None:
    """Seven documents, three times each; so few requests make no replica exceed its share of them."""
    for order, keys, num_holders in (("round robin", fleet.keys[50:57], 3), ("residency", fleet.keys[60:67], 1)):
        state.order = order
        answers, _ = asyncio.run(run_all(fleet, 3 * keys, at_once=1))
        assert all(isinstance(answer, AnswerCollector) for answer in answers)
        assert [fleet.num_holders(key) for key in keys] == [num_holders] * len(keys)


def test_a_replica_that_is_killed_under_load_costs_no_answer(fleet: Fleet) -> None:
    killed = kill_one(fleet, requests=100, at_once=6)
    assert killed.wrong == 0 and killed.answered + sum(killed.refused.values()) == 100
    assert killed.refused.keys() <= {503} and killed.answered > 90


# The command


def test_the_command_serves_until_it_is_ended(cluster: Cluster, tiny_dir: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pictool", "serve", "--ray", cluster.address, "--replicas", "1:2", "--replica-cpus", "1",
        "--remote", "remote", "-m", str(tiny_dir), "--device", "cpu", "--port", "0", "--check", "off",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE, env=dict(os.environ)) as server:
        try:
            assert server.stderr is not None
            line = next(line for line in server.stderr if line.startswith("pic: serving"))
            url = line.split(" on ")[1].split("/v1")[0]
            body = {"model": str(tiny_dir), "prompt": QUESTION, "max_tokens": 2}
            models = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
            done = httpx.post(f"{url}/v1/completions", json=body | {"model": models[0]["id"]}, timeout=60)
            assert done.status_code == 200, done.text
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
            tokens = done.json()["usage"]["prompt_tokens"]
            assert server.stderr.read() == f"pic: 0 of {tokens} prompt tokens reused (0%) in 1 requests\n"
        finally:
            server.kill()
