"""Counters and histograms of linked requests in vLLM's log and on its Prometheus endpoint."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = {  # by the fields of scheduler.MetricCounts: name and description
    "linked": ("vllm:pic_linked_requests", "Requests that were linked."),
    "failed": (
        "vllm:pic_failed_requests",
        "Requests to link that were computed exactly instead: an object missing, damaged or foreign, or a bad field.",
    ),
    "reused_tokens": ("vllm:pic_reused_tokens", "Tokens whose KV came from objects, mean of layers."),
    "shared_tokens": (
        "vllm:pic_shared_tokens",
        "Tokens of linked contexts whose blocks vLLM's prefix cache had of an equal link.",
    ),
    "recomputed_tokens": (
        "vllm:pic_recomputed_tokens",
        "Tokens of linked contexts that were computed, mean of layers.",
    ),
}
_HISTOGRAMS = {
    "load_s": ("vllm:pic_load_seconds", "Seconds from the start of a link's loading to its end."),
    "recompute_s": ("vllm:pic_recompute_seconds", "Seconds in which the rows of a link were computed."),
}
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # seconds


class PicStats(KVConnectorStats):
    """Counts since the last reading."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        added = {name: self.data[name] + other.data[name] for name in self.data.keys() & other.data.keys()}
        return PicStats({**self.data, **other.data, **added})

    def reduce(self) -> dict[str, int | float]:
        return {
            f"pic {name}": (fmean(value) if value else 0.0) if name in _HISTOGRAMS else value
            for name, value in self.data.items()
        }

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PicPromMetrics(KVConnectorPromMetrics):
    """The counters of `_COUNTERS` and the histograms of `_HISTOGRAMS`, for each engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[tuple[str, int], Any] = {}
        for field, (name, text) in (_COUNTERS | _HISTOGRAMS).items():
            options = {"name": name, "documentation": text, "labelnames": labelnames}
            if field in _HISTOGRAMS:
                metric = metric_types[Histogram](**options, buckets=_BUCKETS)
            else:
                metric = metric_types[Counter](**options)
            for engine, values in per_engine_labelvalues.items():
                self._metrics[field, engine] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for field, value in transfer_stats_data.items():
            if field in _HISTOGRAMS:
                for seconds in value:
                    self._metrics[field, engine_idx].observe(seconds)
            else:
                self._metrics[field, engine_idx].inc(value)
