"""A replica with the torch engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from pictool.cluster.loading import load_same_model
from pictool.cluster.replica import MountedBackend, ReplicaSpec
from pictool.serve.check import check_linking
from pictool.serve.start import start_backend


@dataclass(frozen=True)
class TorchSpec(ReplicaSpec):
    """Replicas with the torch engine."""

    async def start(self, name: str) -> MountedBackend:
        model, store = load_same_model(self), self.open_tier(name)
        backend = start_backend(model, store, self.settings, None)

        async def measure() -> float:
            return await asyncio.to_thread(check_linking, model, self.settings.policy, tuned=Path(self.root))

        return MountedBackend(backend, store, measure)
