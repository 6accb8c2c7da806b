"""OpenAI's API: chat completions, completions, models, files."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Header, Query, Request, UploadFile
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from pictool.serve.answers import Form as AnswerForm
from pictool.serve.answers import StartedStream, collect, stream
from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError, not_found
from pictool.serve.files import MAX_BYTES
from pictool.serve.prompts.reading import (
    cached_pieces,
    format_of,
    lease_seconds,
    linking_of,
    prompts_of,
    require_supported,
    sampling_of,
    turns_of,
)
from pictool.serve.schema import ChatRequest, CompletionRequest, GenerationRequest
from pictool.serve.service import Service, unless_gone
from pictool.serve.tenants import Tenant
from pictool.serve.work import AnswerRequest, ChatPrompt, RawPrompt

POLICY = Annotated[str | None, Header(description="A policy as legolink-16; full or off: exact.")]
MAX_PROMPTS = 64


def openai_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/chat/completions", tags=["openai"], response_model=None)
    async def chat(request: Request, body: ChatRequest, x_pic_policy: POLICY = None) -> Response | dict[str, Any]:
        work = await chat_work(service, service.tenant(request), body, x_pic_policy)
        form = AnswerForm(f"chatcmpl-{secrets.token_hex(12)}", service.backend.model, True, bool(body.logprobs))
        return await respond(service, request, body, form, [work])

    @router.post("/v1/completions", tags=["openai"], response_model=None)
    async def complete(
        request: Request, body: CompletionRequest, x_pic_policy: POLICY = None
    ) -> Response | dict[str, Any]:
        works = await _completion_works(service, service.tenant(request), body, x_pic_policy)
        form = AnswerForm(f"cmpl-{secrets.token_hex(12)}", service.backend.model, False, body.logprobs is not None)
        return await respond(service, request, body, form, works)

    return router


def model_routes(
    service: Service, googles: Callable[[], dict[str, Any]], anthropics: Callable[[], dict[str, Any]]
) -> APIRouter:
    """The routes of the model, for one service; with its entries in the forms of others, whose clients ask here too."""
    router = APIRouter(tags=["openai"])

    @router.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        service.tenant(request)
        if _is_googles(request):
            return {"models": [googles()]}
        return page([anthropics() if "anthropic-version" in request.headers else _model(service)], False)

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        service.tenant(request)
        service.require_model(name)
        if _is_googles(request):
            return googles()
        return anthropics() if "anthropic-version" in request.headers else _model(service)

    return router


def _is_googles(request: Request) -> bool:
    return "x-goog-api-client" in request.headers or "x-goog-api-key" in request.headers


async def chat_work(service: Service, tenant: Tenant, body: ChatRequest, policy: str | None) -> AnswerRequest:
    """What a chat completion asks for. Raises ApiError."""
    service.require_model(body.model)
    require_supported(body, service.backend)
    answer_format, schemas = await asyncio.to_thread(format_of, body, service.backend)
    await service.require_followed(tenant, schemas)
    find_cache, find_file = service.find_cache(tenant), service.find_file(tenant)
    turns = await asyncio.to_thread(turns_of, body.messages, find_cache, find_file, body.cache_ids or ())
    tools = () if body.tool_choice == "none" else tuple(body.tools or ())
    linking, most = linking_of(body, policy), body.max_completion_tokens or body.max_tokens
    chat, retrieved = await service.documents(tenant, body.documents or [], ChatPrompt(turns, tools), linking, most)
    return AnswerRequest(
        tenant, chat, sampling_of(body), most, body.n or 1, (body.top_logprobs or 0) if body.logprobs else None,
        linking, answer_format, lease_seconds(body.messages), retrieved,
    )  # fmt: skip


async def _completion_works(
    service: Service, tenant: Tenant, body: CompletionRequest, policy: str | None
) -> list[AnswerRequest]:
    """What a completion asks for, a work for each prompt. Raises ApiError."""
    service.require_model(body.model)
    for name, value in (("echo", body.echo), ("suffix", body.suffix)):
        if value:
            raise ApiError(400, f"{name}: is not supported; leave it out", param=name)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: is not supported; ask for n answers", param="best_of")
    before = await asyncio.to_thread(cached_pieces, service.find_cache(tenant), body.cache_ids or ())
    prompts = prompts_of(body)
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: has {len(prompts)} prompts; {MAX_PROMPTS} at most", param="prompt")
    return [
        AnswerRequest(
            tenant, RawPrompt((*before, *prompt)), sampling_of(body), body.max_tokens or 16, body.n or 1, body.logprobs,
            linking_of(body, policy),
        )
        for prompt in prompts
    ]  # fmt: skip


async def respond(
    service: Service, request: Request, body: GenerationRequest, form: AnswerForm, works: list[AnswerRequest]
) -> Response | dict[str, Any]:
    """The whole response, or its stream. Errors up to the first event are the response's status."""
    started = time.perf_counter()
    if not body.stream:
        collected = [await unless_gone(request, collect(service.events(work, started))) for work in works]
        return form.whole(collected)
    begun = []
    for work in works:
        events = service.events(work, started)
        begun.append(StartedStream(await unless_gone(request, anext(events)), events))
    has_usage = body.stream_options is not None and body.stream_options.include_usage
    return EventStream(stream(form, begun, body.n or 1, has_usage))


class EventStream(StreamingResponse):
    """A stream of events. Its source is closed when it ends, even if the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        self._content = content
        super().__init__(content, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._content.aclose()


def _model(service: Service) -> dict[str, Any]:
    backend = service.backend
    return {
        "id": backend.model, "object": "model", "created": backend.created, "owned_by": "pictool",
        "max_model_len": backend.context_length,
    }  # fmt: skip


def file_routes(service: Service) -> APIRouter:
    """The routes of uploaded texts, for one service."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/v1/files", tags=["openai"])
    def upload(
        request: Request, file: Annotated[UploadFile, File()], purpose: Annotated[str, Form()] = "user_data"
    ) -> dict[str, Any]:
        tenant = service.tenant(request)
        data = file.file.read(MAX_BYTES + 1)
        return service.files.add(tenant.id, file.filename or "text", purpose, data).report()

    @router.get("/v1/files", tags=["openai"])
    def listing(
        request: Request, limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000, after: str = "", purpose: str = ""
    ) -> dict[str, Any]:
        tenant = service.tenant(request)
        files = [file for file in service.files.list(tenant.id) if purpose in ("", file.purpose)]
        if after:
            files = files[next((i + 1 for i, file in enumerate(files) if file.id == after), len(files)) :]
        return page([file.report() for file in files[:limit]], len(files) > limit)

    @router.get("/v1/files/{name}", tags=["openai"])
    def show(request: Request, name: str) -> dict[str, Any]:
        found = service.files.find(service.tenant(request).id, name)
        if found is None:
            raise not_found(f"file {name[:80]!r}", "file_id", "file_not_found")
        return found[0].report()

    @router.get("/v1/files/{name}/content", tags=["openai"], response_class=PlainTextResponse)
    def content(request: Request, name: str) -> str:
        return service.find_file(service.tenant(request))(name)

    @router.delete("/v1/files/{name}", tags=["openai"])
    def remove(request: Request, name: str) -> dict[str, Any]:
        if not service.files.remove(service.tenant(request).id, name):
            raise not_found(f"file {name[:80]!r}", "file_id", "file_not_found")
        return {"id": name, "object": "file", "deleted": True}

    return router


def page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
