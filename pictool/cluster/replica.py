"""A replica of a server: a backend over a local tier of its own; all objects are at the shared remote.

Knows nothing of Ray, nor of the backend's engine: it is called with the router's work, and answers with events. What a
client did wrong comes back as a value (`ErrorReply`), since an exception would lose what it is on its way.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pictool.cluster.residency import MOST_HELD, report_of
from pictool.errors import PicError
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, Backend, ChatPrompt, CompiledText
from pictool.store.remote.remote import Remote
from pictool.store.remote.transfer import push
from pictool.store.signatures import Trust
from pictool.store.store import Store
from pictool.store.usage import read_counts

_log = logging.getLogger("pictool.cluster")
TIERS = "replicas"  # the directory of local tiers in a store


class ReplicaLost(Exception):
    """A replica died, or cannot be reached, or its engine died, while it had a call."""


@dataclass(frozen=True)
class MountedBackend:
    """A backend over the local tier of a replica.

    Fields:
        measure: KL(full ‖ linked) in nats of the start-up check (`serve.check`), under the backend's policy.
    """

    backend: Backend
    store: Store
    measure: Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class ReplicaSpec(ABC):
    """How replicas work: the same for all. Its classes are the engines.

    Fields:
        root: the store's directory on a replica's machine; local tiers are within.
        max_bytes: of a local tier; None: no limit. memory_bytes: of host memory that keep layers.
        model, device, dtype, salt, fingerprints, threads, version: as of `loading.ModelSpec`.
    """

    remote: Remote
    root: str
    settings: BackendSettings
    max_bytes: int | None = None
    memory_bytes: int = 0
    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    salt: str = field(default="", repr=False)
    fingerprints: tuple[str, str] | None = None
    threads: int = 1
    version: str = ""
    trust: Trust | None = None

    @abstractmethod
    async def start(self, name: str) -> MountedBackend:
        """Load the model, in the event loop of the replica. `name` is that of its local tier, which it finds again.

        Raises:
            PicError: the model cannot be loaded, or is another one than the driver's.
        """

    def open_tier(self, name: str) -> Store:
        """Its local tier, in the store that is made for its owner alone."""
        Store(self.root).ensure_store()
        return Store(
            Path(self.root) / TIERS / name, self.max_bytes, remote=self.remote, memory_bytes=self.memory_bytes,
            on_warning=lambda problem: _log.warning("pic: %s", problem), trust=self.trust,
        )  # fmt: skip


@dataclass(frozen=True)
class ErrorReply:
    """An `ApiError` as a value."""

    status: int
    message: str
    param: str | None
    code: str | None
    headers: Mapping[str, str]

    @classmethod
    def of(cls, error: Exception) -> ErrorReply:
        told = ApiError.of(error)
        if told.status >= 500:
            _log.error("pic: a request failed: %s", error, exc_info=None if isinstance(error, PicError) else error)
        return cls(told.status, told.message, told.param, told.code, told.headers)

    @property
    def error(self) -> ApiError:
        return ApiError(self.status, self.message, param=self.param, code=self.code, headers=self.headers)


class Replica:
    """One replica, whose model is loaded.

    All calls take `keys`, of the objects in the request, by which it was routed; and `exact`: whether the start-up
    check failed, so that requests without a policy are answered exactly. All raise ReplicaLost where the engine died.

    Args:
        on_lost: is called before ReplicaLost is raised.
    """

    def __init__(self, mounted: MountedBackend, on_lost: Callable[[], None] = lambda: None) -> None:
        self._backend, self._store, self._measure, self._on_lost = (
            mounted.backend,
            mounted.store,
            mounted.measure,
            on_lost,
        )
        self._report: dict[str, Any] = report_of(())
        self._stamp: tuple[int, ...] = ()

    async def check_health(self) -> None:
        """Raise ReplicaLost if the engine cannot answer."""
        if not await self._backend.lives():
            self._on_lost()
            raise ReplicaLost("its engine died")

    def _be(self, exact: bool) -> None:
        if exact:
            self._backend.policy = make_policy(BASELINE)

    async def positions(self, keys: object = ()) -> AsyncGenerator[int, None]:
        """The most tokens of a prompt with its answer."""
        yield self._backend.context_length

    async def check(self, keys: object = ()) -> AsyncGenerator[float | ErrorReply, None]:
        """KL(full ‖ linked) of the start-up check in nats (`serve.check`)."""
        try:
            yield await self._measure()
        except Exception as error:
            yield await self._refused(error)

    async def answer(self, work: AnswerRequest, exact: bool = False, keys: object = ()) -> AsyncGenerator[Any, None]:
        """The events of an answer (`Backend.answer`)."""
        self._be(exact)
        async with aclosing(self._told(self._backend.answer(work))) as events:
            async for event in events:
                yield event

    async def link(
        self, spec: Spec, tenant: Tenant, compares: bool, exact: bool = False, keys: object = ()
    ) -> AsyncGenerator[Any, None]:
        """The events of /v1/link (`Backend.link`)."""
        self._be(exact)
        async with aclosing(self._told(self._backend.link(spec, tenant, compares))) as events:
            async for event in events:
                yield event

    async def compile(
        self, text: str, tenant: Tenant, chunk_tokens: int | None, exact: bool = False, keys: object = ()
    ) -> AsyncGenerator[CompiledText | ErrorReply, None]:
        """Compile a text, as `Backend.compile`; each object is at the remote when it is sent here."""
        self._be(exact)
        try:
            for done in await self._backend.compile(text, tenant, chunk_tokens):
                await asyncio.to_thread(push, self._store, [done.key])
                yield done
        except Exception as error:
            yield await self._refused(error)

    async def count(
        self, prompt: ChatPrompt, tenant: Tenant, keys: object = ()
    ) -> AsyncGenerator[int | ErrorReply, None]:
        """The tokens of a prompt (`Backend.count`)."""
        try:
            yield await self._backend.count(prompt, tenant)
        except Exception as error:
            yield await self._refused(error)

    async def execute(
        self, query: str, tenant: Tenant, exact: bool = False, keys: object = ()
    ) -> AsyncGenerator[list[str] | ErrorReply, None]:
        """The texts of a span query's answer (`Backend.execute`)."""
        self._be(exact)
        try:
            yield await self._backend.execute(query, tenant)
        except Exception as error:
            yield await self._refused(error)

    def record_routing_stats(self) -> dict[str, Any]:
        """What the local tier holds, for the router: the objects that were used last."""
        stamp = self._store.stamp()
        if stamp != self._stamp:
            entries = sorted(self._store.files().values(), key=lambda entry: entry.used_ns, reverse=True)
            self._report = report_of((entry.key, entry.num_bytes) for entry in entries[:MOST_HELD])
            self._stamp = stamp
        return self._report

    def figures(self) -> dict[str, int]:
        """Figures of the local tier, for metrics; those of use are since it was made."""
        self._store.counters.flush()
        held, used = self._report["held"], read_counts(self._store.root)
        return {
            "objects": len(held), "bytes": sum(held.values()), "hits": used.hits, "misses": used.misses,
            "written_bytes": used.written_bytes,
        }  # fmt: skip

    def close(self) -> None:
        """End its threads."""
        self._backend.close()

    async def _told(self, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Events; what ends them is the last one."""
        try:
            async for event in events:
                yield event
        except Exception as error:
            yield await self._refused(error)
        finally:
            await events.aclose()

    async def _refused(self, error: Exception) -> ErrorReply:
        """An error as a value. Raises ReplicaLost if it is the engine's death."""
        await self.check_health()
        return ErrorReply.of(error)
