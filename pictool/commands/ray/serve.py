"""`pic serve --ray`: a server whose engines are replicas on a Ray cluster."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Optional

from pictool import __version__
from pictool.commands.console.errors import UsageError, of_command_line
from pictool.commands.console.sizes import parse_size
from pictool.commands.console.verbosity import note, waiting
from pictool.commands.ray.compile import shared_model, shared_remote
from pictool.commands.settings.options import CLUSTER, RayOption, option
from pictool.commands.settings.resources import open_store
from pictool.commands.settings.settings import Settings
from pictool.errors import InputError

if TYPE_CHECKING:
    from pictool.cluster.fleet import FleetBackend
    from pictool.cluster.replica import ReplicaSpec
    from pictool.cluster.serving import Scale
    from pictool.routing import Routing
    from pictool.runtime.model import Model
    from pictool.serve.backends.base import BackendSettings
    from pictool.store.remote.remote import Remote


@dataclass(frozen=True)
class FleetOptions:
    """Options of replicas."""

    ray: RayOption = None
    replicas: Annotated[
        Optional[str],
        option("--replicas", "N|MIN:MAX", "With --ray: number of replicas; MIN:MAX scales them by load (1).", CLUSTER),
    ] = None
    replica_cpus: Annotated[
        Optional[int],
        option(
            "--replica-cpus",
            "N",
            "With --ray: threads of each replica (an equal share of the cluster).",
            CLUSTER,
            min=1,
        ),
    ] = None
    queue_bytes: Annotated[
        Optional[str],
        option(
            "--queue-bytes",
            "SIZE",
            "With --ray: bytes that a replica fetches in the time of one request (100M).",
            CLUSTER,
        ),
    ] = None

    def check(self, others: dict[str, object], settings: Settings) -> None:
        """Refuse options that exclude each other, and a machine without Ray.

        Args:
            others: options that replicas lack, by name; true if one is used.
        """
        from pictool.cluster.session import require_installed

        if self.ray is None:
            own = {
                "--replicas": self.replicas, "--replica-cpus": self.replica_cpus, "--queue-bytes": self.queue_bytes,
            }  # fmt: skip
            if given := [name for name, value in own.items() if value is not None]:
                raise UsageError(f"{given[0]}: applies to replicas; add --ray")
            return
        if given := [name for name, value in others.items() if value]:
            raise UsageError(f"{given[0]}: cannot be used with --ray")
        if not settings.remote:
            raise UsageError("--ray: needs --remote URL, where replicas find objects")
        if self.ray.startswith("ray://"):
            raise UsageError(
                f"--ray {self.ray}: a server cannot run as a Ray client; start it on a machine of the cluster"
            )
        self.counts()
        self.routing()
        require_installed("pic serve --ray")

    def counts(self) -> tuple[int, int]:
        """The least and the most replicas. Raises UsageError."""
        least, _, most = (self.replicas or "1").partition(":")
        try:
            found = int(least), int(most or least)
        except ValueError:
            found = 0, 0
        if not 1 <= found[0] <= found[1]:
            raise UsageError(f"--replicas {self.replicas}: must be a number, or MIN:MAX, from 1")
        return found

    def routing(self) -> Routing:
        """How requests are routed. Raises UsageError."""
        from pictool.routing import Routing

        if self.queue_bytes is None:
            return Routing()
        with of_command_line():
            return Routing(float(parse_size("--queue-bytes", self.queue_bytes)))


@dataclass(frozen=True)
class VllmOptions:
    """The options of `vllm serve` for each replica, as on its command line, and what the fleet has to know of them.

    Fields:
        parallel: devices of a replica. active: requests that it has in its batch at most; None: not said.
    """

    given: tuple[str, ...] = ()
    parallel: int = 1
    active: int | None = None


def vllm_options(given: Sequence[str]) -> VllmOptions:
    """Read options of `vllm serve`; a replica refuses those that vLLM does not know. Raises UsageError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--config")
    names = [part.partition("=") for part in given]
    try:
        found, _ = parser.parse_known_args(
            [name.replace("_", "-") + sign + value if name.startswith("--") else name + sign + value
             for name, sign, value in names]
        )  # fmt: skip
    except argparse.ArgumentError as error:
        raise UsageError(f"-- {error}") from error
    if found.config is not None:
        raise UsageError("-- --config: cannot be used with --ray; give its options here")
    if found.tensor_parallel_size < 1 or (found.max_num_seqs is not None and found.max_num_seqs < 1):
        raise UsageError("-- --tensor-parallel-size, --max-num-seqs: must be 1 or more")
    return VllmOptions(tuple(given), found.tensor_parallel_size, found.max_num_seqs)


@contextmanager
def opened_fleet(
    fleet: FleetOptions, model: Model, backend_settings: BackendSettings, settings: Settings, limit: float | None,
    refuses: bool, vllm: VllmOptions | None = None,
) -> Iterator[FleetBackend]:  # fmt: skip
    """Replicas that run until the end, as one backend; they were checked as the server of one process is.

    Args:
        vllm: of replicas with vLLM's engine; None: they have the torch engine.

    Raises:
        InputError: there is no cluster, or the check failed and `refuses`. ModelError: a replica cannot start.
    """
    from pictool.cluster.fleet import FleetBackend
    from pictool.cluster.serving import deployed
    from pictool.cluster.session import connected
    from pictool.store.remote.remote import Retry

    assert fleet.ray is not None
    remote = shared_remote(settings, Retry())
    with connected(fleet.ray):
        spec = make_spec(fleet, model, remote, backend_settings, settings, vllm)
        scale = make_scale(fleet, backend_settings, settings, 1 if vllm is None else vllm.parallel)
        with ExitStack() as resources:
            with waiting("starting replicas"):
                calls = resources.enter_context(deployed(spec, scale, fleet.routing(), app_of(spec)))
                backend = resources.enter_context(closing(FleetBackend(model, remote, backend_settings, calls)))
                learn_length(backend)
                check(backend, limit, refuses)
            yield backend


def app_of(spec: ReplicaSpec) -> str:
    """What Ray Serve calls the replicas of a store: a server that was killed finds its own again, and replaces them."""
    place = f"{socket.gethostname()} {spec.root}"
    return f"pictool-{hashlib.sha256(place.encode(errors='surrogatepass')).hexdigest()[:12]}"


def learn_length(backend: FleetBackend) -> None:
    """How long a prompt may be, as a replica says it. Raises InputError."""
    from pictool.serve.errors import ApiError

    try:
        asyncio.run(backend.read_length())
    except ApiError as error:
        raise InputError(f"no replica answers: {error}; see its log in Ray's dashboard") from error


def check(backend: FleetBackend, limit: float | None, refuses: bool) -> None:
    """The start-up check, on one replica: all have the same weights. Raises InputError."""
    from pictool.serve.errors import ApiError

    if limit is None or not backend.policy.needs.objects:
        return
    try:
        asyncio.run(backend.check(limit))
    except ApiError as error:
        raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
    if backend.problem is not None and refuses:
        raise InputError(f"{backend.problem}; try another --algo, or a larger --check-limit")
    if backend.problem is not None:
        note(f"{backend.problem}; requests that name no policy are answered exactly")


def make_spec(
    fleet: FleetOptions, model: Model, remote: Remote, backend_settings: BackendSettings, settings: Settings,
    vllm: VllmOptions | None,
) -> ReplicaSpec:  # fmt: skip
    """What all replicas have to know; paths are absolute, since they run elsewhere."""
    from pictool.cluster.torch_replica import TorchSpec
    from pictool.cluster.vllm_replica import VllmSpec

    store, target = open_store(settings), model.target
    store.ensure_store()
    shared = (
        remote, str(store.root.absolute()), backend_settings, settings.max_size, settings.memory,
        shared_model(settings), settings.device.partition(":")[0], settings.dtype, settings.salt,
        (target.model, target.tokenizer), threads_of(fleet), __version__, store.trust,
    )  # fmt: skip
    return TorchSpec(*shared) if vllm is None else VllmSpec(*shared, vllm.given, vllm.parallel)


def threads_of(fleet: FleetOptions) -> int:
    """CPUs of each replica; by default, its share of the cluster's."""
    from pictool.cluster.session import resources

    return fleet.replica_cpus or max(1, int(resources().cpus) // fleet.counts()[0])


def make_scale(fleet: FleetOptions, backend_settings: BackendSettings, settings: Settings, devices: int) -> Scale:
    """How many replicas there are, and what each takes of the cluster: its GPUs if there are some, and half its CPUs.

    Args:
        devices: of a replica.
    """
    from pictool.cluster.serving import Scale
    from pictool.cluster.session import resources

    (least, most), there = fleet.counts(), resources()
    gpus = float(devices) if settings.device != "cpu" and there.gpus > 0 else 0.0
    cpus = min(threads_of(fleet) / 2, 0.9 * there.cpus / least)
    active, queue = backend_settings.max_active, backend_settings.max_waiting
    return Scale(least, most, round(cpus, 3), gpus, ongoing=active + queue, queued=queue, load=active)
