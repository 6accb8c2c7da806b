"""POST /v1/link: a request with its documents; events come back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter

from pictool.core import Sampling
from pictool.core import Text as TextDocument
from pictool.errors import InputError
from pictool.linker.grid import named_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Document, Spec
from pictool.serve.answers import DONE, EventStream, sse
from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError
from pictool.serve.schema import LinkDocument, LinkRequest
from pictool.serve.service import Call

router = APIRouter(tags=["link"], route_class=BodyRoute)


@router.post("/v1/link", response_model=None, responses={200: {"content": {"text/event-stream": {}}}})
async def link(call: Call, body: LinkRequest) -> EventStream:
    """Link documents and answer a query.

    The events are `{"compiled": {source, tokens}}` for each object that was made, `{"text": …}` for each piece of
    the answer, `{"report": …, "origin": …}` (as `pic link --json`) at the end, or `{"error": …}`, then `[DONE]`.
    """
    events = call.service.backend.link(_spec_of(body), call.tenant, body.compare)
    return EventStream(_stream(await call.unless_gone(anext(events)), events, call.request.app.version))


async def _stream(
    first: dict[str, Any], events: AsyncGenerator[dict[str, Any], None], version: str
) -> AsyncGenerator[bytes, None]:
    try:
        yield sse(first)
        async for event in events:
            if "origin" in event:
                event["origin"]["version"] = version
            yield sse(event)
        yield DONE
    except Exception as error:
        yield sse(ApiError.of(error).body())
    finally:
        await events.aclose()


def _spec_of(body: LinkRequest) -> Spec:
    try:
        return Spec(
            body.query, [_document(document) for document in body.documents], _policy(body.policy), body.head,
            body.query_template, body.max_new_tokens,
            Sampling(body.temperature, body.top_p, body.seed, tuple(body.stop)), body.chunk_tokens,
            body.codec, separator=body.separator, after=body.after,
        )  # fmt: skip
    except InputError as error:
        raise ApiError(400, str(error)) from error


def _document(document: LinkDocument) -> Document:
    if (document.text is None) == (document.key is None):
        raise ApiError(400, "documents: each needs a text or a key", param="documents")
    return document.key if document.text is None else TextDocument(document.text, document.source)  # type: ignore[return-value]


def _policy(named: dict[str, Any]) -> Policy:
    algo, fields = named.get("algo"), {name: value for name, value in named.items() if name != "algo"}
    if not isinstance(algo, str):
        raise ApiError(400, "policy: needs algo, the name of a policy", param="policy")
    try:
        return named_policy(algo, fields)
    except InputError as error:
        raise ApiError(400, f"policy: {error}", param="policy") from error
