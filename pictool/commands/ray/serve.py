"""`pic serve --ray`: a server whose engines are replicas on a Ray cluster."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.verbosity import note, waiting
from pictool.commands.ray.compile import model_spec, shared_remote
from pictool.commands.settings.options import CLUSTER, RayOption, option
from pictool.commands.settings.resources import open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError
from pictool.needs import require_extra

if TYPE_CHECKING:
    from pictool.cluster.fleet import FleetBackend
    from pictool.cluster.serving import Scale
    from pictool.runtime.model import Model
    from pictool.serve.backends.base import BackendSettings


@dataclass(frozen=True)
class FleetOptions:
    """Options of replicas."""

    ray: RayOption = None
    replicas: Annotated[
        Optional[str],
        option("--replicas", "N|MIN:MAX", "With --ray: number of replicas; MIN:MAX scales with load (1).", CLUSTER),
    ] = None
    replica_cpus: Annotated[
        Optional[int],
        option(
            "--replica-cpus",
            "N",
            "With --ray: threads per replica (an equal share of the cluster).",
            CLUSTER,
            min=1,
        ),
    ] = None

    def check(self, others: dict[str, object], settings: Settings) -> None:
        """Refuse options that exclude each other, and a machine without Ray.

        Args:
            others: options that replicas lack, by name; true if one is used.
        """
        from pictool.cluster.session import PACKAGES

        if self.ray is None:
            own = {"--replicas": self.replicas, "--replica-cpus": self.replica_cpus}
            if given := [name for name, value in own.items() if value is not None]:
                raise UsageError(f"{given[0]}: applies to replicas; add --ray")
            return
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"{given[0]}: cannot be used with --ray")
        if not settings.remote:
            raise UsageError("--ray: needs --remote URL, where replicas find objects")
        if self.ray.startswith("ray://"):
            raise UsageError(
                f"--ray {self.ray}: a server cannot run as a Ray client; start it on a machine in the cluster"
            )
        self.counts()
        require_extra("ray", "pic serve --ray", *PACKAGES)

    def counts(self) -> tuple[int, int]:
        """The least and the most replicas. Raises UsageError."""
        least, _, most = (self.replicas or "1").partition(":")
        try:
            found = int(least), int(most or least)
        except ValueError:
            found = 0, 0
        if not 1 <= found[0] <= found[1]:
            raise UsageError(f"--replicas {self.replicas}: must be a number or MIN:MAX, at least 1")
        return found


@contextmanager
def opened_fleet(
    fleet: FleetOptions, model: Model, backend_settings: BackendSettings, settings: Settings, limit: float | None,
    refuses: bool,
) -> Iterator[FleetBackend]:  # fmt: skip
    """Replicas that run until the end, as one backend; each checks itself as the server of one process does.

    Raises:
        InputError: there is no cluster. ModelError: a replica cannot start, or its check failed and `refuses`.
    """
    from pictool.cluster.session import connected
    from pictool.serve.errors import ApiError
    from pictool.store.remote.remote import Retry

    assert fleet.ray is not None
    remote = shared_remote(settings, Retry())
    with connected(fleet.ray), ExitStack() as resources:
        with waiting("starting replicas"):
            from pictool.cluster.fleet import FleetBackend
            from pictool.cluster.replica import ReplicaSpec
            from pictool.cluster.serving import deployed

            store = open_store(settings)
            store.ensure_store()
            spec = ReplicaSpec(
                model_spec(model, settings, threads_of(fleet)), remote, str(store.root.absolute()), backend_settings,
                limit, refuses, settings.max_size, settings.memory, store.trust,
            )  # fmt: skip
            calls = resources.enter_context(deployed(spec, make_scale(fleet, settings), app_of(store.root)))
            backend = FleetBackend(model, remote, backend_settings, calls)
            try:
                asyncio.run(backend.start())
            except ApiError as error:
                raise InputError(f"no replica answers: {error}; see its log in Ray's dashboard") from error
        if backend.problem is not None:
            note(f"{backend.problem}; requests without a policy are answered exactly")
        yield backend


def app_of(root: Path) -> str:
    """What Ray Serve calls the replicas of a store: a server that was killed finds its own again, and replaces them."""
    place = f"{socket.gethostname()} {root.absolute()}"
    return f"pictool-{hashlib.sha256(place.encode(errors='surrogatepass')).hexdigest()[:12]}"


def threads_of(fleet: FleetOptions) -> int:
    """CPUs of each replica; by default, its share of the cluster's."""
    from pictool.cluster.session import cluster_resources

    return fleet.replica_cpus or max(1, int(cluster_resources().get("CPU", 1.0)) // fleet.counts()[0])


def make_scale(fleet: FleetOptions, settings: Settings) -> Scale:
    """How many replicas there are, and what each takes of the cluster: a GPU if there are some, and half its CPUs."""
    from pictool.cluster.serving import Scale
    from pictool.cluster.session import cluster_resources

    (least, most), there = fleet.counts(), cluster_resources()
    gpus = 1.0 if settings.device != "cpu" and there.get("GPU", 0.0) > 0 else 0.0
    cpus = min(threads_of(fleet) / 2, 0.9 * there.get("CPU", 1.0) / least)
    return Scale(least, most, round(cpus, 3), gpus)
