"""Span queries: POST /v1/query/execute?stream=, as spnl's client sends them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pictool.serve.answers import DONE, Form, sse
from pictool.serve.errors import ApiError
from pictool.serve.openai_routes import EventStream
from pictool.serve.service import Service, unless_gone
from pictool.serve.work import Finished


def query_routes(service: Service) -> APIRouter:
    """The route, for one service."""
    router = APIRouter(tags=["queries"])
    body = {"content": {"text/plain": {"schema": {"type": "string"}}, "application/json": {"schema": {}}}}

    @router.post("/v1/query/execute", response_model=None, openapi_extra={"requestBody": body})
    async def execute(request: Request, stream: bool = False) -> Response | dict[str, Any]:
        tenant = service.tenant(request)
        try:
            text = (await request.body()).decode()
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the query is not UTF-8 at byte {error.start}") from error
        texts = await unless_gone(request, service.home.execute(text, tenant))
        form = Form(f"query-{secrets.token_hex(12)}", service.home.model, False)
        if stream:
            return EventStream(_events(form, texts))
        head = form._head("text_completion")
        return head | {"choices": [_choice(index, text) for index, text in enumerate(texts)]}

    return router


def _choice(index: int, text: str) -> dict[str, Any]:
    """A choice with its text as completions have it, and as chats do: which one spnl reads depends on the query."""
    message = {"role": "assistant", "content": text}
    return {"index": index, "text": text, "message": message, "finish_reason": "stop", "logprobs": None}


async def _events(form: Form, texts: list[str]) -> AsyncGenerator[bytes, None]:
    for index, text in enumerate(texts):
        event = form.chunk(index, Finished(index, "stop", 0))
        event["choices"][0] |= {"text": text, "delta": {"role": "assistant", "content": text}}
        yield sse(event)
    yield DONE
