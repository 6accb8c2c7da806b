"""A request router of Ray Serve whose order can be changed while it runs, and which counts (`serve_fleet`)."""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.fleet import state
from pictool.cluster.serving import ResidencyRouter


class CountingRouter(ResidencyRouter):
    """By residency, as `pic serve --ray` has it; in turn; or the shorter of two queues, as Ray Serve has it."""

    _turn = 0

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        began = time.perf_counter()
        ranked: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        state.choose_s.append(time.perf_counter() - began)
        if state.order == "round robin":
            self._turn += 1
            ranked.sort(key=lambda replicas: str(replicas[0].replica_id.unique_id))
            ranked = ranked[self._turn % len(ranked) :] + ranked[: self._turn % len(ranked)]
        elif state.order == "two choices":
            two = random.sample(ranked, min(2, len(ranked)))
            ranked = sorted(two, key=lambda replicas: self.replica_queue_len_cache.get(replicas[0].replica_id) or 0)
        return ranked

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        state.calls[replica_id.unique_id] += 1
