"""The application: one router of all routes, errors in one form, and a gate before them."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from pictool.errors import PicError
from pictool.serve.bodies import invalid
from pictool.serve.errors import ApiError
from pictool.serve.metrics import CONTENT_TYPE
from pictool.serve.routes.caches import cache_routes
from pictool.serve.routes.gemini import gemini_error, gemini_model, gemini_routes, is_gemini
from pictool.serve.routes.link import link_routes
from pictool.serve.routes.messages import (
    is_messages,
    message_routes,
    messages_error,
    messages_model,
    messages_status,
)
from pictool.serve.routes.openai import file_routes, model_routes, openai_routes
from pictool.serve.routes.query import query_routes
from pictool.serve.routes.responses import response_routes
from pictool.serve.running import UNREAD_S
from pictool.serve.schema import ErrorBody
from pictool.serve.service import Service
from pictool.serve.tenants import OPERATOR, is_loopback
from pictool.serve.tracing import trace_requests

_log = logging.getLogger("pictool.serve")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 501, 503, 529)
}  # fmt: skip
OPEN = ("/health", "/ping", "/version", "/docs", "/redoc", "/openapi.json")  # routes without a key
BODY_S, _LEAST_RATE = 30.0, 32 << 10  # a body comes within so long, and bytes of it a second beyond that
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def make_router(service: Service, version: str) -> APIRouter:
    """All routes of a service. It can be included in any FastAPI application (see `add_errors`)."""
    router = APIRouter(responses=_ERRORS)
    chats = (openai_routes, response_routes, message_routes, gemini_routes)
    for routes in (*chats, file_routes, cache_routes, query_routes):
        router.include_router(routes(service))
    router.include_router(model_routes(service, lambda: gemini_model(service), lambda: messages_model(service)))
    router.include_router(link_routes(service, version))
    router.include_router(health_routes(service))
    router.include_router(_system_routes(service, version))
    return router


def refuse(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that an exception ended."""
    api_error = ApiError.of(error)
    if api_error.status >= 500:
        is_known = isinstance(error, PicError | ApiError)
        _log.error("pic: a request failed%s", f": {error}" if is_known else "", exc_info=None if is_known else error)
    return _response(api_error, request)


def make_app(service: Service, version: str) -> FastAPI:
    """An application with nothing but a service."""
    app = FastAPI(title="pictool", version=version, redirect_slashes=False)
    app.include_router(make_router(service, version))
    add_errors(app)
    app.add_middleware(Gate, service=service)  # type: ignore[arg-type]
    if service.tracer_provider is not None:
        trace_requests(app, service.tracer_provider)
    return app


def add_errors(app: FastAPI) -> None:
    """Say every error in the form of OpenAI's API."""

    @app.exception_handler(ApiError)
    @app.exception_handler(PicError)
    async def handle(request: Request, error: Exception) -> JSONResponse:
        return refuse(request, error)

    @app.exception_handler(RequestValidationError)
    async def unfit(request: Request, error: RequestValidationError) -> JSONResponse:
        """Of a form, or of what an address has."""
        return _response(invalid([{**found, "loc": found["loc"][1:]} for found in error.errors()]), request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404 and message == "Not Found":
            paths = [path for path in app.openapi()["paths"] if "{" not in path]
            message = f"no such route; there are {', '.join(paths)}"
        return _response(ApiError(error.status_code, message, headers=error.headers), request)


def _response(error: ApiError, request: Request) -> JSONResponse:
    if is_messages(request):
        body = messages_error(error, request.scope.get("state", {}).get("request_id"))
        return AsciiResponse(body, messages_status(error), error.headers)
    body = gemini_error(error) if is_gemini(request.url.path) else error.body()
    return AsciiResponse(body, error.status, error.headers)


class AsciiResponse(JSONResponse):
    """JSON in ASCII: a message may quote half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Gate:
    """Before all routes: keys are checked, requests get ids, bodies are bounded in bytes and time, streams in time."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(self._service, scope, receive, send)
        try:
            self._check(scope)
            await self._app(scope, passage.receive, passage.send)
        except Exception as error:
            if passage.is_unread:
                return  # the server closes the connection
            if passage.is_begun:
                raise
            await refuse(Request(scope), error)(scope, receive, passage.send)  # type: ignore[arg-type]

    def _check(self, scope: Message) -> None:
        """Refuse a request by its head. Raises ApiError."""
        headers, limit = dict(scope["headers"]), self._service.settings.max_body
        if not self._service.keys.are_required:
            _require_own_page(scope, headers)
        elif scope["path"] not in OPEN and not is_preflight(scope):
            self._service.tenant(Request(scope))
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)


class _Passage:
    """A request and its response on their way through the gate."""

    def __init__(self, service: Service, scope: Message, receive: Receive, send: Send) -> None:
        self._service, self._scope, self._receive, self._send = service, scope, receive, send
        sent = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        self._id = (sent if _REQUEST_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}").encode()
        scope.setdefault("state", {})["request_id"] = self._id.decode()
        self._size, self._has_all, self.is_begun, self.is_unread = 0, False, False, False
        self._since = asyncio.get_running_loop().time()

    async def receive(self) -> Message:
        """The next part of the body; after it, that the client went away, whenever it does."""
        if self._has_all:
            return await self._receive()
        limit, wait = self._service.settings.max_body, BODY_S + self._size / _LEAST_RATE
        try:
            async with asyncio.timeout_at(self._since + wait):
                message = await self._receive()
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {wait:.0f} s; send it again, or faster") from error
        self._size += len(message.get("body", b""))
        self._has_all = not message.get("more_body", False)
        if self._size > limit:
            raise _too_large(limit)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_begun = True
            message["headers"] = [*message["headers"], (b"x-request-id", self._id), (b"request-id", self._id)]
            route = getattr(self._scope.get("route"), "path", "other")
            self._service.metrics.requests.labels(route, message["status"]).inc()
        try:
            async with asyncio.timeout(UNREAD_S):  # a server waits here while its client does not read
                await self._send(message)
        except TimeoutError:
            self.is_unread = True
            raise


def is_preflight(scope: Message) -> bool:
    """Whether an application's own CORS middleware answers a request, which then comes to no route."""
    headers = dict(scope["headers"])
    is_asked = b"origin" in headers and b"access-control-request-method" in headers
    return (
        scope.get("method") == "OPTIONS"
        and is_asked
        and any(middleware.cls is CORSMiddleware for middleware in scope["app"].user_middleware)
    )


def _require_own_page(scope: Message, headers: Mapping[bytes, bytes]) -> None:
    """Refuse what a page of another site has a browser send, where no key keeps it out.

    Such a request names its page's origin. Its page may call this machine by a name of its own (DNS rebinding), so on
    the loopback interface only addresses and localhost are names of a server.

    Raises:
        ApiError: 403.
    """
    host, origin = (headers.get(name, b"").decode("latin-1").lower() for name in (b"host", b"origin"))
    server = scope.get("server") or ("", 0)
    if origin and origin.partition("://")[2] != host:
        raise ApiError(403, "Origin: is another site, and this server has no keys; start it with --keys")
    if host and is_loopback(str(server[0])) and not _is_address(urlsplit(f"//{host}").hostname or ""):
        raise ApiError(403, "Host: is no address, and this server has no keys; say localhost, or start it with --keys")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host == "localhost" or host.endswith(".localhost")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request has more than {limit} bytes; upload texts as files, or cut them")


def health_of(service: Service) -> dict[str, Any]:
    """How a server is, as /health says it."""
    status = service.backend.status()
    return {
        "status": "ok", "model": service.backend.model, "policy": status.policy,
        "divergence_nats": dict(status.divergence), "problem": status.problem,
        "waiting": status.waiting, "active": status.active,
    }  # fmt: skip


def health_routes(service: Service) -> APIRouter:
    """The route that says whether a server can answer."""
    router = APIRouter(tags=["system"])

    @router.get("/health", response_model=None)
    @router.head("/health", response_model=None, include_in_schema=False)
    async def health(request: Request) -> JSONResponse:
        lives = await service.backend.is_ready()
        found = health_of(service) | ({} if lives else {"status": "dead"})
        if service.is_operators(request):
            found["last_requests"] = list(service.last_requests)
        return JSONResponse(found, 200 if lives else 503)

    return router


def _system_routes(service: Service, version: str) -> APIRouter:
    router = APIRouter(tags=["system"])

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version}

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> PlainTextResponse:
        service.tenant(request)
        if not service.is_operators(request):
            raise ApiError(403, f"metrics are of all tenants; they need a key of the tenant {OPERATOR}")
        return PlainTextResponse(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return router
