"""`pic serve` with caches against the same server without, by context cache ratio and rate (EPIC §5.3, fig. 8).

    python -m benchmarks.serve_throughput --out benchmarks/results/serve_throughput.json

The context cache ratio (CCR) is EPIC's: bytes of the users' objects by the memory for them, here the host memory of the
server's store (beyond it they are read from disk). A user has documents of its own, compiled once as caches, and asks
about them again and again: requests come at a Poisson rate, each of a user that is drawn, for a time; the throughput is
what was answered by when the last answer was there. A random model, so answers mean nothing; a
request must have the same one each time. The server is a thread of this process, and so are the clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.output import write_results
from pictool.bench.prompts import random_chunks, random_tail
from pictool.bench.shapes import random_model
from pictool.linker.grid import parse_policy
from pictool.serve.app import make_app
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.running import run
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store

POLICIES = ("full", "cacheblend-15", "legolink-16", "naive")
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 4, 256, 16, 8
DEFAULT_CCRS, DEFAULT_RATES = "0.25,1,4", "1,4,16"


@contextmanager
def serving(shape: str, memory_bytes: int) -> Iterator[tuple[TorchBackend, str]]:
    """A server of a random model in a thread, and its address."""
    with tempfile.TemporaryDirectory() as root, socket.socket() as listener:
        store = Store(root, memory_bytes=memory_bytes)
        backend = TorchBackend(
            random_model(shape), store, BackendSettings(parse_policy("legolink-16"), max_waiting=10_000)
        )
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        app = make_app(Service(backend, store.root, Keys(default=Tenant("default"))), "benchmark")
        threading.Thread(target=run, args=(app, listener), daemon=True).start()
        yield backend, f"http://127.0.0.1:{listener.getsockname()[1]}"


async def make_users(
    client: httpx.AsyncClient, backend: TorchBackend, memory_bytes: int, ccr: float
) -> list[dict[str, Any]]:
    """A request of every user, as many as their caches have CCR · memory bytes."""
    model, users = backend.engine_of(Tenant("default")).model, list[dict[str, Any]]()
    num_bytes = 0
    while not users or num_bytes < ccr * memory_bytes:
        seed = len(users)
        chunks = random_chunks(model, DOCUMENTS, DOCUMENT_TOKENS, seed)
        texts = [{"model": backend.model, "text": chunk.text} for chunk in chunks]
        made = [(await client.post("/v1/caches", json=text)).raise_for_status().json() for text in texts]
        num_bytes += sum(len(chunk.tokens) for chunk in chunks) * model.token_bytes
        users.append(
            {
                "model": backend.model, "prompt": random_tail(model, QUESTION_TOKENS, seed), "max_tokens": NEW_TOKENS,
                "temperature": 0, "cache_ids": [cache["id"] for cache in made],
            }
        )  # fmt: skip
    return users


async def ask(client: httpx.AsyncClient, body: dict[str, Any], policy: str) -> tuple[float, str]:
    """Seconds to the first event with text, and the answer."""
    started, first, text = time.perf_counter(), 0.0, ""
    request = body | {"stream": True, "pic": {"policy": policy}}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["text"] if choices else ""
                first = first or time.perf_counter() - started
    return first, text


async def measure(
    client: httpx.AsyncClient, users: list[dict[str, Any]], policy: str, rate: float, seconds: float, seed: int
) -> dict[str, Any]:
    """Requests that come at a rate for some seconds: how many are answered a second, and when first."""
    draw, ttfts, running = random.Random(seed), list[float](), list[asyncio.Task[None]]()
    answers = dict[str, set[str]]()

    async def one(user: dict[str, Any]) -> None:
        ttft_s, text = await ask(client, user, policy)
        ttfts.append(ttft_s)
        answers.setdefault(user["prompt"], set()).add(text)

    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        running.append(asyncio.create_task(one(draw.choice(users))))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*running)
    assert all(len(texts) == 1 for texts in answers.values()), "a request was answered in two ways"
    return {
        "policy": policy, "rate": rate, "requests": len(ttfts),
        "requests_per_s": len(ttfts) / (time.perf_counter() - started), "ttft_p50_s": statistics.median(ttfts),
        "ttft_mean_s": statistics.fmean(ttfts),
    }  # fmt: skip


async def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    memory_bytes = arguments.memory_mb << 20
    for ccr in map(float, arguments.ccr.split(",")):
        with serving(arguments.shape, memory_bytes) as (backend, url):
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
                users = await make_users(client, backend, memory_bytes, ccr)
                for policy in POLICIES:
                    await ask(client, users[0], policy)  # warm
                for rate in map(float, arguments.rates.split(",")):
                    for policy in POLICIES:
                        point = await measure(client, users, policy, rate, arguments.seconds, arguments.seed)
                        points.append({"ccr": ccr, "users": len(users), **point})
                        print(points[-1], flush=True)
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="small")
    parser.add_argument("--memory-mb", type=int, default=128, help="host memory of the store")
    parser.add_argument("--ccr", default=DEFAULT_CCRS)
    parser.add_argument("--rates", default=DEFAULT_RATES, help="requests a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="in which requests come, for each point")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    points = asyncio.run(measure_all(arguments))
    if arguments.out is not None:
        settings = {name: getattr(arguments, name) for name in ("shape", "memory_mb", "seconds", "seed")}
        write_results(arguments.out, {**settings, "points": points})


if __name__ == "__main__":
    main()
