"""TTFT of one link by where its objects are: host memory, local disk, a remote on loopback; interleaved.

    python -m benchmarks.tiers --out benchmarks/results

A random model of a shape, objects of random numbers (they load like others). The remote is an HTTP server in a process
of its own on this machine; `--delay-ms` makes it wait before each answer, as a network would. Each repeat links the
same prompt from every tier; ratios are of one repeat. Every image is compared with the one from disk, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import write_results
from pictool import Chunk, Model, Store
from pictool.bench.repeats import median_ratio
from pictool.bench.shapes import random_model
from pictool.controller.profile import drop_page_cache, random_object
from pictool.linker.grid import parse_grid
from pictool.linker.link import Linked, link
from pictool.linker.spec import Spec

POLICIES = parse_grid(["naive", "legolink-16"])
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


def link_from_every_tier(model: Model, disk: Store, memory: Store, url: str, spec: Spec) -> dict[str, Linked]:
    """The same link from every tier. `memory` has host memory that holds the objects of `disk`."""
    with tempfile.TemporaryDirectory(dir=".") as directory:
        remote = Store(directory, remote=url)
        by_tier = {"memory": link(model, memory, spec), BASE: link(model, disk, spec)}
        by_tier["remote, first"] = link(model, remote, spec)
        remote.drain()
        by_tier["remote, second"] = link(model, remote, spec)
    drop_page_cache(map(disk.path, disk.keys()))
    return by_tier | {"disk, cold": link(model, disk, spec)}


def measure(model: Model, disk: Store, url: str, spec: Spec, repeats: int) -> dict[str, Any]:
    """Medians by tier: of TTFT, its ratio to that from disk (page cache warm), and what the link waited for layers."""
    memory, raw = Store(disk.root, memory_bytes=1 << 40), []
    link(model, memory, spec)
    for _ in range(repeats):
        by_tier = link_from_every_tier(model, disk, memory, url, spec)
        require_equal(by_tier)
        raw.append({tier: vars(linked.timing) for tier, linked in by_tier.items()})
        times = (f"{tier} {timing['load_s']:.3f} of {timing['ttft_s']:.3f}" for tier, timing in raw[-1].items())
        print("  " + ", ".join(times), file=sys.stderr, flush=True)

    def column(tier: str, field: str) -> list[float]:
        return [repeat[tier][field] for repeat in raw]

    medians = {
        field: {tier: statistics.median(column(tier, field)) for tier in by_tier}
        for field in ("ttft_s", "load_s", "fetch_s")
    }
    return {
        **medians,
        "by_disk": {tier: median_ratio(column(tier, "ttft_s"), column(BASE, "ttft_s")) for tier in by_tier},
        "bytes_read": {tier: linked.bytes_read for tier, linked in by_tier.items()},
        "raw": raw,
    }


def require_equal(by_tier: dict[str, Linked]) -> None:
    first, *others = (linked.image for linked in by_tier.values())
    for image in others:
        for layer in range(image.stack.num_layers):
            assert torch.equal(image.key(layer), first.key(layer))
            assert torch.equal(image.value(layer), first.value(layer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="directory for tiers.json")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.delay_ms[0])
        return
    model = random_model(options.shape)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        disk, objects = Store(directory), [random_object(model, options.tokens, seed) for seed in range(options.chunks)]
        results: dict[str, Any] = {"object_bytes": sum(disk.put(each).stat().st_size for each in objects)}
        chunks = [Chunk(each.text, tuple(map(int, each.tokens)), "random") for each in objects]
        del objects
        link(model, disk, Spec.raw(chunks, TAIL, POLICIES[0].policy))  # warm-up
        for delay in options.delay_ms:
            with serving(disk.root, delay) as url:
                for labelled in POLICIES:
                    print(f"{labelled.label}, a remote {delay:g} ms away", file=sys.stderr)
                    spec = Spec.raw(chunks, TAIL, labelled.policy)
                    results[f"{labelled.label}, {delay:g} ms"] = measure(model, disk, url, spec, options.repeats)
    write_results(options.out / "tiers.json", results)


if __name__ == "__main__":
    main()
