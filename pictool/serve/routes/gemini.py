"""A façade in the form of Gemini's API: cachedContents, and generateContent with `cachedContent`."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pictool.core import AnswerFormat, Sampling
from pictool.errors import InputError
from pictool.serve.answers import AnswerCollector, StartedStream, collect, sse, usage_of
from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError, not_found
from pictool.serve.prompts.reading import leased_piece, linking_of, require_cache
from pictool.serve.routes.caches import compile_turns, expiry, require_lease
from pictool.serve.routes.openai import POLICY, EventStream
from pictool.serve.schema import MAX_N, MAX_PARTS, GenerationRequest, Stops
from pictool.serve.service import Service, unless_gone
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    ChatPrompt,
    DeltaEvent,
    FinishEvent,
    Piece,
    PlainText,
    StartEvent,
    Turn,
)
from pictool.store.leases import Lease

_PREFIX = "cachedContents/"
_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
_METHOD_ENDS = ("generatecontent", "counttokens")
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS"}


class GeminiModel(BaseModel):
    """The base of everything in a request that has fields. Unknown fields are refused, lest an answer ignore them."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        alias_generator=to_camel,
        populate_by_name=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Without fields that ask for nothing, whatever they are called: [], false, 0, null."""
        if not isinstance(value, dict):
            return value
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        return {name: held for name, held in value.items() if held or name in known}


class TextOf(GeminiModel):
    """A part; only texts are known."""

    text: str | None = None


class Content(GeminiModel):
    role: str | None = None
    parts: Annotated[list[TextOf], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)


class Config(GeminiModel):
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    candidate_count: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)
    stop_sequences: Stops | None = None
    response_mime_type: Literal["text/plain"] | None = None
    response_modalities: Annotated[list[Literal["TEXT"]], Field(fail_fast=True)] | None = None


class GenerateRequest(GeminiModel):
    contents: Annotated[list[Content], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    system_instruction: Content | None = None
    generation_config: Config | None = None
    cached_content: str | None = None
    safety_settings: Any = None
    labels: Any = None
    model: str | None = None  # google's clients may name it here, too


class CountTokensRequest(GenerateRequest):
    """The fields of a request for an answer, or all of one."""

    contents: Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)
    generate_content_request: GenerateRequest | None = None


class CachedContent(GeminiModel):
    model: str
    contents: Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)
    system_instruction: Content | None = None
    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?s$")] | None = None
    expire_time: datetime | None = Field(default=None, strict=False)
    display_name: str | None = Field(default=None, max_length=512)


class CachedChange(GeminiModel):
    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?s$")] | None = None
    expire_time: datetime | None = Field(default=None, strict=False)


def gemini_routes(service: Service) -> APIRouter:
    """The routes, for one service: below /v1beta, and below /v1 as newer clients call them."""
    both = APIRouter(tags=["gemini"])
    for prefix in ("/v1beta", "/v1"):
        both.include_router(_routes(service), prefix=prefix)
    _add_model_routes(both, service)
    return both


def _routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)

    @router.post("/models/{model}:generateContent")
    async def generate(
        request: Request, model: str, body: GenerateRequest, x_pic_policy: POLICY = None
    ) -> dict[str, Any]:
        started = time.perf_counter()
        work = await asyncio.to_thread(_work, service, service.tenant(request), model, body, x_pic_policy)
        collected = await unless_gone(request, collect(service.events(work, started)))
        return _response(service, collected)

    @router.post("/models/{model}:streamGenerateContent", response_model=None)
    async def stream(
        request: Request, model: str, body: GenerateRequest, x_pic_policy: POLICY = None,
        alt: Annotated[Literal["sse", "json"], Query()] = "json",
    ) -> Response:  # fmt: skip
        started = time.perf_counter()
        work = await asyncio.to_thread(_work, service, service.tenant(request), model, body, x_pic_policy)
        events = service.events(work, started)
        parts = _stream(service, StartedStream(await unless_gone(request, anext(events)), events))
        return EventStream(_as_events(parts)) if alt == "sse" else ArrayStream(_as_array(parts))

    @router.post("/models/{model}:countTokens")
    async def count(request: Request, model: str, body: CountTokensRequest) -> dict[str, Any]:
        tenant, asked = service.tenant(request), body.generate_content_request or body
        if not asked.contents:
            raise ApiError(400, "contents: is missing; there is nothing to count", param="contents")
        work = await asyncio.to_thread(_work, service, tenant, model, asked, None)
        assert isinstance(work.prompt, ChatPrompt)
        return {"totalTokens": await unless_gone(request, service.backend.count(work.prompt, tenant))}

    @router.post("/models/{model}:{method}", include_in_schema=False)
    async def other(method: str) -> None:
        known = ", ".join(_METHODS)
        raise ApiError(404, f"{method[:80]}: a model has no such method here; there are {known}")

    _add_cache_routes(router, service)
    return router


def _add_model_routes(router: APIRouter, service: Service) -> None:
    @router.get("/v1beta/models")
    async def models(request: Request) -> dict[str, Any]:
        service.tenant(request)
        return {"models": [gemini_model(service)]}

    @router.get("/v1beta/models/{model}")
    async def model(request: Request, model: str) -> dict[str, Any]:
        service.tenant(request)
        service.require_model(model)
        return gemini_model(service)


def _add_cache_routes(router: APIRouter, service: Service) -> None:
    @router.post("/cachedContents")
    async def create(request: Request, body: CachedContent) -> dict[str, Any]:
        tenant = service.tenant(request)
        service.require_model(body.model)
        expires = expiry(service, body.ttl, _seconds(body.expire_time))
        system = [] if body.system_instruction is None else [_turn(body.system_instruction, "system")]
        turns = system + [_turn(content) for content in body.contents]
        lease = compile_turns(service, tenant, turns, expires, body.display_name or "")
        return _cached(await unless_gone(request, lease))

    @router.get("/cachedContents")
    def listing(
        request: Request,
        size: Annotated[int, Query(ge=0, le=1000, alias="pageSize")] = 100,
        token: Annotated[str, Query(alias="pageToken")] = "",
    ) -> dict[str, Any]:
        size = size or 100
        leases = service.leases.page(service.tenant(request).id, size + 1, token)
        more = {"nextPageToken": leases[size - 1].id} if len(leases) > size else {}
        return {"cachedContents": [_cached(lease) for lease in leases[:size]]} | more

    @router.get("/cachedContents/{name}")
    def show(request: Request, name: str) -> dict[str, Any]:
        return _cached(require_lease(service.leases.find(name, service.tenant(request).id), name))

    @router.patch("/cachedContents/{name}")
    def change(request: Request, name: str, body: CachedChange) -> dict[str, Any]:
        tenant = service.tenant(request)
        if body.ttl is None and body.expire_time is None:
            raise ApiError(400, "ttl: or expireTime must be given; nothing else of a cache changes", param="ttl")
        expires = expiry(service, body.ttl, _seconds(body.expire_time))
        return _cached(require_lease(service.leases.extend(name, tenant.id, expires), name))

    @router.delete("/cachedContents/{name}")
    def remove(request: Request, name: str) -> dict[str, Any]:
        if not service.leases.remove(name, service.tenant(request).id):
            raise not_found(f"cache {name[:80]!r}", "cachedContent", "cache_not_found")
        return {}


def _work(service: Service, tenant: Tenant, model: str, body: GenerateRequest, policy: str | None) -> AnswerRequest:
    service.require_model(model)
    config = body.generation_config or Config()
    turns = [_turn(content) for content in body.contents]
    system: list[Piece] = [] if body.system_instruction is None else [*_turn(body.system_instruction).pieces]
    if body.cached_content is not None:
        lease = require_cache(
            service.find_cache(tenant), body.cached_content.removeprefix(_PREFIX), "cachedContent"
        )  # fmt: skip
        system = [*_stored(lease, "system"), *system]
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None:
            raise ApiError(400, "contents: none is a user's", param="contents")
        turns[first] = Turn("user", (*_stored(lease, "user", "assistant"), *turns[first].pieces))
    seed = secrets.randbits(63) if config.seed is None else config.seed % (1 << 64)
    temperature = 1.0 if config.temperature is None else config.temperature
    try:
        sampling = Sampling(temperature, config.top_p or 1.0, seed, tuple(config.stop_sequences or ()))
    except InputError as error:
        raise ApiError(400, str(error), param="generationConfig") from error
    chat = ChatPrompt((*([Turn("system", tuple(system))] if system else []), *turns))
    linking = linking_of(GenerationRequest(model=model), policy)
    parsed = AnswerFormat(service.backend.response_template is not None)  # its reasoning is not shown
    return AnswerRequest(
        tenant, chat, sampling, config.max_output_tokens, config.candidate_count or 1, None, linking, parsed
    )  # fmt: skip


def _stored(lease: Lease, *roles: str) -> list[Piece]:
    return [leased_piece(entry) for entry in lease.objects if entry.role in roles]


def _turn(content: Content, role: str | None = None) -> Turn:
    pieces = []
    for part in content.parts:
        if part.text is None:
            raise ApiError(400, "parts: only texts are known here", param="contents")
        pieces.append(PlainText(part.text))
    name = role or content.role or "user"
    return Turn("assistant" if name == "model" else name, tuple(pieces))


def _seconds(time_of: datetime | None) -> float | None:
    if time_of is None:
        return None
    return (time_of if time_of.tzinfo else time_of.replace(tzinfo=UTC)).timestamp()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _cached(lease: Lease) -> dict[str, Any]:
    return {
        "name": _PREFIX + lease.id, "model": f"models/{lease.model}", "createTime": _time(lease.created),
        "updateTime": _time(lease.created), "expireTime": _time(lease.expires), "displayName": lease.name,
        "usageMetadata": {"totalTokenCount": lease.num_tokens},
    }  # fmt: skip


def gemini_model(service: Service) -> dict[str, Any]:
    """The model, as Gemini's API has it."""
    backend = service.backend
    return {
        "name": f"models/{backend.model}", "displayName": backend.model, "inputTokenLimit": backend.context_length,
        "outputTokenLimit": backend.context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
    }  # fmt: skip


def _response(service: Service, collected: AnswerCollector) -> dict[str, Any]:
    candidates = [
        _candidate(index, answer.text, answer.reason) for index, answer in enumerate(collected.listed)
    ]  # fmt: skip
    return _head(service) | {"candidates": candidates, "usageMetadata": _usage([collected]), "pic": collected.report()}


def _head(service: Service) -> dict[str, Any]:
    return {"modelVersion": service.backend.model, "responseId": secrets.token_hex(12)}


def _candidate(index: int, text: str, reason: str | None) -> dict[str, Any]:
    ended = {} if reason is None else {"finishReason": _REASONS[reason]}
    return {"index": index, "content": {"role": "model", "parts": [{"text": text}]}} | ended


def _usage(works: Sequence[AnswerCollector]) -> dict[str, Any]:
    usage = usage_of(works)
    return {
        "promptTokenCount": usage["prompt_tokens"], "candidatesTokenCount": usage["completion_tokens"],
        "totalTokenCount": usage["total_tokens"],
        "cachedContentTokenCount": usage["prompt_tokens_details"]["cached_tokens"],
    }  # fmt: skip


class ArrayStream(EventStream):
    """A stream that is one JSON array, as Google's API sends it without `alt=sse`."""

    media_type = "application/json"


async def _as_events(parts: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for part in parts:
            yield sse(part)


async def _as_array(parts: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    before = b"["
    async with aclosing(parts):
        async for part in parts:
            yield before + json.dumps(part, ensure_ascii=False).encode()
            before = b",\r\n"
    yield b"]"


async def _stream(service: Service, events: StartedStream) -> AsyncGenerator[dict[str, Any], None]:
    """The parts of a response; an error ends it with one."""
    collected, head = AnswerCollector(), _head(service)
    try:
        async for event in events:
            collected.add(event)
            if isinstance(event, StartEvent):
                continue
            if isinstance(event, DeltaEvent):
                yield head | {"candidates": [_candidate(event.index, event.text, None)]}
            elif isinstance(event, FinishEvent):
                ended = {"candidates": [_candidate(event.index, "", event.reason)]}
                yield head | ended | {"usageMetadata": _usage([collected]), "pic": collected.report()}
    except Exception as error:
        yield gemini_error(ApiError.of(error))
    finally:
        await events.aclose()


_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    413: "INVALID_ARGUMENT", 422: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 499: "CANCELLED",
}  # fmt: skip


def is_gemini(path: str) -> bool:
    """Whether a path is of the façade, so that its errors have that form."""
    return path.startswith("/v1beta/") or "/cachedContents" in path or path.lower().endswith(_METHOD_ENDS)


def gemini_error(error: ApiError) -> dict[str, Any]:
    """An error in the form of Gemini's API, with the fields of OpenAI's."""
    body = error.body()["error"]
    return {"error": body | {"code": error.status, "status": _STATUSES.get(error.status, "INTERNAL")}}
