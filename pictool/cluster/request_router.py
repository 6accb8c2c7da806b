"""Ray Serve's request router by residency. Ray imports it where a handle is; nothing else does."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pictool.cluster.residency import Residency
from pictool.routing import Routing


class ResidencyRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that `pictool.routing.rank` has first, or to the next one if that is full."""

    def initialize_state(self, **fields: float) -> None:
        """The fields of `Routing`, as `request_router_kwargs` has them."""
        self._residency = Residency(Routing(**fields))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._residency.keep([replica.replica_id.unique_id for replica in replicas])
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates in order, each by itself: Ray takes the first that has room."""
        return [[replica] for replica in self.in_order(candidate_replicas, pending_request)]

    def in_order(
        self, candidates: list[RunningReplica], pending_request: PendingRequest | None
    ) -> list[RunningReplica]:
        by_name, queues = dict[str, RunningReplica](), dict[str, float]()
        for replica in candidates:
            name = replica.replica_id.unique_id
            by_name[name], queues[name] = replica, self.replica_queue_len_cache.get(replica.replica_id) or 0
            self._residency.take_report(name, replica.routing_stats)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
        return [by_name[name] for name in self._residency.order(_keys_of(pending_request), queues)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._residency.count(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._residency.was_sent(_keys_of(pending_request), replica_id.unique_id)


def _keys_of(pending_request: PendingRequest | None) -> tuple[str, ...]:
    return () if pending_request is None else pending_request.kwargs.get("keys", ())
