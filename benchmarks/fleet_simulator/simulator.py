"""A fleet of replicas that no machine here can hold, simulated request by request.

What is simulated: every replica has a local tier of bounded size (least recently used objects are evicted), fetches
what it lacks from the remote as soon as a request is routed to it, one object after another, and links one request at
a time; reading the local tier and computing overlap (CacheBlend §5). A request may be computed once its objects are
there; others that are ready overtake it. What is not: decoding, the remote's own limits, transfers between replicas.

Routers know queues exactly. Residency they know from what they routed, and from reports of the replicas every few
seconds, as in `pictool.cluster`.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pictool.controller.cost import Estimator, PromptSize
from pictool.errors import InputError
from pictool.routing import RecentRequests, Routing, rank

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_WARM_UP = 0.5  # of the requests, which fill the local tiers: neither their bytes nor their TTFT count
_GRID = 64  # lengths of context at which the estimator is called; between them it is interpolated
_AFFINITY_SLACK = 10  # requests by which a preferred queue may be longer than another (Ray's prefix-aware router)
_POINTS = 100  # of a replica on the ring


@dataclass(frozen=True)
class Demand:
    """What arrives.

    Fields:
        rate: requests a second; requests: in all.
        objects: documents of `tokens` tokens on average (log-normal), in topics of `topic` of them.
        documents: of a request, all of one topic, in any order.
        skew: exponent of Zipf's law over topics. drift_s: seconds after which all topics gain a rank, and the first
            becomes the last; 0: never. hot_share: of requests that ask for one topic, another every `hot_s` seconds.
    """

    rate: float = 200.0
    requests: int = 100_000
    objects: int = 1_000_000
    documents: int = 4
    topic: int = 16
    tokens: int = 512
    tail: int = 64
    skew: float = 1.0
    drift_s: float = 60.0
    hot_share: float = 0.05
    hot_s: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or self.requests < 1:
            raise InputError(f"--rate {self.rate:g}, --requests {self.requests}: must be above 0")
        if not 1 <= self.documents <= self.topic <= self.objects:
            raise InputError(
                f"--documents {self.documents}: must be 1 or more, at most --topic {self.topic}, which is at most "
                f"--objects {self.objects}"
            )
        if not 0 <= self.hot_share <= 1 or self.skew < 0:
            raise InputError(f"--hot {self.hot_share:g}, --skew {self.skew:g}: a share from 0 to 1, and 0 or more")


@dataclass(frozen=True)
class Link:
    """A place that objects come from: bytes a second, and seconds before the first byte of each."""

    bytes_s: float
    latency_s: float = 0.0

    def seconds(self, num_bytes: float, objects: int) -> float:
        return num_bytes / self.bytes_s + self.latency_s * objects


@dataclass(frozen=True)
class Site:
    """The fleet and its surroundings.

    Fields:
        cache_bytes: of each replica's local tier. deaths_h: replicas that die in an hour, of all; another joins after
            `rejoin_s`, and has nothing.
        report_s: seconds between two reports of what a replica holds.
    """

    replicas: int
    cache_bytes: float
    local: Link
    remote: Link
    token_bytes: int
    deaths_h: float = 0.0
    rejoin_s: float = 60.0
    report_s: float = 10.0


@dataclass(frozen=True)
class Costs:
    """Seconds of linking by tokens of context: a policy that computes the share `ratio` of it, and the tail."""

    estimator: Estimator
    ratio: float

    def seconds(self, contexts: Ints, tail: int, objects: int) -> Floats:
        """Of prompts; float64 [prompts]."""
        grid = np.linspace(1, max(2, int(contexts.max())), _GRID)
        sizes = [PromptSize(int(context), tail, objects, 1) for context in grid]
        return np.interp(contexts, grid, [self.estimator.recompute_s(self.ratio, size) for size in sizes])


@dataclass(frozen=True)
class Requests:
    """All requests, drawn before anything is simulated.

    Fields:
        arrivals: seconds, ascending [requests]. documents: objects of each, in order [requests, documents].
        compute_s: seconds of linking [requests]. sizes: bytes of each object [objects]. names: their keys.
    """

    arrivals: Floats
    documents: Ints
    compute_s: Floats
    sizes: Ints
    names: tuple[str, ...]


def draw_requests(demand: Demand, costs: Costs, token_bytes: int) -> Requests:
    """Draw a stream; the same seed gives the same."""
    draw = np.random.default_rng(demand.seed)
    arrivals = np.cumsum(draw.exponential(1 / demand.rate, demand.requests))  # a Poisson process
    tokens = np.maximum(16, draw.lognormal(math.log(demand.tokens) - 0.125, 0.5, demand.objects)).astype(np.int64)
    topics = demand.objects // demand.topic
    popularity = np.cumsum(np.arange(1, topics + 1, dtype=np.float64) ** -demand.skew)
    ranks = np.searchsorted(popularity, draw.random(demand.requests) * popularity[-1])
    order = draw.permutation(topics)
    shift = (arrivals / demand.drift_s).astype(np.int64) if demand.drift_s else np.zeros(demand.requests, np.int64)
    chosen = order[(ranks + shift) % topics]
    hot = order[topics // 2 + (arrivals / demand.hot_s).astype(np.int64) % (topics - topics // 2)]
    chosen = np.where(draw.random(demand.requests) < demand.hot_share, hot, chosen)
    inside = draw.random((demand.requests, demand.topic)).argsort(axis=1)[:, : demand.documents]
    documents = chosen[:, None] * demand.topic + inside
    compute_s = costs.seconds(tokens[documents].sum(axis=1), demand.tail, demand.documents)
    return Requests(
        arrivals, documents, compute_s, tokens * token_bytes, tuple(f"{i:x}" for i in range(demand.objects))
    )


class Replica:
    """One replica: what its local tier holds, oldest first, and until when its link and its device are busy."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self._site = name, site
        self.held: OrderedDict[int, int] = OrderedDict()
        self.num_bytes = 0
        self.evicted: list[int] = []  # since the last report
        self.fetched_until = self.computed_until = 0.0
        self.running: dict[int, None] = {}  # requests, in order
        self.served, self.busy_s = 0, 0.0

    def serve(self, now: float, documents: Sequence[int], sizes: Sequence[int], compute_s: float) -> tuple[float, int]:
        """Route a request here: when its first token is there, and the bytes that come from the remote."""
        site, missing, count = self._site, 0, 0
        for number, size in zip(documents, sizes, strict=True):
            if number in self.held:
                self.held.move_to_end(number)
            else:
                missing, count = missing + size, count + 1
                self.held[number] = size
                self.num_bytes += size
        while self.num_bytes > site.cache_bytes and len(self.held) > len(documents):
            gone, size = self.held.popitem(last=False)
            self.num_bytes -= size
            self.evicted.append(gone)
        ready = now
        if count:
            ready = self.fetched_until = max(now, self.fetched_until) + site.remote.seconds(missing, count)
        work = max(site.local.seconds(sum(sizes), len(sizes)), compute_s)
        start = max(now, ready, self.computed_until)
        self.computed_until = max(now, self.computed_until) + work
        self.served += 1
        self.busy_s += work
        return start + work, missing


class Router(ABC):
    """Chooses a replica for each request. `queues` are the requests of each, by name, which the simulation counts."""

    label = ""

    def __init__(self, site: Site, sizes: Ints, names: Sequence[str], routing: Routing, seed: int) -> None:
        self.queues: dict[str, int] = {}
        self._sizes, self._names, self._routing, self._draw = sizes, names, routing, random.Random(seed)

    @abstractmethod
    def choose(self, documents: Sequence[int]) -> str:
        """The replica for a request."""

    def changed(self) -> None:  # noqa: B027 (a router may keep nothing)
        """Called when a replica joined or left."""

    def routed(self, documents: Sequence[int], name: str) -> None:  # noqa: B027 (a router may keep nothing)
        """Called when a request was routed."""

    def evicted(self, number: int, name: str) -> None:  # noqa: B027 (a router may keep nothing)
        """Called with what a replica reports that it holds no more."""

    def _shorter_of_two(self) -> str:
        one, other = self._draw.choice(self._alive), self._draw.choice(self._alive)
        return one if self.queues[one] <= self.queues[other] else other

    @property
    def _alive(self) -> list[str]:
        if len(self._listed) != len(self.queues) or self._listed_of is not self.queues:
            self._listed, self._listed_of = list(self.queues), self.queues
        return self._listed

    _listed: list[str] = []  # noqa: RUF012 (replaced, never changed)
    _listed_of: object = None


class RoundRobin(Router):
    label = "round robin"
    _next = 0

    def choose(self, documents: Sequence[int]) -> str:
        self._next += 1
        return self._alive[self._next % len(self._alive)]


class TwoChoices(Router):
    """(Mitzenmacher 2001)"""

    label = "two choices"

    def choose(self, documents: Sequence[int]) -> str:
        return self._shorter_of_two()


class PrefixAffinity(Router):
    """To where the longest same beginning went last, unless its queue is much longer than another (SGLang, Ray)."""

    label = "prefix affinity"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last: dict[tuple[int, ...], str] = {}

    def choose(self, documents: Sequence[int]) -> str:
        other = self._shorter_of_two()
        for length in range(len(documents), 0, -1):
            name = self._last.get(tuple(documents[:length]))
            if name in self.queues:
                return name if self.queues[name] <= self.queues[other] + _AFFINITY_SLACK else other
        return other

    def routed(self, documents: Sequence[int], name: str) -> None:
        for length in range(1, len(documents) + 1):
            self._last[tuple(documents[:length])] = name


class BoundedHashing(Router):
    """Consistent hashing of the first document with bounded loads (Mirrokni et al. 2018)."""

    label = "bounded hashing"

    def changed(self) -> None:
        points = sorted(point for name in self.queues for point in _points(name))
        self._points, self._owners = [point for point, _ in points], [name for _, name in points]

    def choose(self, documents: Sequence[int]) -> str:
        most = math.ceil(self._routing.bound * (sum(self.queues.values()) + 1) / len(self.queues))
        at = bisect_right(self._points, _hash64(self._names[documents[0]]))
        while self.queues[name := self._owners[at % len(self._owners)]] >= most:
            at += 1
        return name


class Residency(Router):
    """`pictool.routing.rank` by what is held and by queues."""

    label = "residency"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holders: dict[str, set[str]] = {}

    def choose(self, documents: Sequence[int]) -> str:
        return self._choose(documents, {})

    def _choose(self, documents: Sequence[int], served: Mapping[str, float]) -> str:
        keys = {self._names[number]: int(self._sizes[number]) for number in documents}
        return rank(keys, self._holders, self.queues, self._routing, served=served)[0]

    def routed(self, documents: Sequence[int], name: str) -> None:
        for number in documents:
            self._holders.setdefault(self._names[number], set()).add(name)

    def evicted(self, number: int, name: str) -> None:
        self._holders.get(self._names[number], set()).discard(name)


class EvenResidency(Residency):
    """Ours: `rank` with its bound on the late requests of a replica, too."""

    label = "residency, even"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._served = RecentRequests()

    def changed(self) -> None:
        self._served.keep(self.queues)

    def choose(self, documents: Sequence[int]) -> str:
        return self._choose(documents, self._served.counts)

    def routed(self, documents: Sequence[int], name: str) -> None:
        super().routed(documents, name)
        self._served.add(name)


ROUTERS: tuple[type[Router], ...] = (
    RoundRobin, TwoChoices, PrefixAffinity, BoundedHashing, Residency, EvenResidency,
)  # fmt: skip


@cache
def _points(name: str) -> list[tuple[int, str]]:
    """Of a replica, on the ring."""
    return [(_hash64(f"{name} {i}"), name) for i in range(_POINTS)]


def _hash64(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Outcome:
    """What a router made of the requests.

    Fields:
        moved_bytes: that came from the remote; wanted_bytes: of the requests; both after the warm-up, as TTFT.
        ttft_p50, ttft_p99: seconds. imbalance: the most requests of a replica over the mean, of those that were there
            all the time. retried: requests whose replica died. choose_s: seconds to choose, of a request (median).
    """

    router: str
    replicas: int
    moved_bytes: int
    wanted_bytes: int
    ttft_p50: float
    ttft_p99: float
    imbalance: float
    utilisation: float
    retried: int
    choose_s: float

    @property
    def hit_rate(self) -> float:
        """The share of bytes that were local."""
        return 1 - self.moved_bytes / self.wanted_bytes

    def report(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}


class Simulation:
    """One router over all requests."""

    def __init__(self, site: Site, requests: Requests, router: type[Router], routing: Routing, seed: int = 0) -> None:
        self._site, self._requests = site, requests
        self._router = router(site, requests.sizes, requests.names, routing, seed)
        self._replicas: dict[str, Replica] = {}
        self._first_token = np.zeros(len(requests.arrivals))
        self._ends: list[tuple[float, int, str]] = []
        self._events = sorted(_deaths(site, float(requests.arrivals[-1]), seed))
        self._draw = random.Random(seed + 1)
        self._next_report, self._next_name = site.report_s, 0
        self._first_counted = int(_WARM_UP * len(requests.arrivals))
        self._moved = self._wanted = self._retried = 0
        self._choose_s: list[float] = []

    def run(self) -> Outcome:
        for _ in range(self._site.replicas):
            self._join()
        self._router.changed()
        founders = list(self._replicas.values())
        for number, now in enumerate(self._requests.arrivals.tolist()):
            self._advance(now)
            self._route(number, now)
        served = [replica.served for replica in founders if replica.name in self._replicas]
        ttft = (self._first_token - self._requests.arrivals)[self._first_counted :]
        busy = sum(replica.busy_s for replica in self._replicas.values())
        return Outcome(
            self._router.label, self._site.replicas, self._moved, self._wanted,
            float(np.quantile(ttft, 0.5)), float(np.quantile(ttft, 0.99)), max(served) / (sum(served) / len(served)),
            busy / len(self._replicas) / float(self._requests.arrivals[-1]), self._retried,
            float(np.median(self._choose_s)),
        )  # fmt: skip

    def _advance(self, now: float) -> None:
        """What happens until `now`: requests end, replicas report, die and join."""
        while self._events and self._events[0][0] <= now:
            at, kind = self._events.pop(0)
            self._finish(at)
            if kind == "join":
                self._join()
                self._router.changed()
            elif len(self._replicas) > 1:
                self._die(at)
        self._finish(now)
        if now >= self._next_report:
            self._next_report = now + self._site.report_s
            for replica in self._replicas.values():
                for number in replica.evicted:
                    if number not in replica.held:
                        self._router.evicted(number, replica.name)
                replica.evicted.clear()

    def _finish(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, number, name = heapq.heappop(self._ends)
            if name in self._replicas and self._first_token[number] == at:
                self._router.queues[name] -= 1
                del self._replicas[name].running[number]

    def _route(self, number: int, now: float) -> None:
        documents = self._requests.documents[number].tolist()
        began = time.perf_counter()
        name = self._router.choose(documents)
        self._choose_s.append(time.perf_counter() - began)
        sizes = self._requests.sizes[documents].tolist()
        replica = self._replicas[name]
        end, moved = replica.serve(now, documents, sizes, float(self._requests.compute_s[number]))
        self._router.routed(documents, name)
        self._router.queues[name] += 1
        replica.running[number] = None
        self._first_token[number] = end
        heapq.heappush(self._ends, (end, number, name))
        if number >= self._first_counted:
            self._moved += moved
            self._wanted += sum(sizes)

    def _join(self) -> None:
        name = f"replica-{self._next_name}"
        self._next_name += 1
        self._replicas[name] = Replica(name, self._site)
        self._router.queues = {**self._router.queues, name: 0}

    def _die(self, now: float) -> None:
        """A replica dies with all that it holds; its requests go to others."""
        name = self._draw.choice(list(self._replicas))
        gone = self._replicas.pop(name)
        self._router.queues = {other: queue for other, queue in self._router.queues.items() if other != name}
        self._router.changed()
        for number in [*gone.held, *gone.evicted]:
            self._router.evicted(number, name)
        for number in gone.running:
            self._retried += 1
            self._route(number, now)


def _deaths(site: Site, duration: float, seed: int) -> Iterator[tuple[float, str]]:
    if not site.deaths_h:
        return
    draw, now = random.Random(seed), 0.0
    while (now := now + draw.expovariate(site.deaths_h / 3600)) < duration:
        yield now, "die"
        yield now + site.rejoin_s, "join"


def routing_for(site: Site, requests: Requests) -> Routing:
    """λ: the bytes that come from the remote in the time that a request takes whose objects are local."""
    sizes = requests.sizes[requests.documents[:1000]]
    local_s = [site.local.seconds(float(total), sizes.shape[1]) for total in sizes.sum(axis=1)]
    return Routing(float(np.maximum(local_s, requests.compute_s[:1000]).mean()) * site.remote.bytes_s)


def compare(
    site: Site, requests: Requests, routing: Routing, routers: Sequence[type[Router]] = ROUTERS,
    on_done: Callable[[], None] = lambda: None,
) -> list[Outcome]:  # fmt: skip
    """Every router over the same requests and deaths."""
    outcomes = []
    for router in routers:
        outcomes.append(Simulation(site, requests, router, routing).run())
        on_done()
    return outcomes


@dataclass(frozen=True)
class FleetSize:
    """The least replicas with which a router meets a target, and what they cost an hour; None: not with `most`."""

    router: str
    replicas: int | None
    dollars_h: float | None


@dataclass(frozen=True)
class Prices:
    """In US dollars: a replica an hour, and a GB at the remote a month."""

    replica_h: float = 2.5
    remote_gb_month: float = 0.023
    hours: float = field(default=730.0, repr=False)  # of a month

    def of(self, replicas: int, stored_bytes: float) -> float:
        """A fleet and its remote, an hour."""
        return replicas * self.replica_h + stored_bytes / 1e9 * self.remote_gb_month / self.hours


def size_fleet(
    site: Site, requests: Requests, routing: Routing, router: type[Router], target_s: float, prices: Prices, most: int
) -> FleetSize:
    """Search the least fleet whose p99 of TTFT is at most `target_s`: by doubling, then halving what is between."""
    tried: dict[int, bool] = {}

    def is_enough(replicas: int) -> bool:
        if replicas not in tried:
            outcome = Simulation(replace(site, replicas=replicas), requests, router, routing).run()
            tried[replicas] = outcome.ttft_p99 <= target_s
        return tried[replicas]

    high = 1
    while not is_enough(high):
        if high >= most:
            return FleetSize(router.label, None, None)
        high = min(2 * high, most)
    low = high // 2
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return FleetSize(router.label, high, prices.of(high, float(requests.sizes.sum())))


def report(outcomes: Sequence[Outcome], fleets: Sequence[FleetSize]) -> Mapping[str, Any]:
    """What `--json` has."""
    return {"routers": [outcome.report() for outcome in outcomes], "fleets": [asdict(fleet) for fleet in fleets]}
