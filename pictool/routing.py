"""Which replica a request goes to: `rank`, a pure function of its objects, where these are, and how long queues are.

Object keys are what it goes by, not block hashes: linked blocks have a salt that nobody outside of an engine knows.
`Residency` has what a router knows of its replicas, on Ray or by HTTP.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

QUEUE_BYTES = 1e8  # what is fetched in 0.1 s at 1 GB/s
BOUND = 1.25  # c of Mirrokni et al.: less spreads sooner, more keeps homes longer
LEAD = 16.0  # requests: so few are no imbalance
WINDOW = 256  # requests of a replica, by which it is judged whether it gets more than others
_REMEMBERED = 100_000  # objects that were sent to a replica
_CACHED_FLEETS = 16


@dataclass(frozen=True)
class Routing:
    """What `rank` weighs.

    Fields:
        queue_bytes: λ, the bytes that are fetched in the time that a queued request takes; 0: queues do not count.
        bound: a replica whose queue is `bound` times the mean (with this request, rounded up) takes no cold object; one
            that got `bound` times the mean of the late requests, and `lead` more, takes none that another can take.
    """

    queue_bytes: float = QUEUE_BYTES
    bound: float = BOUND
    lead: float = LEAD

    def __post_init__(self) -> None:
        assert 0 <= self.queue_bytes < math.inf and 1 <= self.bound < math.inf and self.lead >= 0


class RecentRequests:
    """Requests that were routed to each replica lately: the last `window` for each, about.

    Counts are halved together, so that shares stay. One that joins has what is fair, lest it gets all at once.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.counts: dict[str, float] = {}
        self._window, self._total = window, 0.0

    def keep(self, names: Collection[str]) -> None:
        """These are the replicas now."""
        fair = self._total / len(self.counts) if self.counts else 0.0
        self.counts = {name: self.counts.get(name, fair) for name in names}
        self._total = sum(self.counts.values())

    def add(self, name: str) -> None:
        """A request was routed."""
        self.counts[name] = self.counts.get(name, 0.0) + 1
        self._total += 1
        if self._total > 2 * self._window * len(self.counts):
            self.counts = {other: count / 2 for other, count in self.counts.items()}
            self._total /= 2


class Residency:
    """What a router knows of its replicas: which objects each holds, and its share of the late requests.

    Args:
        sent_s: for how long an object that was sent to a replica counts as held, whatever the replica reports.
        clock: seconds, ascending.
    """

    def __init__(
        self, routing: Routing = Routing(), sent_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._routing, self._sent_s, self._clock, self._recent = routing, sent_s, clock, RecentRequests()
        self._reported: dict[str, Collection[str]] = {}
        self._sent_at: dict[str, dict[str, float]] = {}  # by replica and key, the last sent at the end

    def keep(self, names: Collection[str]) -> None:
        """These are the replicas now."""
        self._reported = {name: self._reported.get(name, ()) for name in names}
        self._sent_at = {name: self._sent_at.get(name, {}) for name in names}
        self._recent.keep(names)

    def take_report(self, name: str, keys: Collection[str]) -> None:
        """A replica reports which objects it holds."""
        self._reported[name] = keys

    def was_sent(self, keys: Iterable[str], name: str) -> None:
        """A replica has taken a request, so it will hold its objects."""
        self._recent.add(name)
        now, sent = self._clock(), self._sent_at[name]
        for key in keys:
            sent.pop(key, None)
            sent[key] = now
        while sent and (len(sent) > _REMEMBERED or now - sent[next(iter(sent))] > self._sent_s):
            del sent[next(iter(sent))]

    def forget(self, name: str) -> None:
        """A replica may have lost what it held."""
        self._sent_at[name] = {}

    def order(self, keys: Mapping[str, int], queues: Mapping[str, float]) -> list[str]:
        """The replicas of `queues`, the best first, for a request with the objects of these keys, and their bytes."""
        oldest = self._clock() - self._sent_s
        holders = {
            key: [
                name for name in queues
                if key in self._reported[name] or self._sent_at[name].get(key, -math.inf) > oldest
            ]
            for key in keys
        }  # fmt: skip
        return rank(keys, holders, queues, self._routing, served=self._recent.counts)


def rank(
    keys: Mapping[str, int], residency: Mapping[str, Collection[str]], queues: Mapping[str, float],
    routing: Routing = Routing(), *, served: Mapping[str, float] = {},
) -> list[str]:  # fmt: skip
    """The replicas, the best for a request first. The same arguments give the same order, in every process.

    The score of a replica is the bytes of the request's objects that it holds, less `queue_bytes` for each request in
    its queue. A cold object, which no replica holds, counts as held by its home: in the order of rendezvous hashing
    (Thaler and Ravishankar 1998) the first replica whose queue is within a bound of the mean (Mirrokni et al. 2018). So
    a cold object is fetched by one replica, even if several processes route; a hot one spreads, once waiting for its
    holder costs more than fetching it again; and if a replica joins or leaves, only its own share of homes moves. Equal
    scores are ordered by the hash of the first key.

    Args:
        keys: bytes of the request's objects by key, in the order of the prompt.
        residency: the replicas that hold an object, by its key. Others than those of `queues` do not count.
        queues: requests that wait or run, by replica: all that can be chosen.
        served: requests that were routed to each lately.
    """
    if not queues:
        return []
    names = tuple(queues)
    places = {name: place for place, name in enumerate(names)}
    load = np.fromiter(queues.values(), np.float64, len(names))
    got = np.array([served.get(name, 0.0) for name in names])
    is_over = got >= routing.bound * got.mean() + routing.lead
    is_short = load < np.ceil(routing.bound * (load.sum() + 1) / len(names))
    is_free = is_short & ~is_over
    if not is_free.any():
        is_free = is_short
    held = np.zeros(len(names))
    for key, size in keys.items():
        holders = {places[name] for name in residency.get(key, ()) if name in places}
        held[list(holders) or np.where(is_free, _affinity(names, key), -1.0).argmax()] += size
    score = held - routing.queue_bytes * load
    order = np.lexsort((-_affinity(names, next(iter(keys), "")), -score, is_over))
    return [names[place] for place in order]


def _affinity(names: tuple[str, ...], key: str) -> NDArray[np.float64]:
    """Rendezvous hashing: how much each replica is the home of a key, from 0; float64 [replicas]."""
    return (_mix(_seeds(names) ^ np.uint64(_hash(key))) >> np.uint64(11)).astype(np.float64)


@lru_cache(maxsize=_CACHED_FLEETS)
def _seeds(names: tuple[str, ...]) -> NDArray[np.uint64]:
    return np.array([_hash(name) for name in names], dtype=np.uint64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014); arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
