"""What a server counts, in Prometheus' form."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pictool.errors import StoreError
from pictool.serve.work import BackendStatus, Reuse

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server. `status` and `num_leases` are called when they are read.

    Args:
        registry: where they are kept; None: one of their own.
    """

    def __init__(
        self,
        status: Callable[[], BackendStatus],
        num_leases: Callable[[], int],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._registry = registry or CollectorRegistry()
        self._status = status
        kept: dict[str, Any] = {"registry": self._registry}
        times = kept | {"buckets": _SECONDS}
        self.requests = Counter("pic_requests", "Requests, by `route` and `status`.", ["route", "status"], **kept)
        self.ttft = Histogram("pic_ttft_seconds", "Seconds from a request to its first text.", **times)
        self.duration = Histogram(
            "pic_request_seconds", "Seconds of requests that were answered.", buckets=_SECONDS, **kept
        )
        self._tokens = Counter(
            "pic_tokens", "Tokens, by `kind`: of prompts exact, linked or recomputed; and generated.", ["kind"], **kept
        )
        self._hits = Counter(
            "pic_linked_chunks", "Linked documents, by `source`: how they were found.", ["source"], **kept
        )
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "pic_waiting_requests": ("Requests in the queue.", lambda: status().waiting),
            "pic_active_requests": ("Requests that run.", lambda: status().active),
            "pic_learned_bytes": ("Bytes of objects compiled from repeated texts.", lambda: status().learned_bytes),
            "pic_learning_failures": ("Repeated texts that could not be compiled.", lambda: status().learning_failures),
            "pic_leases": ("Caches that have not expired.", num_leases),
            "pic_fell_back_to_exact": (
                "1 if the start-up check turned linking off.", lambda: status().problem is not None
            ),
        }  # fmt: skip
        for name, (what, value) in (gauges | _pool_gauges(status)).items():
            Gauge(name, what, **kept).set_function(partial(_read, value))
        self._kl = Gauge(
            "pic_divergence_nats", "KL(full, linked) in nats of the start-up check, by `policy`.", ["policy"], **kept
        )

    def count_prompt(self, reuse: Reuse) -> None:
        """Count what was done with a prompt."""
        for kind in ("exact", "linked", "recomputed"):
            self._tokens.labels(kind).inc(getattr(reuse, kind))
        if reuse.chunks:
            self._hits.labels(reuse.source).inc(reuse.chunks)

    def count_generated(self, num_tokens: int) -> None:
        self._tokens.labels("generated").inc(num_tokens)

    def show_divergence(self) -> None:
        """Take the figure of the start-up check over."""
        for policy, kl in self._status().divergence.items():
            self._kl.labels(policy).set(kl)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        self.show_divergence()
        text: bytes = generate_latest(self._registry)
        return text


def _read(value: Callable[[], float]) -> float:
    """A value, if the store lets it be read: the others are shown all the same."""
    try:
        return float(value())
    except StoreError:
        return math.nan


def _pool_gauges(status: Callable[[], BackendStatus]) -> dict[str, tuple[str, Callable[[], float]]]:
    """Of a pool on the device; 0 without one."""

    def count(name: str) -> Callable[[], float]:
        return lambda: float(getattr(status().pool, name, 0))

    return {
        "pic_pool_resident_bytes": ("Bytes of objects' KV on the device (--pool).", count("resident_bytes")),
        "pic_pool_moves": ("Runs of KV moved to their places on the device (--pool).", count("moves")),
        "pic_pool_loaded_bytes": ("Bytes of objects' KV copied from the host (--pool).", count("loaded_bytes")),
    }
