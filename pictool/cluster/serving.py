"""Replicas on Ray Serve: it starts, watches, replaces and scales them; calls go through its handle."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pictool.cluster.fleet import Calls
from pictool.cluster.replica import Replica, ReplicaLost, ReplicaSpec
from pictool.errors import ModelError
from pictool.routing import Routing
from pictool.serve.errors import queue_full

_log = logging.getLogger("pictool.cluster")
_DEPLOYMENT = "engine"
ROUTER = "pictool.cluster.request_router.ResidencyRouter"
_REPORT_S = 2.0  # between two reports of what a replica holds
_STARTS = 2  # of a replica that cannot load its model
_STOP_S = 5.0  # for calls that run, when a replica is to end
_GAUGES = {
    "objects": "Objects of the local tier that are reported to the router.",
    "bytes": "Their bytes.",
}
_COUNTERS = {
    "hits": "Objects that requests found in the local tier.",
    "misses": "Objects that were fetched or compiled for requests.",
    "written_bytes": "Bytes that were fetched or compiled.",
}


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each takes.

    Fields:
        least, most: replicas; Ray scales between them by load.
        cpus, gpus: that a replica reserves in Ray's accounts.
        ongoing: calls that a replica has at once; queued: that wait for one; load: calls of a replica that Ray scales
            for.
    """

    least: int
    most: int
    cpus: float
    gpus: float
    ongoing: int
    queued: int
    load: int


class _Engine(Replica):
    """A replica in a process of Ray's. One that follows another which died has its local tier.

    Where its engine dies it ends its process: Ray notices at once, and its calls go to another one.
    """

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        from ray import serve
        from ray.serve import metrics

        logging.getLogger("pictool").setLevel(logging.WARNING)
        mounted = await spec.start(str(serve.get_replica_context().rank.rank))
        super().__init__(mounted, on_lost=lambda: os._exit(1))
        self._gauges = {name: metrics.Gauge(f"pic_tier_{name}", description=what) for name, what in _GAUGES.items()}
        self._counters = {
            name: metrics.Counter(f"pic_tier_{name}_total", description=what) for name, what in _COUNTERS.items()
        }
        self._counted = self.figures()  # of a local tier that another replica had before, too

    def record_routing_stats(self) -> dict[str, Any]:
        """As `Replica`'s; what Ray's own metrics say of the local tier is renewed, too."""
        report = super().record_routing_stats()
        figures = self.figures()
        for name, gauge in self._gauges.items():
            gauge.set(figures[name])
        for name, counter in self._counters.items():
            if (more := figures[name] - self._counted[name]) > 0:
                counter.inc(more)
        self._counted = figures
        return report

    def __del__(self) -> None:
        if hasattr(self, "_backend"):  # it has started
            self.close()


@contextmanager
def deployed(
    spec: ReplicaSpec, scale: Scale, routing: Routing, app: str, router_class: str = ROUTER
) -> Iterator[Calls]:
    """Have replicas until the end, on the cluster that Ray is connected to.

    Args:
        app: what Ray Serve calls it. router_class: that chooses replicas.

    Raises:
        ModelError: a replica cannot start.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    router = RequestRouterConfig(
        request_router_class=router_class, request_router_kwargs=asdict(routing),
        request_routing_stats_period_s=_REPORT_S,
    )  # fmt: skip
    count: dict[str, Any] = {"num_replicas": scale.least}
    if scale.most > scale.least:
        autoscaling = AutoscalingConfig(
            min_replicas=scale.least, max_replicas=scale.most, target_ongoing_requests=scale.load
        )
        count = {"autoscaling_config": autoscaling}
    engines = serve.deployment(
        _Engine, name=_DEPLOYMENT, max_ongoing_requests=scale.ongoing, max_queued_requests=scale.queued,
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus}, request_router_config=router,
        graceful_shutdown_timeout_s=_STOP_S, health_check_period_s=2.0, max_constructor_retry_count=_STARTS, **count,
    )  # fmt: skip
    _be_quiet()
    serve.start(proxy_location="Disabled", logging_config={"enable_access_log": False, "log_level": "ERROR"})
    try:
        yield _calls(_run(engines.bind(spec), app))
    finally:
        serve.delete(app)


def _run(application: Any, app: str) -> Any:
    """The handle of an application once its replicas run. Raises ModelError."""
    from ray import serve

    try:
        return serve.run(application, name=app, route_prefix=None)
    except RuntimeError as error:
        why = _why(app) or " ".join(str(error).split())[:300]
        raise ModelError(f"no replica can start: {why}") from error


def _be_quiet() -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    logging.getLogger("ray").setLevel(logging.ERROR)


def _why(app: str) -> str:
    """What Ray says of replicas that did not start, its last line."""
    from ray import serve

    status = serve.status().applications.get(app)
    messages = [] if status is None else [part.message for part in status.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    last = str((named or lines or [""])[-1])
    return (last.partition("Error: ")[2] or last)[:300]


def _calls(handle: Any) -> Calls:
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    async def call(method: str, *arguments: Any, keys: tuple[str, ...], **named: Any) -> AsyncGenerator[Any, None]:
        response = handle.options(method_name=method, stream=True).remote(*arguments, keys=keys, **named)
        is_whole = False
        try:
            async for event in response:
                yield event
            is_whole = True
        except BackPressureError as error:
            raise queue_full() from error
        except RayTaskError as error:
            is_whole = True
            if isinstance(error.cause, ReplicaLost):
                raise ReplicaLost(str(error.cause)) from error
            raise  # of the replica's own code: nobody else would do better
        except (RayError, RayServeException) as error:
            is_whole = True
            raise ReplicaLost(" ".join(str(error).split())[:200]) from error
        finally:
            if not is_whole:
                response.cancel()

    return call
