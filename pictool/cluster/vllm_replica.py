"""A replica with vLLM's engine: in processes of its own, which end with the replica's."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.cluster.loading import load_same_model
from pictool.cluster.replica import TIERS, MountedBackend, ReplicaSpec
from pictool.engines.vllm.client.offline import VllmEngine
from pictool.engines.vllm.client.process import EngineOptions, vllm_server
from pictool.errors import ModelError
from pictool.serve.backends.upstream.backend import UpstreamBackend

_CPU_KV_GIB = 4  # of a replica on CPUs, where nobody says it: vLLM would take most of the machine's memory


@dataclass(frozen=True)
class VllmSpec(ReplicaSpec):
    """Replicas with vLLM.

    Fields:
        options: of `vllm serve`, as on its command line. parallel: devices of each (`--tensor-parallel-size`).
    """

    options: tuple[str, ...] = ()
    parallel: int = 1

    async def start(self, name: str) -> MountedBackend:
        VllmEngine.require_installed()
        self._set_environment()
        model, settings, key = load_same_model(self), self.settings, secrets.token_hex(32)
        if model.directory is None:
            raise ModelError(f"{model.name}: vLLM loads models from directories; save it first")
        options = EngineOptions(
            str(model.directory), settings.name or model.name, model.dtype,
            self._fields(name) | {"fingerprint": model.fingerprint}, self.options,
        )  # fmt: skip
        tier = self.open_tier(name)  # before vLLM makes it
        with ExitStack() as resources:
            own = resources.enter_context(vllm_server(options, key))  # in this thread, whose end vLLM's process notices
            backend = _ReplicaBackend(model, tier, settings, [own.url], key, own.lives)
            resources.callback(backend.end)
            await backend.start(None)
            backend.resources = resources.pop_all()
        return MountedBackend(backend, tier, backend.measure)

    def _fields(self, name: str) -> dict[str, Any]:
        """Of `kv_connector_extra_config`: the connector's store is the replica's local tier."""
        policy, allowed = self.settings.policy, self.settings.allowed
        return {
            "store": str(Path(self.root) / TIERS / name), "max_bytes": self.max_bytes, "remote": self.remote.url,
            "memory_bytes": self.memory_bytes, "policy": {"algo": policy.name, **policy.params},
            "policies": None if allowed is None else sorted(allowed),
            **({} if self.trust is None else self.trust.fields),
        }  # fmt: skip

    def _set_environment(self) -> None:
        """Of vLLM's processes: their share of the machine's CPUs, which other replicas are on, too."""
        os.environ["OMP_NUM_THREADS"] = str(max(1, self.threads // self.parallel))  # Ray has set it by its accounts
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_CPU_KV_GIB))


class _ReplicaBackend(UpstreamBackend):
    """The backend of a replica, whose server is its own."""

    resources: ExitStack

    async def lives(self) -> bool:
        """Whether its server answers; one whose engine died still runs for a moment."""
        return await super().lives() and await self.is_ready()

    def end(self) -> None:
        """End its threads."""
        super().close()

    def close(self) -> None:
        self.resources.close()
