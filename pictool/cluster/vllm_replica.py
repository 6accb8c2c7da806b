"""A replica with vLLM's engine: in processes of its own, which end with the replica's."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pictool.cluster.loading import load_same_model
from pictool.cluster.replica import TIERS, MountedBackend, ReplicaSpec
from pictool.engines.vllm.client.offline import VllmEngine
from pictool.engines.vllm.client.server import EngineOptions, start_engine
from pictool.errors import ModelError
from pictool.serve.backends.vllm.backend import VllmBackend
from pictool.serve.backends.vllm.options import PluginOptions


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
        model, settings = load_same_model(self), self.settings
        if model.directory is None:
            raise ModelError(f"{model.name}: vLLM loads models from directories; save it first")
        options = EngineOptions(
            str(model.directory), settings.name or model.name, model.dtype, self._fields(name), self.options
        )  # fmt: skip
        tier = self.open_tier(name)  # before vLLM makes it
        bounds = PluginOptions(queue=settings.max_waiting, active=settings.max_active, separator=settings.separator)
        backend = _ReplicaBackend(bounds, settings.num_tenants)
        backend.serving = await start_engine(options)
        try:
            if backend.serving.target != model.target:
                raise ModelError(f"{model.name}: vLLM has loaded another model, or computes in another dtype")
            await backend.start(backend.serving, recognises=False)
        except BaseException:
            backend.close()
            raise

        async def measure() -> float:
            return await asyncio.to_thread(backend.measure, settings.policy, Path(self.root))

        return MountedBackend(backend, tier, measure)

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


class _ReplicaBackend(VllmBackend):
    """The backend of a replica, whose engine is its own."""

    def close(self) -> None:
        super().close()
        self.serving.close()
