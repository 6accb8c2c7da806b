"""What a running `pic serve` says of itself: its state by /health, its counters by /metrics, and what happened between.

Counters only grow, so what happened in a while is the difference of two readings. Quantiles are estimated from a
histogram's buckets as Prometheus does (histogram_quantile): even within a bucket.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pictool.errors import InputError
from pictool.reading import parse_json
from pictool.urls import open_url

_TIMEOUT_S = 5.0
_MAX_BYTES = 1 << 22
_REUSES = ("linked", "recomputed", "exact")
Buckets = tuple[tuple[float, float], ...]  # (upper bound, how many at or below it)


@dataclass(frozen=True)
class Reading:
    """One reading of a server. `counters` are by name and label values; `ttft` are the buckets of TTFT in seconds."""

    at: float
    health: Mapping[str, Any]
    counters: Mapping[tuple[str, ...], float]
    ttft: Buckets


@dataclass(frozen=True)
class Activity:
    """What happened between two readings.

    Fields:
        answered, refused: requests for answers with a status below 400, and with another.
        tokens: of prompts, by what became of them (linked, recomputed, exact); generated ones.
        sources: linked documents, by how they were found.
        ttft: p50 and p99 in seconds; None if there was no answer.
    """

    seconds: float
    answered: float
    refused: float
    tokens: Mapping[str, float]
    sources: Mapping[str, float]
    ttft: tuple[float, float] | None

    @property
    def rate(self) -> float:
        """Requests a second."""
        return (self.answered + self.refused) / self.seconds if self.seconds else 0.0

    def share(self, kind: str) -> float:
        """The share of the prompts' tokens that became this; 0 without prompts."""
        total = sum(self.tokens.get(name, 0.0) for name in _REUSES)
        return self.tokens.get(kind, 0.0) / total if total else 0.0


@dataclass(frozen=True)
class Address:
    """A server's URL, and the bearer key of its operator."""

    url: str
    key: str | None = None

    def read(self) -> Reading:
        """Read its state now.

        Raises:
            InputError: no server there, or one that does not say it.
        """
        from prometheus_client.parser import text_string_to_metric_families as families

        try:
            health = parse_json(self._get("/health"))
            samples = [sample for family in families(self._get("/metrics")) for sample in family.samples]
        except urllib.error.HTTPError as error:
            hint = "; PIC_SERVER_KEY must be the operator's" if error.code in (401, 403) else ""
            raise InputError(f"{self.url}: does not say how it is ({error.code} {error.reason}){hint}") from error
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or error.reason
            raise InputError(f"{self.url}: no server answers ({reason})") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise InputError(f"{self.url}: does not answer like pic serve ({error})") from error
        if not isinstance(health, dict):
            raise InputError(f"{self.url}: does not answer like pic serve (its /health is not an object)")
        counters = {
            (sample.name, *sample.labels.values()): sample.value
            for sample in samples
            if not sample.name.endswith("_bucket")
        }
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name == "pic_ttft_seconds_bucket"]
        return Reading(time.monotonic(), health, counters, tuple(sorted(buckets)))

    def _get(self, path: str) -> str:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url.rstrip("/") + path, headers=headers)
        with open_url(request, _TIMEOUT_S) as response:
            return response.read(_MAX_BYTES).decode()


def activity(before: Reading | None, now: Reading) -> Activity:
    """What happened since another reading, or (None) since the server started."""
    past = {} if before is None else before.counters
    grown = {name: value - past.get(name, 0.0) for name, value in now.counters.items()}
    if before is not None and any(grown[name] < 0 for name in grown if name[0].endswith("_total")):
        return activity(None, now)  # it was started anew in between
    requests = {name: n for name, n in grown.items() if name[0] == "pic_requests_total" and _is_for_answers(name[1])}
    answered = sum(n for name, n in requests.items() if name[2] < "400")
    tokens = {name[1]: n for name, n in grown.items() if name[0] == "pic_tokens_total"}
    sources = {name[1]: n for name, n in grown.items() if name[0] == "pic_linked_chunks_total" and n}
    seconds = now.at - before.at if before is not None else 0.0
    waits = _difference(now.ttft, () if before is None else before.ttft)
    ttft = (quantile(waits, 0.5), quantile(waits, 0.99)) if waits and waits[-1][1] else None
    return Activity(seconds, answered, sum(requests.values()) - answered, tokens, sources, ttft)


def _is_for_answers(route: str) -> bool:
    """Whether a route is one that clients ask; not those of this screen."""
    return route not in ("/health", "/metrics", "/version")


def _difference(now: Buckets, before: Buckets) -> Buckets:
    past = dict(before)
    return tuple((bound, count - past.get(bound, 0.0)) for bound, count in now)


def quantile(buckets: Buckets, share: float) -> float:
    """The value below which `share` of the observations are; of the last bucket, which has no end, its beginning."""
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == float("inf"):
                return low
            within = (rank - below) / (count - below) if count > below else 1.0
            return low + (bound - low) * within
        low, below = bound, count
    return low
