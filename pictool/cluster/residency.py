"""What a router knows of replicas: what each holds, and its share of the late requests. Knows nothing of Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from pictool.routing import RecentRequests, Routing, rank
from pictool.store.entries import is_key

MOST_HELD = 8192  # objects that a replica reports: the last used
_DIGITS = 16  # of a key in a report: enough to tell objects apart
SENT_S = 10.0  # for so long what was sent to a replica counts as held before it reports it


def report_of(objects: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """What a replica reports (`record_routing_stats`): its objects as keys and bytes."""
    return {"held": {key[:_DIGITS]: size for key, size in objects}}


class Residency:
    """The replicas by name, as one router sees them.

    Args:
        clock: seconds, ascending.
    """

    def __init__(self, routing: Routing = Routing(), clock: Callable[[], float] = time.monotonic) -> None:
        self._routing, self._clock = routing, clock
        self._held: dict[str, Mapping[str, int]] = {}
        self._sent: dict[str, dict[str, float]] = {}
        self._served = RecentRequests()
        self._mean_bytes = 0.0

    def keep(self, names: Collection[str]) -> None:
        """These are the replicas now."""
        self._held = {name: self._held.get(name, {}) for name in names}
        self._sent = {name: self._sent.get(name, {}) for name in names}
        self._served.keep(names)

    def take_report(self, name: str, report: Mapping[str, Any]) -> None:
        """A replica's last report, which may be one that was taken before."""
        held = report.get("held", {})
        if held is self._held.get(name):
            return
        self._held[name] = held
        sizes = [sum(part.values()) / len(part) for part in self._held.values() if part]
        self._mean_bytes = sum(sizes) / len(sizes) if sizes else 0.0

    def count(self, name: str) -> None:
        """A request goes to a replica."""
        self._served.add(name)

    def was_sent(self, keys: Iterable[str], name: str) -> None:
        """A replica has taken a request, so it will hold what that wants."""
        now, sent = self._clock(), self._sent.setdefault(name, {})
        for key in keys:
            sent.pop(short := key[:_DIGITS], None)
            sent[short] = now
        while sent and now - sent[oldest := next(iter(sent))] > SENT_S:
            del sent[oldest]

    def order(self, keys: Iterable[str], queues: Mapping[str, float]) -> list[str]:
        """The replicas, the best first, for a request that wants the objects of these keys.

        What is no key of an object (a word for a prompt without objects) has no bytes: it decides between equals.
        """
        oldest = self._clock() - SENT_S
        sizes, holders = dict[str, int](), dict[str, list[str]]()
        for key in keys:
            short, known = key[:_DIGITS], 0
            names = list[str]()
            for name in queues:
                size = self._held.get(name, {}).get(short)
                if size is not None or self._sent.get(name, {}).get(short, oldest) > oldest:
                    names.append(name)
                    known = max(known, size or 0)
            holders[key] = names
            sizes[key] = (known or round(self._mean_bytes) or 1) if is_key(key) else 0
        return rank(sizes, holders, queues, self._routing, served=self._served.counts)
