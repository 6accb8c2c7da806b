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

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pictool.errors import PicError
from pictool.serve.bodies import invalid
from pictool.serve.errors import ApiError
from pictool.serve.routes import caches, files, gemini, link, messages, models, openai, query, responses, system
from pictool.serve.routes.gemini import gemini_error, is_gemini
from pictool.serve.routes.messages import is_messages, messages_error, messages_status
from pictool.serve.schema import ErrorBody
from pictool.serve.service import Service
from pictool.serve.tenants import is_loopback
from pictool.serve.tracing import trace_requests

# All routes, whatever engine answers: those of a router, below a prefix.
ROUTERS = (
    *(("", module.router) for module in (openai, responses, messages)),
    ("/v1beta", gemini.router), ("/v1", gemini.router), ("", models.gemini_router),
    *(("", module.router) for module in (files, caches, query, models, link, system)),
)  # fmt: skip
_log = logging.getLogger("pictool.serve")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 403, 404, 408, 413, 415, 422, 429, 501, 503, 529)
}  # fmt: skip
OPEN = ("/health", "/version", "/docs", "/redoc", "/openapi.json")  # routes without a key
BODY_S, _LEAST_RATE = 30.0, 32 << 10  # a body comes within so long, and bytes of it a second beyond that
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def make_app(service: Service, version: str) -> FastAPI:
    """The application of a service: all routes, errors in the form of the API that they are of, and the gate."""
    app = FastAPI(title="pictool", version=version, redirect_slashes=False)
    app.state.service = service
    for prefix, router in ROUTERS:
        app.include_router(router, prefix=prefix, responses=_ERRORS)
    app.add_middleware(Gate, service=service)  # type: ignore[arg-type]
    if service.tracer_provider is not None:
        trace_requests(app, service.tracer_provider)
    for kind in (ApiError, PicError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)
    return app


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that an exception ended, in the form of the API that was called."""
    api_error = _api_error(request, error)
    if api_error.status >= 500:
        is_known = isinstance(error, PicError | ApiError)
        _log.error("pic: a request failed%s", f": {error}" if is_known else "", exc_info=None if is_known else error)
    body, status = api_error.body(), api_error.status
    if is_messages(request):
        body, status = messages_error(api_error, request.scope["state"]["request_id"]), messages_status(api_error)
    elif is_gemini(request.url.path):
        body = gemini_error(api_error)
    return AsciiResponse(body, status, api_error.headers)


def _api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):  # of a form, or of what an address has
        return invalid([{**found, "loc": found["loc"][1:]} for found in error.errors()])
    if not isinstance(error, HTTPException):
        return ApiError.of(error)
    message = str(error.detail)
    if error.status_code == 404 and message == "Not Found":
        paths = [path for path in request.app.openapi()["paths"] if "{" not in path]
        message = f"no such route; available are {', '.join(paths)}"
    return ApiError(error.status_code, message, headers=error.headers)


class AsciiResponse(JSONResponse):
    """JSON in ASCII: a message may quote half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Gate:
    """Before all routes: keys are checked, requests get ids, bodies are bounded in bytes and time."""

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
            if passage.is_begun:
                raise
            response = await refuse(Request(scope), error)
            await response(scope, receive, passage.send)  # type: ignore[arg-type]

    def _check(self, scope: Message) -> None:
        """Refuse a request by its head. Raises ApiError."""
        headers, limit = dict(scope["headers"]), self._service.settings.max_body
        if not self._service.keys.are_required:
            _require_own_page(scope, headers)
        elif scope["path"] not in OPEN:
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
        self._size, self._has_all, self.is_begun = 0, False, False
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
            raise ApiError(408, f"the body did not arrive within {wait:.0f} s; send it again, or faster") from error
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
        await self._send(message)


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
        raise ApiError(403, "Origin: is another site, which needs a key; start the server with --keys")
    if host and is_loopback(str(server[0])) and not _is_address(urlsplit(f"//{host}").hostname or ""):
        raise ApiError(
            403, "Host: is not an address, and this server has no keys; use localhost, or start it with --keys"
        )


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host == "localhost" or host.endswith(".localhost")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request has more than {limit} bytes; upload texts as files, or shorten them")
