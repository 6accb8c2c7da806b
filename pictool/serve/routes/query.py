"""Span queries: POST /v1/query/execute?stream=, as spnl's client sends them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from pictool.serve.answers import DONE, EventStream, sse
from pictool.serve.bodies import read_text
from pictool.serve.service import Call
from pictool.spans.query import MAX_NODES

_PIECE = 64  # events that are written before other requests come in between
_JSON = "application/json"
router = APIRouter(tags=["queries"])
_BODY = {"content": {"text/plain": {"schema": {"type": "string"}}, _JSON: {"schema": {}}}}


@router.post("/v1/query/execute", response_model=None, openapi_extra={"requestBody": _BODY})
async def execute(call: Call, stream: bool = False) -> Response:
    text = await read_text(call.request, 4 * MAX_NODES)
    texts = await call.unless_gone(call.service.backend.execute(text, call.tenant))
    head = {
        "id": f"query-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
        "model": call.service.backend.model,
    }  # fmt: skip
    if stream:
        return EventStream(_events(head, texts))
    choices = map(_choice, range(len(texts)), texts)
    return Response(await asyncio.to_thread(lambda: json.dumps(head | {"choices": [*choices]})), media_type=_JSON)


def _choice(index: int, text: str) -> dict[str, Any]:
    """A choice with its text as completions have it, and as chats do: which one spnl reads depends on the query."""
    message = {"role": "assistant", "content": text}
    return {"index": index, "text": text, "message": message, "finish_reason": "stop", "logprobs": None}


async def _events(head: dict[str, Any], texts: Sequence[str]) -> AsyncGenerator[bytes, None]:
    for index, text in enumerate(texts):
        choice = _choice(index, text)
        yield sse(head | {"choices": [choice | {"delta": choice["message"]}]})
        if (index + 1) % _PIECE == 0:
            await asyncio.sleep(0)
    yield DONE
