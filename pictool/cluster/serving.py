"""Replicas on Ray Serve: it starts, watches, replaces and scales them; calls go through its handle and our router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pictool.cluster.fleet import Calls, ReplicaLost
from pictool.cluster.replica import Replica, ReplicaSpec
from pictool.errors import ModelError
from pictool.routing import Residency, Routing
from pictool.serve.errors import queue_full

ROUTER = "pictool.cluster.serving.ResidencyRouter"
REPORT_S, SENT_S = 2.0, 10.0  # between two reports of what a replica holds; for so long what was sent counts as held
_STARTS = 2  # of a replica that cannot load its model
_STOP_S = 5.0  # for calls that run, when a replica is to end


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each takes.

    Fields:
        least, most: replicas; Ray scales between them by load.
        cpus, gpus: that a replica reserves in Ray's accounts.
    """

    least: int
    most: int
    cpus: float
    gpus: float


class ResidencyRouter(RequestRouter):  # type: ignore[misc]
    """Sends a call to the replica that `pictool.routing.rank` has first, or to the next one if that is full."""

    def initialize_state(self, **fields: float) -> None:
        """The fields of `Routing`, as `request_router_kwargs` has them."""
        self._residency = Residency(Routing(**fields), SENT_S)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray has others, or new reports of the same."""
        self._residency.keep([replica.replica_id.unique_id for replica in replicas])
        for replica in replicas:
            self._residency.take_report(replica.replica_id.unique_id, replica.routing_stats.get("held", ()))
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates in order, each by itself: Ray takes the first that has room."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all are full
        return [[by_name[name]] for name in self._residency.order(_keys_of(pending_request), queues)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._residency.was_sent(_keys_of(pending_request), replica_id.unique_id)


def _keys_of(pending_request: PendingRequest | None) -> Mapping[str, int]:
    return {} if pending_request is None else pending_request.kwargs["keys"]


class _Engine(Replica):
    """A replica in a process of Ray's. One that follows another which died has its local tier."""

    def __init__(self, spec: ReplicaSpec) -> None:
        logging.getLogger("pictool").setLevel(logging.WARNING)
        super().__init__(spec, str(serve.get_replica_context().rank.rank))


@contextmanager
def deployed(
    spec: ReplicaSpec, scale: Scale, app: str, routing: Routing = Routing(), router_class: str = ROUTER
) -> Iterator[Calls]:
    """Have replicas until the end, on the cluster that Ray is connected to.

    Args:
        app: what Ray Serve calls it. router_class: that chooses replicas.

    Raises:
        ModelError: a replica cannot start.
    """
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    active, queue = spec.settings.max_active, spec.settings.max_waiting
    count: dict[str, Any] = {"num_replicas": scale.least}
    if scale.most > scale.least:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=active
            )
        }
    engines = serve.deployment(
        _Engine, name="engine", max_ongoing_requests=active + queue, max_queued_requests=queue,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=router_class, request_router_kwargs=asdict(routing),
            request_routing_stats_period_s=REPORT_S,
        ),
        graceful_shutdown_timeout_s=_STOP_S, health_check_period_s=2.0, max_constructor_retry_count=_STARTS, **count,
    )  # fmt: skip
    serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
    try:
        try:
            handle = serve.run(engines.bind(spec), name=app, route_prefix=None)
        except RuntimeError as error:
            raise ModelError(f"no replica can start: {_why(app) or ' '.join(str(error).split())[:300]}") from error
        yield calls_of(handle)
    finally:
        serve.delete(app)


def _why(app: str) -> str:
    """What Ray says of replicas that did not start, its last line."""
    status = serve.status().applications.get(app)
    found = () if status is None else status.deployments.values()
    lines = [line.strip() for part in found for line in part.message.splitlines() if line.strip()]
    last = str(([line for line in lines if "Error: " in line] or lines or [""])[-1])
    return (last.partition("Error: ")[2] or last)[:300]


def calls_of(handle: Any) -> Calls:
    """Calls of replicas through Ray's handle of their deployment."""

    async def call(method: str, *arguments: Any, keys: Mapping[str, int]) -> AsyncGenerator[Any, None]:
        response = handle.options(method_name="call", stream=True).remote(method, *arguments, keys=keys)
        try:
            async for event in response:
                yield event
        except BackPressureError as error:
            raise queue_full() from error
        except (RayError, RayServeException) as error:
            raise ReplicaLost(" ".join(str(error).split())[:200]) from error
        except (GeneratorExit, asyncio.CancelledError):  # nobody reads on
            response.cancel()
            raise

    return call
