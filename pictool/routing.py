"""Which replica a request goes to: `rank`, a pure function of its objects, where these are, and how long queues are.

Object keys are what it goes by, not block hashes: linked blocks have a salt that nobody outside of an engine knows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
    Hashes = NDArray[np.uint64]

QUEUE_BYTES = 1e8  # what is fetched in 0.1 s at 1 GB/s
BOUND = 1.25  # c of Mirrokni et al.: less spreads sooner, more keeps homes longer
LEAD = 16.0  # requests: so few are no imbalance
WINDOW = 256  # requests of a replica, by which it is judged whether it gets more than others
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


def rank(
    keys: Mapping[str, int], residency: Mapping[str, Collection[str]], queues: Mapping[str, float],
    routing: Routing = Routing(), *, is_chain: bool = False, weights: Mapping[str, float] | None = None,
    served: Mapping[str, float] | None = None,
) -> list[str]:  # fmt: skip
    """The replicas, the best for a request first. The same arguments give the same order, in every process.

    The score of a replica is the bytes of the request's objects that it holds, less `queue_bytes` for each request in
    its queue. Of a chain (an exact request) only the longest resident prefix counts, since nothing after a gap can be
    reused (SGLang, RadixAttention). A cold object, which no replica holds, counts as held by its home: in the order of
    weighted rendezvous hashing (Thaler and Ravishankar 1998; Schindelhauer and Schomaker 2005) the first replica whose
    queue is within a bound of the mean (Mirrokni et al. 2018). So a cold object is fetched by one replica, even if
    several processes route; a hot one spreads, once waiting for its holder costs more than fetching it again; and if a
    replica joins or leaves, only its own share of homes moves. Equal scores are ordered by the hash of the first key.

    Args:
        keys: bytes of the request's objects by key, in the order of the prompt.
        residency: the replicas that hold an object, by its key. Others than those of `queues` do not count.
        queues: requests that wait or run, by replica: all that can be chosen.
        is_chain: the keys are those of a prefix chain, from its beginning on.
        weights: what share of the load a replica is to have, relative to others; 1 without.
        served: requests that were routed to each lately; one that joined has what is fair.
    """
    import numpy as np

    fleet = _fleet(tuple(queues))
    if not fleet.names:
        return []
    load = np.fromiter(queues.values(), np.float64, len(queues))
    share = _shares(fleet, weights)
    holders = {key: fleet.places(residency.get(key, ())) for key in keys}
    is_over = _is_over(fleet, served, share, routing)
    is_free = _is_free(load, is_over, share, routing)
    held = _resident_bytes(fleet, keys, holders, is_chain)
    for key, size in _cold(keys, holders, is_chain):
        held[np.where(is_free, fleet.affinity(key, share), -1.0).argmax()] += size
    score = held - routing.queue_bytes * load / share
    order = np.lexsort((-fleet.affinity(next(iter(keys), ""), share), -score, is_over))
    return [fleet.names[place] for place in order]


def _is_over(fleet: _Fleet, served: Mapping[str, float] | None, share: Floats, routing: Routing) -> Flags:
    """Which replicas got more than their share of the late requests; bool [replicas]."""
    import numpy as np

    if served is None:
        return np.zeros(len(fleet.names), dtype=bool)
    got = np.array([served.get(name, 0.0) for name in fleet.names])
    return np.asarray(got >= routing.bound * got.sum() * share / share.sum() + routing.lead)


def _is_free(load: Floats, is_over: Flags, share: Floats, routing: Routing) -> Flags:
    """Which replicas take cold objects: those with a short queue, without those `is_over` if any is left; bool."""
    import numpy as np

    is_short = np.asarray(load < np.ceil(routing.bound * (load.sum() + 1) * share / share.sum()))
    is_free = is_short & ~is_over
    return is_free if is_free.any() else is_short


def _resident_bytes(fleet: _Fleet, keys: Mapping[str, int], holders: Mapping[str, list[int]], is_chain: bool) -> Floats:
    """Bytes that each replica holds, float64 [replicas]."""
    import numpy as np

    held = np.zeros(len(fleet.names))
    for places, size in _resident(keys, holders, is_chain):
        held[places] += size
    return held


def _resident(
    keys: Mapping[str, int], holders: Mapping[str, list[int]], is_chain: bool
) -> Iterable[tuple[list[int], int]]:
    """Places of replicas, and bytes that each of these holds."""
    if not is_chain:
        return ((holders[key], size) for key, size in keys.items())
    prefixes, whole = list[tuple[list[int], int]](), list[int]()
    for number, (key, size) in enumerate(keys.items()):
        whole = holders[key] if number == 0 else [place for place in whole if place in set(holders[key])]
        if not whole:
            break
        prefixes.append((whole, size))
    return prefixes


def _cold(keys: Mapping[str, int], holders: Mapping[str, list[int]], is_chain: bool) -> list[tuple[str, int]]:
    """Keys that nobody holds, and their bytes. A chain without its first object is cold as a whole, under that."""
    if not is_chain:
        return [(key, size) for key, size in keys.items() if not holders[key]]
    first = next(iter(keys), None)
    return [] if first is None or holders[first] else [(first, sum(keys.values()))]


class _Fleet:
    """Replicas by place, with what hashing needs of their names."""

    def __init__(self, names: tuple[str, ...]) -> None:
        import numpy as np

        self.names = names
        self._places = {name: place for place, name in enumerate(names)}
        self._seeds: Hashes = np.array([_hash(name) for name in names], dtype=np.uint64)

    def places(self, names: Iterable[str]) -> list[int]:
        """Where these are; what is no replica of this fleet is left out, and what is named twice counts once."""
        return list(dict.fromkeys(self._places[name] for name in names if name in self._places))

    def affinity(self, key: str, share: Floats) -> Floats:
        """Weighted rendezvous: how much each replica is the home of a key, above 0; float64 [replicas]."""
        import numpy as np

        mixed = _mix(self._seeds ^ np.uint64(_hash(key)))
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
        return -share / np.log(uniform)


@lru_cache(maxsize=_CACHED_FLEETS)
def _fleet(names: tuple[str, ...]) -> _Fleet:
    return _Fleet(names)


def _shares(fleet: _Fleet, weights: Mapping[str, float] | None) -> Floats:
    """Weights with a mean of 1, float64 [replicas]."""
    import numpy as np

    if weights is None:
        return np.ones(len(fleet.names))
    share = np.array([weights.get(name, 1.0) for name in fleet.names])
    assert (share > 0).all()
    return np.asarray(share / share.mean())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _mix(values: Hashes) -> Hashes:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014); arithmetic is modulo 2^64."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
