"""What choosing a replica by residency costs a request beyond Ray Serve's own choice (the shorter of two queues).

    python -m benchmarks.route_overhead --out benchmarks/results/route_overhead.json

Two fleets of three replicas, alike but for their routers; a request of one document that every replica holds goes to
each of them in turn, one at a time, and its first event is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

from ray.serve.config import RequestRouterConfig

from benchmarks.output import write_results
from benchmarks.serve_fleet import Fleet, request_of, running
from pictool.cluster.serving import ROUTER
from pictool.cluster.session import connected

ROUTERS = {"residency": ROUTER, "two choices": str(RequestRouterConfig().request_router_class)}
_OBJECTS = 12
_WARM_UP = 60  # requests of an object, enough for every replica


async def first_event_s(fleet: Fleet, key: str) -> float:
    began = time.perf_counter()
    async with aclosing(fleet.backend.answer(request_of(key, fleet.tokens[key]))) as events:
        await anext(events)
        return time.perf_counter() - began


async def measure(fleets: dict[str, Fleet], requests: int) -> dict[str, Any]:
    """Medians, and that of the differences of two requests that follow each other, in ms."""
    keys = next(iter(fleets.values())).keys
    for fleet in fleets.values():
        for number in range(_WARM_UP * len(keys)):
            await first_event_s(fleet, keys[number % len(keys)])
    took: dict[str, list[float]] = {name: [] for name in fleets}
    for number in range(requests):
        for name in sorted(fleets, reverse=bool(number % 2)):
            took[name].append(1e3 * await first_event_s(fleets[name], keys[number % len(keys)]))
    ours, theirs = (took[name] for name in ROUTERS)
    differences = sorted(one - other for one, other in zip(ours, theirs, strict=True))
    return {
        "median_ms": {name: statistics.median(times) for name, times in took.items()},
        "difference_ms": statistics.median(differences),
        "difference_quartiles_ms": [differences[len(differences) // 4], differences[3 * len(differences) // 4]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--requests", type=int, default=600, help="of each router")
    parser.add_argument("--ray", default="local", help="address of a cluster")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as opened:
        opened.enter_context(connected(options.ray))
        fleets = {
            name: opened.enter_context(
                running(
                    options.ray, options.model, Path(opened.enter_context(tempfile.TemporaryDirectory())), _OBJECTS,
                    _OBJECTS, name.replace(" ", "-"), router,
                )
            )
            for name, router in ROUTERS.items()
        }  # fmt: skip
        results = asyncio.run(measure(fleets, options.requests)) | {"load": os.getloadavg()}
    print(results)
    if options.out is not None:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
