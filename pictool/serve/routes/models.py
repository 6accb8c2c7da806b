"""The model that is served, in the form of each API: their clients ask for it at the same addresses."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from pictool.serve.routes.openai import page
from pictool.serve.service import ApiCall, Call
from pictool.serve.work import Backend

router = APIRouter(tags=["openai"])
gemini_router = APIRouter(tags=["gemini"])


@router.get("/v1/models")
async def models(call: Call) -> dict[str, Any]:
    if _is_googles(call):
        return await gemini_models(call)
    return page([_model(call)], False)


@router.get("/v1/models/{name:path}")
async def model(call: Call, name: str) -> dict[str, Any]:
    call.service.require_model(name)
    return _model(call)


@gemini_router.get("/v1beta/models")
async def gemini_models(call: Call) -> dict[str, Any]:
    return {"models": [_gemini_model(call.service.backend)]}


@gemini_router.get("/v1beta/models/{model}")
async def gemini_model(call: Call, model: str) -> dict[str, Any]:
    call.service.require_model(model)
    return _gemini_model(call.service.backend)


def _is_googles(call: ApiCall) -> bool:
    return "x-goog-api-client" in call.request.headers or "x-goog-api-key" in call.request.headers


def _model(call: ApiCall) -> dict[str, Any]:
    """The model in the form of the API whose client asks."""
    backend = call.service.backend
    if _is_googles(call):
        return _gemini_model(backend)
    if "anthropic-version" in call.request.headers:
        created = datetime.fromtimestamp(backend.created, UTC).isoformat().replace("+00:00", "Z")
        return {
            "type": "model", "id": backend.model, "display_name": backend.model, "created_at": created,
            "max_input_tokens": backend.context_length, "max_tokens": backend.context_length, "lifecycle": "active",
        }  # fmt: skip
    return {
        "id": backend.model, "object": "model", "created": backend.created, "owned_by": "pictool",
        "max_model_len": backend.context_length,
    }  # fmt: skip


def _gemini_model(backend: Backend) -> dict[str, Any]:
    return {
        "name": f"models/{backend.model}", "displayName": backend.model, "inputTokenLimit": backend.context_length,
        "outputTokenLimit": backend.context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
    }  # fmt: skip
