"""A replica of a server: a backend over a local tier of its own; all objects are at the shared remote.

Knows nothing of Ray: it is called with the router's work, and answers with events. An error comes back as the last of
them, since raised it would lose what it is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import Any

from pictool.cluster.loading import ModelSpec
from pictool.errors import PicError
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError
from pictool.serve.start import start_backend
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import push
from pictool.store.signatures import Trust
from pictool.store.store import Store

_log = logging.getLogger("pictool.cluster")
TIERS = "replicas"  # the directory of local tiers in a store
MOST_HELD = 8192  # objects that a replica reports: the last used
KEY_DIGITS = 16  # of a key in a report: enough to tell objects apart


@dataclass(frozen=True)
class ReplicaSpec:
    """How replicas work: the same for all.

    Fields:
        root: the store's directory on a replica's machine; local tiers are within.
        limit, refuses: of the start-up check (`start_backend`).
        max_bytes: of a local tier; None: no limit. memory_bytes: of host memory that keep layers.
    """

    model: ModelSpec
    remote: Remote
    root: str
    settings: BackendSettings
    limit: float | None = None
    refuses: bool = False
    max_bytes: int | None = None
    memory_bytes: int = 0
    trust: Trust | None = None

    def open_tier(self, name: str) -> Store:
        """A local tier, in the store that is made for its owner alone."""
        Store(self.root).ensure_store()
        return Store(
            Path(self.root) / TIERS / name, self.max_bytes, remote=self.remote, memory_bytes=self.memory_bytes,
            on_warning=_warn, trust=self.trust,
        )  # fmt: skip


class Replica:
    """One replica, whose model is loaded.

    Args:
        name: of its local tier, which a replica that follows it finds again.

    Raises:
        PicError: the model cannot be loaded, or is another one than the driver's; or the check failed and refuses.
    """

    def __init__(self, spec: ReplicaSpec, name: str) -> None:
        model, self._store = spec.model.load(), spec.open_tier(name)
        self._backend = start_backend(model, self._store, spec.settings, spec.limit, spec.refuses, _warn)
        self._report: dict[str, Any] = {}
        self._stamp: tuple[int, ...] | None = None

    async def call(self, method: str, *arguments: Any, keys: object = None) -> AsyncGenerator[Any, None]:
        """What a method of the backend returns, or each of its events. An `ApiError` is the last one.

        Args:
            keys: of the objects in the request, by which it was routed.
        """
        try:
            result = getattr(self._backend, method)(*arguments)
            if isinstance(result, AsyncGenerator):
                async with aclosing(result):
                    async for event in result:
                        yield event
                return
            result = await result if isawaitable(result) else result
            if method == "compile":  # a cache's id is returned once all replicas find its objects
                await asyncio.to_thread(push, self._store, [part.key for part in result])
            yield result
        except Exception as error:
            refused = ApiError.of(error)
            if refused.status >= 500:
                _log.error("pic: a request failed: %s", error, exc_info=None if isinstance(error, PicError) else error)
            yield refused

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot answer: Ray replaces the replica."""
        if not await self._backend.lives():
            raise RuntimeError("its engine died")

    def record_routing_stats(self) -> dict[str, Any]:
        """The objects of the local tier that were used last, for the router. Counts of use are written, too."""
        self._store.counters.flush()
        stamp = self._store.stamp()
        if stamp != self._stamp:
            entries = sorted(self._store.files().values(), key=lambda entry: entry.used_ns, reverse=True)
            self._report = {"held": dict.fromkeys(entry.key[:KEY_DIGITS] for entry in entries[:MOST_HELD])}
            self._stamp = stamp
        return self._report

    def close(self) -> None:
        """End its threads."""
        self._backend.close()


def _warn(problem: str) -> None:
    _log.warning("pic: %s", problem)
