"""The server itself: how it is, its version, and its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from pictool.serve.errors import ApiError
from pictool.serve.metrics import CONTENT_TYPE
from pictool.serve.service import Call, ServiceOf
from pictool.serve.tenants import OPERATOR

router = APIRouter(tags=["system"])


@router.get("/health", response_model=None)
@router.head("/health", response_model=None, include_in_schema=False)
async def health(service: ServiceOf) -> JSONResponse:
    """How the server is; needs no key."""
    is_ready, status = await service.backend.is_ready(), service.backend.status()
    shown = {
        "status": "ok" if is_ready else "dead", "model": service.backend.model, "policy": status.policy,
        "divergence_nats": dict(status.divergence), "problem": status.problem,
        "waiting": status.waiting, "active": status.active,
    }  # fmt: skip
    return JSONResponse(shown, 200 if is_ready else 503)


@router.get("/version")
async def version(request: Request) -> dict[str, Any]:
    return {"version": request.app.version}


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(call: Call) -> PlainTextResponse:
    if call.service.keys.are_required and call.tenant.name != OPERATOR:
        raise ApiError(403, f"metrics cover all tenants; use a key of the tenant {OPERATOR}")
    return PlainTextResponse(call.service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
