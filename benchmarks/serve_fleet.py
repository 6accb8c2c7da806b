"""Three replicas of `pic serve --ray` on this machine: bytes from the remote and evenness by router, and one killed.

    python -m benchmarks.serve_fleet --out benchmarks/results/serve_fleet.json

500 documents, of which a replica's local tier holds 200. For each router: the tiers are emptied, each document is
requested once, and then as Zipf's law has it (exponent 1), some at once; bytes count from then on. Answers are one
token, since what is measured comes before it. Then a replica is killed while documents are requested: each answer is
compared with that of one process. Choosing is timed with and without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet import state
from benchmarks.output import write_results
from pictool.cluster.fleet import FleetBackend
from pictool.cluster.loading import ModelSpec
from pictool.cluster.replica import KEY_DIGITS, MOST_HELD, TIERS, ReplicaSpec
from pictool.cluster.serving import SENT_S, Scale, deployed
from pictool.cluster.session import connected
from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk, Sampling
from pictool.linker.grid import parse_policy
from pictool.routing import Residency, Routing
from pictool.runtime.model import Model, load_model
from pictool.serve.answers import AnswerCollector
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, Event, ObjectReference, PlainText, RawPrompt
from pictool.store.remote.remote import Remote
from pictool.store.store import Store
from pictool.store.usage import read_counts

APP = "fleet"
REPLICAS = 3
ROUTERS = ("round robin", "two choices", "residency")
_FORGOTTEN_S = SENT_S + 1  # until replicas have reported, and what was sent to them before no longer counts as held
_COUNTING = "benchmarks.fleet.router.CountingRouter"
_QUESTION = "Really?"
_NOBODY = Tenant("default")


async def collect(events: AsyncIterator[Event]) -> AnswerCollector:
    """All events of a request."""
    collected = AnswerCollector()
    async for event in events:
        collected.add(event)
    return collected


@dataclass
class Fleet:
    """Replicas, and the remote with the objects of some documents."""

    backend: FleetBackend
    model: Model
    settings: BackendSettings
    root: Path
    tokens: dict[str, int]  # of each object, by key

    @property
    def keys(self) -> list[str]:
        return list(self.tokens)

    @property
    def tiers(self) -> list[Path]:
        return sorted((self.root / "store" / TIERS).glob("*"))

    def fetched(self) -> int:
        """Bytes that came to the local tiers. A replica that reports writes its counts first."""
        import ray

        ray.get([actor.record_routing_stats.remote() for actor in actors()])
        return sum(read_counts(tier).written_bytes for tier in self.tiers)

    def num_holders(self, key: str) -> int:
        """The replicas that have an object."""
        return sum(Store(tier).path(key).exists() for tier in self.tiers)


@contextmanager
def running(
    address: str, model_name: str, root: Path, objects: int, held: int, app: str = APP, router: str = _COUNTING
) -> Iterator[Fleet]:
    """A fleet whose local tiers hold `held` of `objects` objects."""
    model, remote = load_model(model_name, "cpu"), Store(root / "remote")
    texts = [f"Town {number} lies at the river {number * 7 % 91}, which is long. " for number in range(objects)]
    done = compile_chunks(model, remote, [Chunk(text, model.encode(text), "") for text in texts])
    size = sum(part.path.stat().st_size for part in done) // objects
    settings = BackendSettings(parse_policy("legolink-4"), refresh_s=3600, name="tiny")
    spec = ReplicaSpec(
        ModelSpec(model_name, "cpu"), Remote(str(root / "remote")), str(root / "store"), settings,
        max_bytes=held * size,
    )  # fmt: skip
    scale = Scale(REPLICAS, REPLICAS, cpus=0.25, gpus=0)
    with ExitStack() as resources:
        resources.enter_context(connected(address))
        routing = Routing(queue_bytes=size / 8)  # so that bytes decide, but between long queues
        calls = resources.enter_context(deployed(spec, scale, app, routing, router))
        backend = FleetBackend(model, spec.remote, settings, calls)
        yield Fleet(backend, model, settings, root, {part.key: len(part.chunk) for part in done})


def request_of(key: str, num_tokens: int, max_tokens: int = 1) -> AnswerRequest:
    prompt = RawPrompt((ObjectReference(key, num_tokens), PlainText(_QUESTION)))
    return AnswerRequest(_NOBODY, prompt, Sampling(0.0), max_tokens, num_top=2)


async def run_all(fleet: Fleet, keys: Sequence[str], at_once: int, max_tokens: int = 1) -> list[Any]:
    """All requests, some at once: their answers, or what they were refused with; and the seconds of each."""
    room, seconds = asyncio.Semaphore(at_once), list[float]()

    async def one(key: str) -> Any:
        async with room:
            began = time.perf_counter()
            try:
                return await collect(fleet.backend.answer(request_of(key, fleet.tokens[key], max_tokens)))
            except ApiError as error:
                return error
            finally:
                seconds.append(time.perf_counter() - began)

    return [await asyncio.gather(*(one(key) for key in keys)), seconds]


def draw(keys: Sequence[str], count: int, seed: int) -> list[str]:
    """Zipf's law over the objects."""
    return random.Random(seed).choices(keys, [1 / rank for rank in range(1, len(keys) + 1)], k=count)


@dataclass(frozen=True)
class Measured:
    """One router. `fetched` bytes; calls of the busiest replica ÷ the mean, after the warm-up and in all; seconds of a
    request."""

    fetched: int
    imbalance: float
    imbalance_in_all: float
    requests_s: float
    p50_s: float
    p99_s: float


def measure(fleet: Fleet, router: str, requests: int, at_once: int) -> Measured:
    """Requests by one router, from empty tiers."""
    for tier in fleet.tiers:
        shutil.rmtree(tier / "objects", ignore_errors=True)
    time.sleep(_FORGOTTEN_S)
    state.order = router
    state.calls.clear()
    try:
        asyncio.run(run_all(fleet, random.Random(1).sample(fleet.keys, len(fleet.keys)), at_once))
        before, warm_up = fleet.fetched(), Counter(state.calls)
        began = time.perf_counter()
        answers, seconds = asyncio.run(run_all(fleet, draw(fleet.keys, requests, 3), at_once))
        took = time.perf_counter() - began
    finally:
        state.order = "residency"
    assert all(isinstance(answer, AnswerCollector) for answer in answers), Counter(map(str, answers))
    return Measured(
        fleet.fetched() - before, busiest(state.calls - warm_up), busiest(state.calls), requests / took,
        statistics.median(seconds), statistics.quantiles(seconds, n=100)[-1],
    )  # fmt: skip


def busiest(calls: Counter[str]) -> float:
    """Calls of the busiest replica ÷ the mean."""
    return max(calls.values()) / (calls.total() / REPLICAS)


@dataclass(frozen=True)
class Killed:
    """What became of requests while a replica was killed."""

    answered: int
    refused: dict[int, int]  # by status
    wrong: int


def kill_one(fleet: Fleet, requests: int, at_once: int) -> Killed:
    """Kill a replica while requests run; each answer is compared with that of one process."""
    keys = draw(fleet.keys[:40], requests, 5)
    with TorchBackend(fleet.model, Store(fleet.root / "remote"), fleet.settings) as single:
        expected = {
            key: asyncio.run(collect(single.answer(request_of(key, fleet.tokens[key], 8)))) for key in set(keys)
        }

    async def killed() -> list[Any]:
        running = asyncio.ensure_future(run_all(fleet, keys, at_once, 8))
        while fleet.backend.status().active < 2:
            await asyncio.sleep(0.01)
        replicas()[0].kill()
        assert not running.done()
        return (await running)[0]  # type: ignore[no-any-return]

    answers = asyncio.run(killed())
    refused = Counter(answer.status for answer in answers if isinstance(answer, ApiError))
    answered = [(key, answer) for key, answer in zip(keys, answers, strict=True) if isinstance(answer, AnswerCollector)]
    wrong = sum(
        answer.listed[0].text != expected[key].listed[0].text or answer.reuse != expected[key].reuse
        for key, answer in answered
    )
    return Killed(len(answered), dict(refused), wrong)


def replicas() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended, or nobody asked yet how
            if f"ServeReplica:{APP}" in " ".join(child.cmdline()[:1]):
                found.append(child)
    return found


def actors() -> list[Any]:
    """Ray's actors of the replicas."""
    import ray
    from ray.util import list_named_actors

    names = [actor for actor in list_named_actors(all_namespaces=True) if f"SERVE_REPLICA::{APP}" in actor["name"]]
    return [ray.get_actor(**name) for name in names]


def time_choices(replicas: int, keys: int, rounds: int = 2000) -> dict[str, float]:
    """Median microseconds of a choice, without Ray: among so many replicas that report what they hold."""
    names = [f"{number:x}" for number in range(replicas)]
    objects = [f"{number:0{KEY_DIGITS}x}" for number in range(4 * MOST_HELD)]
    draws = random.Random(0)
    router = Residency(sent_s=SENT_S)
    router.keep(names)
    for name in names:
        router.take_report(name, dict.fromkeys(draws.sample(objects, MOST_HELD)))
    took = []
    for _ in range(rounds):
        request = dict.fromkeys(draws.sample(objects, keys), 1 << 20)
        queues = {name: float(draws.randrange(4)) for name in names}
        began = time.perf_counter()
        first = router.order(request, queues)[0]
        router.was_sent(request, first)
        took.append(time.perf_counter() - began)
    return {"replicas": replicas, "keys": keys, "choose_us": 1e6 * statistics.median(took)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded-small")
    parser.add_argument("--requests", type=int, default=1500, help="of each router")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--objects", type=int, default=500)
    parser.add_argument("--held", type=int, default=200, help="objects of a local tier")
    parser.add_argument("--ray", default="local", help="address of a cluster")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"choices": [time_choices(3, 8), time_choices(32, 8)], "routers": {}}
    with (
        tempfile.TemporaryDirectory() as root,
        running(options.ray, options.model, Path(root), options.objects, options.held) as fleet,
    ):
        for router in ROUTERS:
            state.choose_s.clear()
            measured = measure(fleet, router, options.requests, options.at_once)
            results["routers"][router] = vars(measured)
            print(router, measured)
        results["choose_us_in_ray"] = 1e6 * statistics.median(state.choose_s)
        results["killed"] = vars(kill_one(fleet, options.requests // 3, options.at_once))
    print(results)
    if options.out is not None:
        write_results(options.out, results)


if __name__ == "__main__":
    main()
