"""What a server counts, in Prometheus' form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pictool.errors import StoreError
from pictool.serve.work import BackendStatus, Reuse

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server: a collector of prometheus_client. `status` and `num_leases` are read by `collect`.

    No metric of this process has a series `_created`, whose type would be that of a gauge.
    """

    def __init__(self, status: Callable[[], BackendStatus], num_leases: Callable[[], int]) -> None:
        disable_created_metrics()
        self._registry, self._status, self._num_leases = CollectorRegistry(), status, num_leases
        kept: dict[str, Any] = {"registry": self._registry}
        times = kept | {"buckets": _SECONDS}
        self.requests = Counter("pic_requests", "Requests, by `route` and `status`.", ["route", "status"], **kept)
        self.ttft = Histogram("pic_ttft_seconds", "Seconds from a request to its first text.", **times)
        self.duration = Histogram("pic_request_seconds", "Seconds of requests that were answered.", **times)
        self._tokens = Counter(
            "pic_tokens", "Tokens, by `kind`: exact (some prefix), linked (some moved), recomputed and generated.",
            ["kind"], **kept,
        )  # fmt: skip
        self._parts = Counter(
            "pic_part_tokens", "Tokens of prompts, by `state` (linked, prefix, computed) and `reason`.",
            ["state", "reason"], **kept,
        )  # fmt: skip
        self._hits = Counter(
            "pic_linked_chunks", "Linked documents, by `source`: how they were found.", ["source"], **kept
        )
        self._registry.register(self)
        self._num_prompts = self._num_summed = self._prompt_tokens = self._reused_tokens = 0

    def count_prompt(self, reuse: Reuse) -> None:
        """Count what was done with a prompt."""
        self._num_prompts += 1
        self._prompt_tokens += reuse.num_tokens
        self._reused_tokens += reuse.linked + reuse.prefix
        for kind in ("exact", "linked", "recomputed", "prefix", "moved"):
            self._tokens.labels(kind).inc(getattr(reuse, kind))
        for part in reuse.parts:
            self._parts.labels(part.state, part.reason).inc(part.end - part.start)
        if reuse.chunks:
            self._hits.labels(reuse.source).inc(reuse.chunks)

    def count_generated(self, num_tokens: int) -> None:
        self._tokens.labels("generated").inc(num_tokens)

    def summary(self) -> str | None:
        """How much of all prompts was reused; None if there was none since the last summary."""
        if self._num_prompts == self._num_summed:
            return None
        self._num_summed = self._num_prompts
        share = f"{self._reused_tokens:,d} of {self._prompt_tokens:,d} prompt tokens reused"
        return f"{share} ({self._reused_tokens / self._prompt_tokens:.0%}) in {self._num_prompts:,d} requests"

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        text: bytes = generate_latest(self._registry)
        return text

    def describe(self) -> list[Metric]:
        """None: nothing is read before the first reading of all."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What a server has at the moment, and what its parts count themselves. Raises what `status` raises."""
        status, num_leases = self._status(), math.nan
        with suppress(StoreError):  # the others are shown all the same
            num_leases = self._num_leases()

        def of_pool(name: str) -> int:
            return int(getattr(status.pool, name, 0))

        gauges = {
            "pic_waiting_requests": ("Requests in the queue.", status.waiting),
            "pic_active_requests": ("Requests that run.", status.active),
            "pic_leases": ("Caches that have not expired.", num_leases),
            "pic_fell_back_to_exact": ("1 if the start-up check turned linking off.", status.problem is not None),
            "pic_pool_resident_bytes": ("Bytes of objects' KV on the device (--pool).", of_pool("resident_bytes")),
            "pic_pool_prefix_bytes": ("Bytes of earlier requests' KV on the device (--pool).", of_pool("prefix_bytes")),
        }
        counters = {
            "pic_learned_bytes": ("Bytes of objects compiled from texts of requests.", status.learned_bytes),
            "pic_learning_failures": ("Texts of requests that could not be compiled.", status.learning_failures),
            "pic_pool_evicted_bytes": ("Bytes of KV evicted from the device (--pool).", of_pool("evicted_bytes")),
            "pic_pool_moves": ("Runs of KV moved to their places on the device (--pool).", of_pool("moves")),
            "pic_pool_loaded_bytes": ("Bytes of objects' KV copied from the host (--pool).", of_pool("loaded_bytes")),
            "pic_pool_saved_bytes": ("Bytes of evicted KV copied to host memory (PIC_MEMORY).", of_pool("saved_bytes")),
            "pic_pool_restored_bytes": (
                "Bytes of KV copied back from host memory (PIC_MEMORY).",
                of_pool("restored_bytes"),
            ),
        }
        yield from (GaugeMetricFamily(name, what, value) for name, (what, value) in gauges.items())
        yield from (CounterMetricFamily(name, what, value) for name, (what, value) in counters.items())
        divergence = GaugeMetricFamily(
            "pic_divergence_nats",
            "KL(full, linked) in nats an answer of the start-up check, by `policy`.",
            labels=["policy"],
        )
        for policy, kl in status.divergence.items():
            divergence.add_metric([policy], kl)
        yield divergence
