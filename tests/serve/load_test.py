"""Many clients at once: no answer is lost or another's, whoever vanishes frees its place, and the queue is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pictool.linker.grid import parse_policy
from pictool.runtime import turns
from pictool.runtime.decode import Step, generate_steps
from pictool.serve.backends.base import BackendSettings
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store
from serve.live import DOCS, NAME, Live, counts, serving, text_of, tiny_model, until, until_async


def body(number: int) -> dict[str, Any]:
    content = f"{DOCS[number % 3]}\n\nReally {number % 7}?"
    return {"model": NAME, "temperature": 0, "max_tokens": 12, "messages": [{"role": "user", "content": content}]}


async def one(client: httpx.AsyncClient, number: int, kind: str) -> str | None:
    """One request of a kind; its answer, if it waits for it."""
    if kind == "nonsense":
        response = await client.post("/v1/chat/completions", content=b"{nonsense" * (number % 5))
        assert response.status_code in (400, 415)
        return None
    async with client.stream("POST", "/v1/chat/completions", json=body(number) | {"stream": True}) as response:
        assert response.status_code == 200
        text = ""
        async for line in response.aiter_lines():
            if kind == "vanishes" and text:
                return None
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                text += choices[0]["delta"].get("content", "") if choices else ""
        return text


async def crowd(url: str, plan: list[tuple[int, str]], at_once: int) -> list[str | None]:
    limits, places = httpx.Limits(max_connections=at_once), asyncio.Semaphore(at_once)

    async def ask(number: int, kind: str) -> str | None:
        async with places:
            return await one(client, number, kind)

    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(ask(number, kind) for number, kind in plan))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_crowd_gets_the_answers_of_a_serial_run(live: Live) -> None:
    for doc in DOCS:
        live.cache(doc)
    live.backend.index.refresh()
    want = {number: text_of(live.chat(None, **body(number))) for number in range(21)}
    kinds = random.Random(5).choices(["waits", "vanishes", "nonsense"], [5, 3, 1], k=60)
    plan = list(enumerate(kinds))
    asyncio.run(crowd(live.url, plan[:20], 8))
    before = open_files()
    answers = asyncio.run(crowd(live.url, plan, 16))
    for (number, kind), answer in zip(plan, answers, strict=True):
        assert answer == (want[number % 21] if kind == "waits" else None)
    until(lambda: live.backend.status().active == live.backend.status().waiting == 0)
    until(lambda: open_files() <= before + 2)
    assert 'pic_requests_total{route="/v1/chat/completions",status="200"}' in live.client.get("/metrics").text


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no answer ends: after its first token it goes on without text."""
    event = threading.Event()

    def held(*options: Any) -> Iterator[Step]:
        steps = generate_steps(*options)
        yield (first := next(steps))
        while not event.wait(0.01):
            turns.checkpoint("step")
            yield replace(first, text="")
        yield from steps

    monkeypatch.setattr("pictool.serve.backends.torch.backend.generate_steps", held)
    return event


ASK = {"model": NAME, "messages": [{"role": "user", "content": "Go on?"}], "max_tokens": 2}


def test_a_full_queue_says_when_to_come_again_and_vanished_clients_free_it(
    tmp_path: Path, released: threading.Event
) -> None:
    keys = Keys({"a": Tenant("a"), "b": Tenant("b")})
    settings = BackendSettings(parse_policy("full"), max_waiting=2, max_active=1, refresh_s=3600)
    with (
        serving(tiny_model(), Store(tmp_path / "objects"), keys, settings, key="a") as live,
        httpx.Client(timeout=600) as vanishing,
    ):
        status = live.backend.status

        async def fill() -> None:
            headers = {"Authorization": "Bearer a"}
            async with httpx.AsyncClient(base_url=live.url, headers=headers, timeout=600) as client:
                tasks = []
                for waiting in range(3):
                    tasks.append(asyncio.create_task(client.post("/v1/chat/completions", json=ASK)))
                    await until_async(counts(live, 1, waiting))
                refused = await client.post("/v1/chat/completions", json=ASK)
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["code"] == "queue_full"
                assert (await client.get("/health")).json()["waiting"] == 2, "it still answers"
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(fill())
        until(lambda: status().active == status().waiting == 0)
        released.set()
        assert text_of(live.chat("Really?")) is not None
        until(lambda: vanishing.get(f"{live.url}/health").json()["active"] == 0)  # its end comes after its answer
        until(lambda: 'status="499"' in live.service.metrics.text().decode())


def test_a_tenant_that_floods_the_queue_has_its_share_of_turns_and_no_more(tmp_path: Path) -> None:
    """Forty requests of `a` at once, six of `b` one after another: each of these waits for one of `a`'s at most."""
    keys = Keys({"a": Tenant("a"), "b": Tenant("b")})
    settings = BackendSettings(parse_policy("full"), max_waiting=64, max_active=2, refresh_s=3600)
    ended = list[str]()
    with serving(tiny_model(), Store(tmp_path / "objects"), keys, settings, key="a") as live:

        async def ask(client: httpx.AsyncClient, key: str, number: int) -> None:
            ask = body(number) | {"max_tokens": 16, "pic": False}
            response = await client.post("/v1/chat/completions", json=ask, headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == 200
            ended.append(key)

        async def run() -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=600) as client:
                flood = [asyncio.create_task(ask(client, "a", number)) for number in range(40)]
                await until_async(lambda: live.backend.status().waiting >= 30)
                for number in range(6):
                    await ask(client, "b", number)
                await asyncio.gather(*flood)

        asyncio.run(run())
    assert len(ended) == 46 and max(index for index, key in enumerate(ended) if key == "b") < 36


def test_who_waits_less_takes_a_place_of_who_waits_more(tmp_path: Path, released: threading.Event) -> None:
    keys = Keys({"a": Tenant("a"), "b": Tenant("b")})
    settings = BackendSettings(parse_policy("full"), max_waiting=2, max_active=1, refresh_s=3600)
    with serving(tiny_model(), Store(tmp_path / "objects"), keys, settings, key="b") as live:
        status = live.backend.status

        async def run() -> None:
            async with httpx.AsyncClient(base_url=live.url, timeout=600) as client:
                greedy = []
                for key, active, waiting in (("b", 1, 0), ("a", 2, 0), ("a", 2, 1), ("a", 2, 2)):  # one of each runs
                    greedy.append(asyncio.create_task(
                        client.post("/v1/chat/completions", json=ASK, headers={"Authorization": f"Bearer {key}"})
                    ))  # fmt: skip
                    await until_async(counts(live, active, waiting))
                other = asyncio.create_task(client.post(
                    "/v1/chat/completions", json=ASK, headers={"Authorization": "Bearer b"}
                ))  # fmt: skip
                done, _ = await asyncio.wait(greedy, return_when=asyncio.FIRST_COMPLETED)
                assert [task.result().status_code for task in done] == [429]
                for task in greedy:
                    task.cancel()
                released.set()
                assert (await other).status_code == 200
                await asyncio.gather(*greedy, return_exceptions=True)

        asyncio.run(run())
        until(lambda: status().active == status().waiting == 0)
