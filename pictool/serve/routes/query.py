"""Span queries: POST /v1/query/execute?stream=, as spnl's client sends them."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from pictool.serve.answers import DONE, Form, sse
from pictool.serve.bodies import read_text
from pictool.serve.routes.openai import EventStream
from pictool.serve.service import Service, unless_gone
from pictool.serve.work import FinishEvent
from pictool.spans.reading import MAX_NODES

_PIECE = 64  # choices that are written before other requests come in between


def query_routes(service: Service) -> APIRouter:
    """The route, for one service."""
    router = APIRouter(tags=["queries"])
    body = {"content": {"text/plain": {"schema": {"type": "string"}}, "application/json": {"schema": {}}}}

    @router.post("/v1/query/execute", response_model=None, openapi_extra={"requestBody": body})
    async def execute(request: Request, stream: bool = False) -> Response:
        tenant = service.tenant(request)
        text = await read_text(request, 4 * MAX_NODES)
        texts = await unless_gone(request, service.backend.execute(text, tenant))
        form = Form(f"query-{secrets.token_hex(12)}", service.backend.model, False)
        if stream:
            return EventStream(_events(form, texts))
        return StreamingResponse(_whole(form.head("text_completion"), texts), media_type="application/json")

    return router


async def _whole(head: dict[str, Any], texts: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """The JSON of a response, in pieces."""
    yield json.dumps(head)[:-1].encode() + b', "choices": ['
    for start in range(0, len(texts), _PIECE):
        choices = [_choice(index, text) for index, text in enumerate(texts[start : start + _PIECE], start)]
        yield (b", " if start else b"") + json.dumps(choices)[1:-1].encode()
        await asyncio.sleep(0)
    yield b"]}"


def _choice(index: int, text: str) -> dict[str, Any]:
    """A choice with its text as completions have it, and as chats do: which one spnl reads depends on the query."""
    message = {"role": "assistant", "content": text}
    return {"index": index, "text": text, "message": message, "finish_reason": "stop", "logprobs": None}


async def _events(form: Form, texts: Sequence[str]) -> AsyncGenerator[bytes, None]:
    for index, text in enumerate(texts):
        event = form.chunk(index, FinishEvent(index, "stop", 0))
        event["choices"][0] |= {"text": text, "delta": {"role": "assistant", "content": text}}
        yield sse(event)
        if (index + 1) % _PIECE == 0:
            await asyncio.sleep(0)
    yield DONE
