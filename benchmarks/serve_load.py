"""`pic serve` under load, on loopback with the embedded model.

    python -m benchmarks.serve_load --requests 20000 --out benchmarks/results/serve_load.json

Two measurements. *TTFT*: a linked request over HTTP, to its first text, from a client in another process, against the
engine's own link of the same prompt, in turn. *Load*: clients in the server's process with Poisson arrivals, of which a
third vanish in the middle and some send nonsense; each answer is compared with that of a serial run, and memory and
open files are read as the requests go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.output import write_results
from pictool.linker.grid import parse_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import load_model
from pictool.serve.app import make_app
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.running import run
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store
from training.world.generate import write_prompt

POLICY = "legolink-16"
KINDS, SHARES = ("waits", "vanishes", "nonsense"), (60, 33, 7)
WARM_UP = 5
_SAMPLES = 8  # of memory and open files


@contextmanager
def serving() -> Iterator[tuple[TorchBackend, str]]:
    """A server in a thread, and its address. It ends with the process."""
    with tempfile.TemporaryDirectory() as root, socket.socket() as listener:
        store = Store(root)
        backend = TorchBackend(load_model("embedded"), store, BackendSettings(parse_policy(POLICY), max_waiting=1000))
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        app = make_app(Service(backend, store.root, Keys(default=Tenant("default"))), "benchmark")
        threading.Thread(target=run, args=(app, listener), daemon=True).start()
        yield backend, f"http://127.0.0.1:{listener.getsockname()[1]}"


def requests_of(count: int) -> list[dict[str, Any]]:
    """Different requests: the pages of a book, and a question about them."""
    prompts = [write_prompt(random.Random(number), 4) for number in range(count)]
    return [
        {
            "model": "embedded", "temperature": 0, "max_tokens": 12,
            "messages": [{"role": "user", "content": "".join(prompt.pages) + "\n\n" + prompt.questions[0].text}],
        }
        for prompt in prompts
    ]  # fmt: skip


def first_text_ms(url: str, body: dict[str, Any], asked: Connection) -> None:
    """A client in a process of its own: at each message it sends the request, and answers with ms to its first text."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while asked.recv():
            started = time.perf_counter()
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                next(line for line in response.iter_lines() if '"content": ""' not in line and line)
                asked.send(1e3 * (time.perf_counter() - started))


def measure_ttft(backend: TorchBackend, url: str, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token, in turn: over HTTP, and the engine's own link of the same documents."""
    prompt = write_prompt(random.Random(99), 4)
    own, over_http = list[float](), list[float]()
    pages = [{"model": "embedded", "text": page} for page in prompt.pages]
    caches = [httpx.post(f"{url}/v1/caches", json=page).json()["id"] for page in pages]
    body = {
        "model": "embedded", "temperature": 0, "stream": True, "max_tokens": 2, "cache_ids": caches,
        "messages": [{"role": "user", "content": prompt.questions[0].text}],
    }  # fmt: skip
    engine = backend.engine_of(Tenant("default"))
    keys = [str(path) for path in sorted(engine.store.root.glob("objects/*/*.kvo"))]
    spec = Spec(prompt.questions[0].text, keys, parse_policy(POLICY))
    ask_client, asked = get_context("spawn").Pipe()
    client = get_context("spawn").Process(target=first_text_ms, args=(url, body, asked), daemon=True)
    client.start()
    for number in range(WARM_UP + repeats):
        ttft_ms = 1e3 * engine.link(spec).timing.ttft_s
        ask_client.send(True)
        http_ms = ask_client.recv()
        if number >= WARM_UP:
            own.append(ttft_ms)
            over_http.append(http_ms)
    ask_client.send(False)
    client.join()
    medians = statistics.median(own), statistics.median(over_http)
    return {
        "repeats": repeats, "engine_ms": medians[0], "http_ms": medians[1], "difference_ms": medians[1] - medians[0]
    }  # fmt: skip


async def ask(client: httpx.AsyncClient, body: dict[str, Any], kind: str) -> str | None:
    """One request of a kind: its whole answer, or None."""
    if kind == "nonsense":
        response = await client.post("/v1/chat/completions", content=b'{"messages": ' + os.urandom(20))
        assert 400 <= response.status_code < 500, response.status_code
        return None
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code == 429:
            return "429"
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            if kind == "vanishes":
                return None
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["delta"].get("content", "") if choices else ""
    return text


async def measure_load(url: str, count: int, clients: int, rate: float, seed: int) -> dict[str, Any]:
    """`count` requests at `rate` a second, of `clients` at most at once."""
    bodies, draw, process = requests_of(40), random.Random(seed), psutil.Process()
    outcomes, samples, places = Counter[str](), list[dict[str, float]](), asyncio.Semaphore(clients)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        want = [await ask(client, body, "waits") for body in bodies]

        async def one(number: int) -> None:
            kind, which = draw.choices(KINDS, SHARES)[0], draw.randrange(len(bodies))
            async with places:
                got = await ask(client, bodies[which], kind)
            if kind == "waits":
                kind = "answered" if got == want[which] else "refused" if got == "429" else "wrong"
            outcomes[kind] += 1
            if number % max(1, count // _SAMPLES) == 0:
                samples.append(
                    {"requests": number, "rss_mb": process.memory_info().rss / 1e6, "files": process.num_fds()}
                )

        running, started = set[asyncio.Task[None]](), time.perf_counter()
        for number in range(count):
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(draw.expovariate(rate))
            while len(running) > 2 * clients:
                await asyncio.sleep(0.01)
        await asyncio.gather(*running)
        seconds = time.perf_counter() - started
        health = (await client.get("/health")).json()
    return {
        "requests": count, "clients": clients, "outcomes": dict(outcomes), "requests_per_s": count / seconds,
        "left": {name: health[name] for name in ("waiting", "active")}, "samples": samples,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rate", type=float, default=200.0, help="arrivals a second")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with serving() as (backend, url):
        ttft = measure_ttft(backend, url, arguments.repeats)
        print(ttft, flush=True)
        load = asyncio.run(
            measure_load(url, arguments.requests, arguments.clients, arguments.rate, arguments.seed)
        )  # fmt: skip
        print(load)
        if arguments.out is not None:
            write_results(arguments.out, {"policy": POLICY, "ttft": ttft, "load": load})


if __name__ == "__main__":
    main()
