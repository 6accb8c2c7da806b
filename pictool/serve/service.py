"""What all routes share: the backend, tenants, leases, files, metrics; and how a request meets them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request

from pictool.errors import InputError, NoRoomError, StoreError
from pictool.runtime.chat.schemas import is_tried, require_schema
from pictool.serve.admission import AdmissionControl
from pictool.serve.errors import ApiError, model_not_found, not_found
from pictool.serve.files import MAX_TOTAL_BYTES, Files, TextFile
from pictool.serve.kept import KeptResponses
from pictool.serve.metrics import Metrics
from pictool.serve.parts import splitter_of
from pictool.serve.prompts.learning import texts_of
from pictool.serve.prompts.requests import documents_of
from pictool.serve.prompts.retrieving import RetrievedDocument
from pictool.serve.records import RequestRecord
from pictool.serve.schema import DocumentQuery, Documents
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.work import (
    AnswerRequest,
    Backend,
    ChatPrompt,
    CompiledText,
    Event,
    Linking,
    RetrievedObject,
    Reuse,
    StartEvent,
    TemplateDocument,
)
from pictool.store.leases import Lease, LeasedObject, Leases, Share, leased_keys

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

T = TypeVar("T")
DEFAULT_TTL_S = 3600.0
_MAX_MARKS = 100_000  # objects of marked texts whose leases are known
_MAX_TRIALS = 64  # schemas that wait to be tried


@dataclass(frozen=True)
class ServiceSettings:
    """How a service works, whatever its backend is.

    Fields:
        default_ttl_s: of caches that name none. max_ttl_s: that they may name.
        max_body: bytes of a request at most.
        lease_bytes: of objects that the caches of one tenant hold at most; None: any. See `lease_share`.
        file_bytes: of uploaded texts of one tenant at most.
    """

    default_ttl_s: float = DEFAULT_TTL_S
    max_ttl_s: float = 30 * 86400.0
    max_body: int = 33 << 20
    lease_bytes: int | None = None
    file_bytes: int = MAX_TOTAL_BYTES


def lease_share(max_bytes: int | None, keys: Keys) -> int | None:
    """The bytes of a store's budget that the caches of each tenant may hold: equal parts of three quarters of it.

    So there is room for an object of that size, whatever other tenants lease.
    """
    num_tenants = len({tenant.id for tenant in keys.tenants})
    return None if max_bytes is None else 3 * max_bytes // (4 * num_tenants)


class Service:
    """One server.

    Raises:
        StoreError: the leases of the store cannot be read.
    """

    def __init__(
        self, backend: Backend, root: Path, keys: Keys, settings: ServiceSettings = ServiceSettings(),
        clock: Callable[[], float] = time.time,
        tracer_provider: TracerProvider | None = None,
    ) -> None:  # fmt: skip
        self.backend, self.keys, self.settings, self.clock = backend, keys, settings, clock
        self.leases = Leases(root, clock, Share(settings.lease_bytes))
        self.tracer_provider = tracer_provider
        self.responses = KeptResponses(clock)
        self._marks: OrderedDict[tuple[str, str], tuple[str, float]] = OrderedDict()  # tenant, key: lease, its end
        self.files = Files(root, settings.file_bytes)
        self._trials = AdmissionControl(_MAX_TRIALS, most=1)
        leased_keys(root)  # a damaged file, or no store, is an error at the start, not of every request
        self.metrics = Metrics(backend.status, self.leases.count)

    def tenant(self, request: Request) -> Tenant:
        """Whose a request is, by its bearer key (or x-api-key, x-goog-api-key, ?key=, as other clients send it).

        Raises:
            ApiError: 401.
        """
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else None
        key = sent or request.headers.get("x-api-key") or request.headers.get("x-goog-api-key")
        tenant = self.keys.find(key or request.query_params.get("key"))
        if tenant is None:
            raise ApiError(
                401, "missing or invalid API key; send Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return tenant

    def require_model(self, name: str) -> None:
        """Refuse another model's name. Raises ApiError 404."""
        backend = self.backend
        if not {name, name.removeprefix("models/")} & {backend.model, backend.own_name}:
            raise model_not_found(name, backend.model)

    async def require_followed(self, tenant: Tenant, schemas: Iterable[tuple[str, str]]) -> None:
        """Refuse schemas that are not followed here: those of fields, as JSON.

        New ones are tried one at a time, and tenants take turns: however many one has, another waits for two of them.

        Raises:
            ApiError: 400, with the field; 429.
        """
        for param, schema in schemas:
            try:
                if is_tried(schema):
                    require_schema(schema)
                    continue
                async with self._trials.place(tenant.name):
                    await asyncio.to_thread(require_schema, schema)
            except InputError as error:
                raise ApiError(400, f"{param}: {error}", param=param) from error

    async def documents(
        self, tenant: Tenant, documents: Documents | DocumentQuery, chat: ChatPrompt, linking: Linking, most: int | None
    ) -> tuple[ChatPrompt, tuple[RetrievedDocument, ...]]:
        """A chat with the documents that are named beside it, and those that were found by a query.

        `most` is how many tokens its answer has at most. Raises as `Backend.retrieve` does.
        """
        if not isinstance(documents, DocumentQuery):
            return replace(chat, documents=documents_of(documents)), ()
        texts = [*texts_of(chat), *(json.dumps(tool) for tool in chat.tools)]
        found = await self.backend.retrieve(documents, tenant, linking, texts, most or 1)
        objects = [RetrievedObject(document.key, document.num_tokens) for document in found]
        return replace(chat, documents=tuple(map(TemplateDocument, objects))), found

    async def events(self, work: AnswerRequest, started: float) -> AsyncGenerator[Event, None]:
        """The events of an answer, counted, with calls and reasoning apart from text, if they can be parsed.

        `started` is when the request came, by time.perf_counter.
        """
        record = RequestRecord(self.metrics, self.tracer_provider, self.backend.model, work, started)
        split = splitter_of(work, self.backend.response_template)
        try:
            async with aclosing(self.backend.answer(work)) as answer:
                async for event in answer:
                    record.add(event)
                    if isinstance(event, StartEvent):
                        event = await self._linked(work, event.reuse)
                    for part in [event] if split is None else await asyncio.to_thread(split, event):
                        yield part
        except BaseException as error:
            record.end(error)
            raise
        record.end()

    async def _linked(self, work: AnswerRequest, reuse: Reuse) -> StartEvent:
        """What a client learns of its prompt, whose marked texts are leased now, if the request says so."""
        if work.ttl_s is not None:
            await asyncio.to_thread(self._lease, work.tenant, reuse.marked, work.ttl_s)
        return StartEvent(replace(reuse, retrieved=work.retrieved))

    def _lease(self, tenant: Tenant, objects: Sequence[CompiledText], ttl_s: float) -> None:
        """Lease the objects of marked texts, or lease them for longer. One that cannot be leased may be evicted."""
        expires = self.clock() + ttl_s
        for entry in objects:
            name, until = self._marks.get((tenant.id, entry.key), ("", 0.0))
            if until >= expires - ttl_s / 10:
                continue
            with suppress(NoRoomError, StoreError):
                lease = self.leases.extend(name, tenant.id, expires) if name else None
                lease = lease or self.leases.add(
                    tenant.id, self.backend.model, [LeasedObject(entry.key, entry.num_tokens)], expires, name="marked"
                )  # fmt: skip
                self._marks[tenant.id, entry.key] = lease.id, expires
                if len(self._marks) > _MAX_MARKS:
                    self._marks.popitem(last=False)


@dataclass(frozen=True)
class ApiCall:
    """A call of a route: its request, whose it is, and when it came, by time.perf_counter."""

    service: Service
    request: Request
    tenant: Tenant
    started: float

    def find_cache(self, name: str, param: str) -> Lease:
        """A cache of the tenant, to be used, by its id in the field `param`. Raises ApiError 404."""
        lease = self.service.leases.use(name, self.tenant.id)
        if lease is None:
            raise not_found(f"cache {name[:80]!r}", param, "cache_not_found")
        return lease

    def find_file(self, name: str) -> str:
        """The text of a file of the tenant. Raises ApiError 404."""
        return self.require_file(name)[1]

    def require_file(self, name: str) -> tuple[TextFile, str]:
        """A file of the tenant, and its text. Raises ApiError 404."""
        found = self.service.files.find(self.tenant.id, name)
        if found is None:
            raise not_found(f"file {name[:80]!r}", "file_id", "file_not_found")
        return found

    async def unless_gone(self, answer: Awaitable[T]) -> T:
        """Await an answer, unless the client disconnects first.

        Raises:
            ApiError: 499, which nobody reads; and whatever the answer raises.
        """

        async def gone() -> None:
            while (await self.request.receive())["type"] != "http.disconnect":
                pass

        task, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499, "the client closed the request")
            return task.result()
        finally:
            for part in (task, leaving):
                part.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await part


async def service_of(request: Request) -> Service:
    """The service of the application that a request reached."""
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(service_of)]


async def _call(request: Request, service: ServiceOf) -> ApiCall:
    return ApiCall(service, request, service.tenant(request), time.perf_counter())


Call = Annotated[ApiCall, Depends(_call)]  # of a route that needs a key
