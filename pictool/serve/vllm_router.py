"""The router of `pic serve` inside vLLM's application, and a guard before vLLM's own routes."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request
from starlette.routing import Match

from pictool.engines.vllm.serving import Refused
from pictool.errors import PicError
from pictool.serve.app import AsciiResponse, Gate, Message, Receive, Send, health_of, refuse
from pictool.serve.cache_routes import cache_routes
from pictool.serve.errors import ApiError
from pictool.serve.gemini_routes import gemini_routes
from pictool.serve.link_routes import link_routes
from pictool.serve.openai_routes import file_routes
from pictool.serve.query_routes import query_routes
from pictool.serve.service import Service
from pictool.serve.tenants import OPERATOR
from pictool.serve.vllm_home import VllmHome
from pictool.serve.vllm_routes import vllm_routes

_OPEN = ("/ping", "/version", "/docs", "/redoc", "/openapi.json")  # of vLLM's routes: without a key
_TENANTS = ("/v1/models", "/tokenize", "/detokenize")  # with any


def attach(app: FastAPI, service: Service, home: VllmHome) -> None:
    """Add the routes of a service to vLLM's application. vLLM's own remain, but for those of the same path."""
    router = APIRouter()
    router.include_router(vllm_routes(service, home))
    for routes in (file_routes, cache_routes, gemini_routes, query_routes):
        router.include_router(routes(service))
    router.include_router(link_routes(service, version("pictool")))
    router.include_router(_health_routes(service, home))
    app.include_router(router)
    for kind in (ApiError, PicError):
        app.exception_handler(kind)(_handle)
    app.exception_handler(Refused)(_refused)
    app.add_middleware(Guard, service=service, router=router)  # type: ignore[arg-type]
    app.add_middleware(Gate, service=service)  # type: ignore[arg-type]


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return AsciiResponse(error.body, error.status)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return refuse(request, error)


def _health_routes(service: Service, home: VllmHome) -> APIRouter:
    router = APIRouter(tags=["system"])

    @router.get("/health", response_model=None)
    async def health() -> Response:
        lives = await home.lives()
        return JSONResponse(health_of(service) | ({} if lives else {"status": "dead"}), 200 if lives else 503)

    return router


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
        if path in _OPEN or scope.get("method") == "OPTIONS":
            return
        if any(route.matches(scope)[0] == Match.FULL for route in self._router.routes):
            return
        tenant = self._service.tenant(Request({**scope, "type": "http"}))
        if path not in _TENANTS and tenant.name != OPERATOR:
            raise ApiError(403, f"this route knows no tenants; it needs a key of the tenant {OPERATOR}")
