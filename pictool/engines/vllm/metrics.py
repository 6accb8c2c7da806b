"""Counters of linked requests in vLLM's log and on its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_COUNTERS = {  # by the fields of scheduler.Counts: name and description
    "linked": ("vllm:pic_linked_requests", "Requests that were linked."),
    "failed": (
        "vllm:pic_failed_requests",
        "Requests to link that were computed exactly instead: an object missing, damaged or foreign, or a bad field.",
    ),
    "reused_tokens": ("vllm:pic_reused_tokens", "Tokens whose KV came from objects."),
    "recomputed_tokens": (
        "vllm:pic_recomputed_tokens",
        "Tokens of linked contexts that were computed, mean of layers.",
    ),
}


class PicStats(KVConnectorStats):
    """Counts since the last reading."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = {**self.data, **other.data}
        return PicStats({name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return {f"pic {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PicPromMetrics(KVConnectorPromMetrics):
    """The counters of `_COUNTERS`, for each engine."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for field, (name, text) in _COUNTERS.items():
            counter = metric_types[Counter](name=name, documentation=text, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[field, engine] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for field, count in transfer_stats_data.items():
            self._counters[field, engine_idx].inc(count)
