"""The application: one router of all routes, errors in one form, and a gate before them."""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from pictool.errors import PicError
from pictool.serve.cache_routes import cache_routes
from pictool.serve.errors import ApiError
from pictool.serve.gemini_routes import gemini_error, gemini_routes, is_gemini
from pictool.serve.link_routes import link_routes
from pictool.serve.metrics import CONTENT_TYPE
from pictool.serve.openai_routes import file_routes, openai_routes
from pictool.serve.query_routes import query_routes
from pictool.serve.schema import ErrorBody
from pictool.serve.service import Service
from pictool.serve.tenants import OPERATOR

_log = logging.getLogger("pictool.serve")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 422, 429, 503)
}  # fmt: skip
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def make_router(service: Service, version: str) -> APIRouter:
    """All routes of a service. It can be included in any FastAPI application (see `add_errors`)."""
    router = APIRouter(responses=_ERRORS)
    for routes in (openai_routes, file_routes, cache_routes, gemini_routes, query_routes):
        router.include_router(routes(service))
    router.include_router(link_routes(service, version))
    router.include_router(_system_routes(service, version))
    return router


def refuse(request: Request, error: Exception) -> JSONResponse:
    """The response to a request that an exception ended."""
    told = ApiError.of(error)
    if told.status >= 500:
        is_known = isinstance(error, PicError)
        _log.error("pic: a request failed%s", f": {error}" if is_known else "", exc_info=None if is_known else error)
    return _response(told, request)


def make_app(service: Service, version: str) -> FastAPI:
    """An application with nothing but a service."""
    app = FastAPI(title="pictool", version=version, redirect_slashes=False)
    app.include_router(make_router(service, version))
    add_errors(app)
    app.add_middleware(Gate, service=service)  # type: ignore[arg-type]
    return app


def add_errors(app: FastAPI) -> None:
    """Say every error in the form of OpenAI's API."""

    @app.exception_handler(ApiError)
    @app.exception_handler(PicError)
    @app.exception_handler(Exception)
    async def handle(request: Request, error: Exception) -> JSONResponse:
        return refuse(request, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:] if not isinstance(part, str) or "[" not in part)[:200]
        status = 400 if first["type"] in ("json_invalid", "missing") and not place else 422
        return _response(
            ApiError(status, f"{place or 'body'}: {first['msg']}", param=place.partition(".")[0] or None), request
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, ApiError):  # while FastAPI read the body; it says 400 for whatever was raised
            return _response(error.__cause__, request)
        return _response(ApiError(error.status_code, str(error.detail), headers=error.headers), request)


def _response(error: ApiError, request: Request) -> JSONResponse:
    body = gemini_error(error) if is_gemini(request.url.path) else error.body()
    return AsciiResponse(body, error.status, error.headers)


class AsciiResponse(JSONResponse):
    """JSON in ASCII: a message may quote half of a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class Gate:
    """Gives every request an id, refuses bodies that are too large, and counts responses."""

    def __init__(self, app: Any, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = self._request_id(headers)
        limit, size, is_begun = self._service.settings.max_body, 0, False

        async def send_on(message: Message) -> None:
            nonlocal is_begun
            if message["type"] == "http.response.start":
                is_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                route = getattr(scope.get("route"), "path", "other")
                self._service.metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        async def receive_on() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                raise _too_large(limit)
            return message

        length = headers.get(b"content-length", b"0")
        try:
            if length.isdigit() and int(length) > limit:
                raise _too_large(limit)
            await self._app(scope, receive_on, send_on)
        except ApiError as error:
            if is_begun:
                raise
            await _response(error, Request(scope))(scope, receive, send_on)  # type: ignore[arg-type]

    @staticmethod
    def _request_id(headers: dict[bytes, bytes]) -> bytes:
        sent = headers.get(b"x-request-id", b"")
        return sent if _REQUEST_ID.fullmatch(sent.decode("latin-1")) else f"req-{secrets.token_hex(12)}".encode()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request has more than {limit} bytes; upload texts as files, or cut them")


def health_of(service: Service) -> dict[str, Any]:
    """How a server is, as /health says it."""
    status = service.home.status()
    return {
        "status": "ok", "model": service.home.model, "policy": status.policy,
        "divergence_nats": dict(status.divergence), "problem": status.problem,
        "waiting": status.waiting, "active": status.active,
    }  # fmt: skip


def _system_routes(service: Service, version: str) -> APIRouter:
    router = APIRouter(tags=["system"])

    @router.get("/health")
    async def health() -> dict[str, Any]:
        return health_of(service)

    @router.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version}

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> PlainTextResponse:
        tenant = service.tenant(request)
        if service.keys.are_required and tenant.name != OPERATOR:
            raise ApiError(403, f"metrics are of all tenants; they need a key of the tenant {OPERATOR}")
        return PlainTextResponse(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return router
