"""The router of `pic serve` inside vLLM's application, and a guard before vLLM's own routes."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.routing import Match

from pictool.engines.vllm.client.serving import RefusedError
from pictool.engines.vllm.versions import replace_routes
from pictool.errors import PicError
from pictool.serve.app import (
    OPEN,
    AsciiResponse,
    Gate,
    Message,
    Receive,
    Send,
    health_routes,
    is_preflight,
    refuse,
)
from pictool.serve.backends.vllm.backend import VllmBackend
from pictool.serve.backends.vllm.routes import vllm_routes
from pictool.serve.errors import ApiError
from pictool.serve.routes.caches import cache_routes
from pictool.serve.routes.gemini import gemini_routes
from pictool.serve.routes.link import link_routes
from pictool.serve.routes.openai import file_routes
from pictool.serve.routes.query import query_routes
from pictool.serve.service import Service
from pictool.serve.tenants import OPERATOR

_TENANTS = ("/v1/models", "/tokenize", "/detokenize")  # with any


def attach(app: FastAPI, service: Service, backend: VllmBackend) -> None:
    """Add the routes of a service to vLLM's application. vLLM's own remain, but for those of the same path."""
    router = APIRouter()
    router.include_router(vllm_routes(service, backend))
    for routes in (file_routes, cache_routes, gemini_routes, query_routes):
        router.include_router(routes(service))
    router.include_router(link_routes(service, version("pictool")))
    router.include_router(health_routes(service))
    number = len(app.router.routes)
    app.include_router(router)
    replace_routes(app.router.routes, number)
    for kind in (ApiError, PicError):
        app.exception_handler(kind)(_handle)
    app.exception_handler(RefusedError)(_refused)
    app.add_middleware(Guard, service=service, router=router)  # type: ignore[arg-type]
    app.add_middleware(Gate, service=service)  # type: ignore[arg-type]


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedError)
    return AsciiResponse(error.body, error.status)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return refuse(request, error)


class Guard:
    """Where keys are required, vLLM's own routes are the operator's: they know no tenants.

    vLLM's --api-key guards some of its paths only, and has one tenant.
    """

    def __init__(self, app: Any, service: Service, router: APIRouter) -> None:
        self._app, self._service, self._router = app, service, router

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._service.keys.are_required:
            try:
                self._check(scope)
            except ApiError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})
                else:
                    await refuse(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Message) -> None:
        """Let our own routes through, which ask for keys themselves; and of vLLM's, what a key may use.

        Raises:
            ApiError: 401 without a key, 403 without the operator's.
        """
        path = scope["path"]
        if path in OPEN or is_preflight(scope):
            return
        if any(route.matches(scope)[0] == Match.FULL for route in self._router.routes):
            return
        tenant = self._service.tenant(Request({**scope, "type": "http"}))
        if path not in _TENANTS and tenant.name != OPERATOR:
            raise ApiError(403, f"this route knows no tenants; it needs a key of the tenant {OPERATOR}")
