"""TTFT of one link by where its objects are: host memory, local disk, a remote on loopback; side by side in one run.

    python -m benchmarks.tiers --out benchmarks/results

A random model of a shape, objects of random numbers (they load like others). The remote is an HTTP server in a process
of its own on this machine; `--delay-ms` makes it wait before each answer, as a network would. Each round links the same
prompt from every tier; ratios are of a round. Every image is compared with the one from disk, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pictool import Chunk, Model, Store, link, make_policy
from pictool.bench.shapes import random_model
from pictool.controller.calibration import drop_page_cache, random_object
from pictool.linker.link import Linked
from pictool.linker.policies.base import Policy
from pictool.runtime.machine import machine

POLICIES = {"naive": make_policy("naive", {}), "legolink-16": make_policy("legolink", {"k": 16})}
TAIL = "Which festival does it hold, and on which river does it lie?"
BASE = "disk"


def serve(directory: str, delay_ms: float) -> None:
    """Serve a directory with ranges until killed; prints the port."""
    from aiohttp import web

    @web.middleware
    async def delayed(request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        await asyncio.sleep(delay_ms / 1e3)
        response: web.StreamResponse = await handler(request)
        return response

    async def run() -> None:
        app = web.Application(middlewares=[delayed])
        app.router.add_static("/", directory)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def serving(directory: Path, delay_ms: float) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.tiers", "--serve", str(directory), "--delay-ms", str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def round_of(model: Model, far: Store, url: str, chunks: list[Chunk], policy: Policy, warm: Store) -> dict[str, Linked]:
    """The same link from every tier. `warm` has host memory that holds the objects."""

    def run(store: Store) -> Linked:
        return link(model, store, chunks, TAIL, policy)

    with tempfile.TemporaryDirectory(dir=".") as directory:
        near = Store(directory, remote=url)
        found = {"memory": run(warm), BASE: run(far), "remote, first": run(near)}
        near.drain()
        found["remote, second"] = run(near)
    drop_page_cache(map(far.path, far.keys()))
    return found | {"disk, cold": run(far)}


def measure(model: Model, far: Store, url: str, chunks: list[Chunk], policy: Policy, repeats: int) -> dict[str, Any]:
    """Medians by tier: of TTFT, its ratio to that from disk (page cache warm), and what the link waited for layers."""
    warm, rounds = Store(far.root, memory_bytes=1 << 40), []
    link(model, warm, chunks, TAIL, policy)
    for _ in range(repeats):
        found = round_of(model, far, url, chunks, policy, warm)
        require_equal(found)
        rounds.append({tier: vars(one.timing) for tier, one in found.items()})
        times = (f"{tier} {one['load_s']:.3f} of {one['ttft_s']:.3f}" for tier, one in rounds[-1].items())
        print("  " + ", ".join(times), file=sys.stderr, flush=True)

    def median(field: str) -> dict[str, float]:
        return {tier: statistics.median(one[tier][field] for one in rounds) for tier in rounds[0]}

    return {
        "ttft_s": median("ttft_s"),
        "by_disk": {t: statistics.median(one[t]["ttft_s"] / one[BASE]["ttft_s"] for one in rounds) for t in rounds[0]},
        "load_s": median("load_s"),
        "fetch_s": median("fetch_s"),
        "bytes_read": {tier: one.bytes_read for tier, one in found.items()},
        "raw": rounds,
    }


def require_equal(found: dict[str, Linked]) -> None:
    images = [one.image for one in found.values()]
    for image in images[1:]:
        for layer in range(image.stack.num_layers):
            same = torch.equal(image.key(layer), images[0].key(layer))
            assert same and torch.equal(image.value(layer), images[0].value(layer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="directory for tiers.json")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.delay_ms[0])
        return
    model = random_model(arguments.shape)
    results: dict[str, Any] = {"command": f"python -m benchmarks.tiers {' '.join(sys.argv[1:])}", "machine": machine()}
    with tempfile.TemporaryDirectory(dir=".") as directory:
        far, made = Store(directory), [random_object(model, arguments.tokens, seed) for seed in range(arguments.chunks)]
        results["object_bytes"] = sum(far.put(one).stat().st_size for one in made)
        chunks = [Chunk(one.text, tuple(map(int, one.tokens)), "random") for one in made]
        del made
        link(model, far, chunks, TAIL, POLICIES["naive"])  # warm-up
        for delay in arguments.delay_ms:
            with serving(far.root, delay) as url:
                for name, policy in POLICIES.items():
                    print(f"{name}, a remote {delay:g} ms away", file=sys.stderr)
                    key = f"{name}, {delay:g} ms"
                    results[key] = measure(model, far, url, chunks, policy, arguments.repeats)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tiers.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
