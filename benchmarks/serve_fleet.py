"""Three replicas of `pic serve --ray` on this machine: bytes from the remote and evenness by router, and one killed.

    python -m benchmarks.serve_fleet --out benchmarks/results/serve_fleet.json

500 documents, of which a replica's local tier holds 200. For each router: the tiers are emptied, each document is asked
for once, and then as Zipf's law has it (exponent 1), some at once; bytes count from then on. Answers are one token,
since what is measured comes before it. Then a replica is killed while documents are asked for: each answer is compared
with that of one process. Choosing is timed with and without Ray.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fleet import state
from benchmarks.output import write_results
from pictool.cluster.fleet import FleetBackend
from pictool.cluster.replica import TIERS
from pictool.cluster.residency import SENT_S
from pictool.cluster.serving import Scale, deployed
from pictool.cluster.session import connected
from pictool.cluster.torch_replica import TorchSpec
from pictool.compiler.compile import compile_chunks
from pictool.core import Chunk, Sampling
from pictool.linker.grid import parse_policy
from pictool.routing import Routing
from pictool.runtime.model import Model, load_model
from pictool.serve.answers import AnswerCollector, collect
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, ObjectReference, PlainText, RawPrompt
from pictool.store.remote.remote import Remote
from pictool.store.store import Store
from pictool.store.usage import read_counts

APP = "fleet"
REPLICAS = 3
ROUTERS = ("round robin", "two choices", "residency")
_COUNTED_S = 1.5  # until counts of use are written
_FORGOTTEN_S = SENT_S + 1  # until replicas have reported, and what was sent to them before no longer counts as held
_COUNTING = "benchmarks.fleet.router.CountingRouter"
_QUESTION = "Really?"
_NOBODY = Tenant("default")


@dataclass
class Fleet:
    """Replicas, and the remote with the objects of some documents."""

    backend: FleetBackend
    model: Model
    settings: BackendSettings
    root: Path
    keys: list[str]

    @property
    def tiers(self) -> list[Path]:
        return sorted((self.root / "store" / TIERS).glob("*"))

    def fetched(self) -> int:
        """Bytes that came to the local tiers."""
        time.sleep(_COUNTED_S)
        return sum(read_counts(tier).written_bytes for tier in self.tiers)


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
    spec = TorchSpec(
        Remote(str(root / "remote")), str(root / "store"), settings, held * size, model=model_name, device="cpu"
    )
    scale = Scale(REPLICAS, REPLICAS, cpus=0.25, gpus=0, ongoing=32, queued=256, load=8)
    with ExitStack() as resources:
        resources.enter_context(connected(address))
        routing = Routing(queue_bytes=size / 8)  # so that bytes decide, but between long queues
        calls = resources.enter_context(deployed(spec, scale, routing, app, router))
        backend = resources.enter_context(closing(FleetBackend(model, spec.remote, settings, calls)))
        yield Fleet(backend, model, settings, root, [part.key for part in done])


def asked(key: str, max_tokens: int = 1) -> AnswerRequest:
    return AnswerRequest(
        _NOBODY, RawPrompt((ObjectReference(key), PlainText(_QUESTION))), Sampling(0.0), max_tokens, num_top=2
    )


async def run_all(backend: FleetBackend, wanted: Sequence[str], at_once: int, max_tokens: int = 1) -> list[Any]:
    """All requests, some at once: their answers, or what they were refused with; and the seconds of each."""
    room, seconds = asyncio.Semaphore(at_once), list[float]()

    async def one(key: str) -> Any:
        async with room:
            began = time.perf_counter()
            try:
                return await collect(backend.answer(asked(key, max_tokens)))
            except ApiError as error:
                return error
            finally:
                seconds.append(time.perf_counter() - began)

    return [await asyncio.gather(*(one(key) for key in wanted)), seconds]


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
        asyncio.run(run_all(fleet.backend, random.Random(1).sample(fleet.keys, len(fleet.keys)), at_once))
        before, warm_up = fleet.fetched(), Counter(state.calls)
        began = time.perf_counter()
        answers, seconds = asyncio.run(run_all(fleet.backend, draw(fleet.keys, requests, 3), at_once))
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
    wanted = draw(fleet.keys[:40], requests, 5)
    with TorchBackend(fleet.model, Store(fleet.root / "remote"), fleet.settings) as single:
        expected = {key: asyncio.run(collect(single.answer(asked(key, 8)))) for key in set(wanted)}

    async def killed() -> list[Any]:
        running = asyncio.ensure_future(run_all(fleet.backend, wanted, at_once, 8))
        while fleet.backend.status().active < 2:
            await asyncio.sleep(0.01)
        replicas()[0].kill()
        assert not running.done()
        return (await running)[0]  # type: ignore[no-any-return]

    answers = asyncio.run(killed())
    refused = Counter(told.status for told in answers if isinstance(told, ApiError))
    told = [(key, answer) for key, answer in zip(wanted, answers, strict=True) if isinstance(answer, AnswerCollector)]
    wrong = sum(
        answer.listed[0].text != expected[key].listed[0].text or answer.reuse != expected[key].reuse
        for key, answer in told
    )
    return Killed(len(told), dict(refused), wrong)


def replicas() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if f"ServeReplica:{APP}" in " ".join(child.cmdline()[:1])]


def time_choices(replicas: int, keys: int, rounds: int = 2000) -> dict[str, float]:
    """Median microseconds of a choice, without Ray: among so many replicas that report what they hold."""
    from pictool.cluster.residency import MOST_HELD, Residency, report_of

    names = [f"{number:x}" for number in range(replicas)]
    objects = [f"{number:064x}" for number in range(4 * MOST_HELD)]
    draws = random.Random(0)
    router = Residency(Routing())
    router.keep(names)
    for name in names:
        router.take_report(name, report_of((key, 1 << 20) for key in draws.sample(objects, MOST_HELD)))
    took = []
    for _ in range(rounds):
        wanted, queues = draws.sample(objects, keys), {name: float(draws.randrange(4)) for name in names}
        began = time.perf_counter()
        first = router.order(wanted, queues)[0]
        router.count(first)
        router.was_sent(wanted, first)
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
