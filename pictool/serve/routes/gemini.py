"""A façade in the form of Gemini's API: cachedContents, and generateContent with `cachedContent`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pictool.core import AnswerFormat
from pictool.serve.answers import AnswerForm, respond, usage_of
from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError
from pictool.serve.prompts.requests import leased_piece, linking_of, sampling_of
from pictool.serve.routes.caches import compile_turns, expiry, extend_lease, find_lease, remove_lease
from pictool.serve.routes.openai import POLICY, count_tokens
from pictool.serve.schema import MAX_N, MAX_PARTS, GenerationRequest, Stops
from pictool.serve.service import ApiCall, Call
from pictool.serve.work import AnswerRequest, ChatPrompt, DeltaEvent, Event, FinishEvent, Piece, PlainText, Turn
from pictool.store.leases import Lease

_PREFIX = "cachedContents/"
_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
_METHOD_ENDS = ("generatecontent", "counttokens")
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS"}


class GeminiModel(BaseModel):
    """The base of everything in a request that has fields. Unknown fields are refused, lest an answer ignore them."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        alias_generator=to_camel,
        populate_by_name=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, value: Any) -> Any:
        """Without fields that ask for nothing, whatever they are called: [], false, 0, null."""
        if not isinstance(value, dict):
            return value
        known = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        return {name: held for name, held in value.items() if held or name in known}


class TextOf(GeminiModel):
    """A part; only texts are known."""

    text: str | None = None


class Content(GeminiModel):
    role: str | None = None
    parts: Annotated[list[TextOf], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)


class Config(GeminiModel):
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    candidate_count: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)
    stop_sequences: Stops | None = None
    response_mime_type: Literal["text/plain"] | None = None
    response_modalities: Annotated[list[Literal["TEXT"]], Field(fail_fast=True)] | None = None


class GenerateRequest(GeminiModel):
    contents: Annotated[list[Content], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    system_instruction: Content | None = None
    generation_config: Config | None = None
    cached_content: str | None = None
    safety_settings: Any = None
    labels: Any = None
    model: str | None = None  # google's clients may name it here, too


class CountTokensRequest(GenerateRequest):
    """The fields of a request for an answer, or all of one."""

    contents: Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)
    generate_content_request: GenerateRequest | None = None


class CachedChange(GeminiModel):
    ttl: Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?s$")] | None = None
    expire_time: datetime | None = Field(default=None, strict=False)


class CachedContent(CachedChange):
    model: str
    contents: Annotated[list[Content], Field(max_length=MAX_PARTS, fail_fast=True)] = Field(default_factory=list)
    system_instruction: Content | None = None
    display_name: str | None = Field(default=None, max_length=512)


router = APIRouter(
    tags=["gemini"], route_class=BodyRoute
)  # included below /v1beta, and below /v1 as newer clients call it


@router.post("/models/{model}:generateContent", response_model=None)
async def generate(
    call: Call, model: str, body: GenerateRequest, x_pic_policy: POLICY = None
) -> Response | dict[str, Any]:
    work = await asyncio.to_thread(_work, call, model, body, x_pic_policy)
    return await respond(call, [work], GeminiForm(call.service.backend.model), False)


@router.post("/models/{model}:streamGenerateContent", response_model=None)
async def stream(
    call: Call, model: str, body: GenerateRequest, x_pic_policy: POLICY = None,
    alt: Annotated[Literal["sse", "json"], Query()] = "json",
) -> Response | dict[str, Any]:  # fmt: skip
    work = await asyncio.to_thread(_work, call, model, body, x_pic_policy)
    form = GeminiForm if alt == "sse" else GeminiArrayForm
    return await respond(call, [work], form(call.service.backend.model), True)


@router.post("/models/{model}:countTokens")
async def count(call: Call, model: str, body: CountTokensRequest) -> dict[str, Any]:
    request = body.generate_content_request or body
    if not request.contents:
        raise ApiError(400, "contents: is missing; nothing to count", param="contents")
    work = await asyncio.to_thread(_work, call, model, request, None)
    return {"totalTokens": await count_tokens(call, work)}


@router.post("/models/{model}:{method}", include_in_schema=False)
async def other(method: str) -> None:
    known = ", ".join(_METHODS)
    raise ApiError(404, f"{method[:80]}: no such method of a model; available are {known}")


@router.post("/cachedContents")
async def create(call: Call, body: CachedContent) -> dict[str, Any]:
    call.service.require_model(body.model)
    expires = expiry(call.service, body.ttl, _seconds(body.expire_time))
    system = [] if body.system_instruction is None else [_turn(body.system_instruction, "system")]
    turns = system + [_turn(content) for content in body.contents]
    return _cached(await call.unless_gone(compile_turns(call, turns, expires, body.display_name or "")))


@router.get("/cachedContents")
def listing(
    call: Call,
    size: Annotated[int, Query(ge=0, le=1000, alias="pageSize")] = 100,
    token: Annotated[str, Query(alias="pageToken")] = "",
) -> dict[str, Any]:
    size = size or 100
    leases = call.service.leases.page(call.tenant.id, size + 1, token)
    more = {"nextPageToken": leases[size - 1].id} if len(leases) > size else {}
    return {"cachedContents": [_cached(lease) for lease in leases[:size]]} | more


@router.get("/cachedContents/{name}")
def show(call: Call, name: str) -> dict[str, Any]:
    return _cached(find_lease(call, name))


@router.patch("/cachedContents/{name}")
def change(call: Call, name: str, body: CachedChange) -> dict[str, Any]:
    if body.ttl is None and body.expire_time is None:
        raise ApiError(400, "ttl: this or expireTime is required; nothing else of a cache can change", param="ttl")
    return _cached(extend_lease(call, name, body.ttl, _seconds(body.expire_time)))


@router.delete("/cachedContents/{name}")
def remove(call: Call, name: str) -> dict[str, Any]:
    remove_lease(call, name)
    return {}


def _work(call: ApiCall, model: str, body: GenerateRequest, policy: str | None) -> AnswerRequest:
    call.service.require_model(model)
    config = body.generation_config or Config()
    turns = [_turn(content) for content in body.contents]
    system: list[Piece] = [] if body.system_instruction is None else [*_turn(body.system_instruction).pieces]
    if body.cached_content is not None:
        lease = call.find_cache(body.cached_content.removeprefix(_PREFIX), "cachedContent")
        system = [*_stored(lease, "system"), *system]
        first = next((i for i, turn in enumerate(turns) if turn.role == "user"), None)
        if first is None:
            raise ApiError(400, "contents: at least one must come from the user", param="contents")
        turns[first] = Turn("user", (*_stored(lease, "user", "assistant"), *turns[first].pieces))
    chat = ChatPrompt((*([Turn("system", tuple(system))] if system else []), *turns))
    options = GenerationRequest(
        model=model, temperature=config.temperature, top_p=config.top_p, seed=config.seed, stop=config.stop_sequences
    )
    parsed = AnswerFormat(call.service.backend.response_template is not None)  # its reasoning is not shown
    return AnswerRequest(
        call.tenant, chat, sampling_of(options), config.max_output_tokens, config.candidate_count or 1, None,
        linking_of(options, policy), parsed,
    )  # fmt: skip


def _stored(lease: Lease, *roles: str) -> list[Piece]:
    return [leased_piece(entry) for entry in lease.objects if entry.role in roles]


def _turn(content: Content, role: str | None = None) -> Turn:
    pieces = []
    for part in content.parts:
        if part.text is None:
            raise ApiError(400, "parts: only text is supported", param="contents")
        pieces.append(PlainText(part.text))
    name = role or content.role or "user"
    return Turn("assistant" if name == "model" else name, tuple(pieces))


def _seconds(time_of: datetime | None) -> float | None:
    if time_of is None:
        return None
    return (time_of if time_of.tzinfo else time_of.replace(tzinfo=UTC)).timestamp()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _cached(lease: Lease) -> dict[str, Any]:
    return {
        "name": _PREFIX + lease.id, "model": f"models/{lease.model}", "createTime": _time(lease.created),
        "updateTime": _time(lease.created), "expireTime": _time(lease.expires), "displayName": lease.name,
        "usageMetadata": {"totalTokenCount": lease.num_tokens},
    }  # fmt: skip


class GeminiForm(AnswerForm):
    """The response of generateContent; reasoning and calls are not shown."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._head = {"modelVersion": model, "responseId": secrets.token_hex(12)}

    def whole(self) -> dict[str, Any]:
        answers = enumerate(self.latest.listed)
        candidates = [_candidate(index, answer.text, answer.reason) for index, answer in answers]
        return self._head | {"candidates": candidates} | self._ended()

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, DeltaEvent):
            yield self._head | {"candidates": [_candidate(event.index, event.text, None)]}
        elif isinstance(event, FinishEvent):
            yield self._head | {"candidates": [_candidate(event.index, "", event.reason)]} | self._ended()

    def error(self, error: ApiError) -> dict[str, Any]:
        return gemini_error(error)

    def _ended(self) -> dict[str, Any]:
        usage = usage_of(self.collected)
        counts = {
            "promptTokenCount": usage["prompt_tokens"], "candidatesTokenCount": usage["completion_tokens"],
            "totalTokenCount": usage["total_tokens"],
            "cachedContentTokenCount": usage["prompt_tokens_details"]["cached_tokens"],
        }  # fmt: skip
        return {"usageMetadata": counts, "pic": self.latest.report()}


class GeminiArrayForm(GeminiForm):
    """The same as one JSON array, as Google's API sends it without `alt=sse`."""

    media_type: ClassVar[str] = "application/json"
    done: ClassVar[bytes] = b"]"
    _before = b"["

    def encode(self, chunk: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\r\n"
        return before + json.dumps(chunk, ensure_ascii=False).encode()

    def failed(self, error: ApiError) -> bytes:
        return super().failed(error) + self.done


def _candidate(index: int, text: str, reason: str | None) -> dict[str, Any]:
    ended = {} if reason is None else {"finishReason": _REASONS[reason]}
    return {"index": index, "content": {"role": "model", "parts": [{"text": text}]}} | ended


_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    413: "INVALID_ARGUMENT", 422: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 499: "CANCELLED",
}  # fmt: skip


def is_gemini(path: str) -> bool:
    """Whether a path is of the façade, so that its errors have that form."""
    return path.startswith("/v1beta/") or "/cachedContents" in path or path.lower().endswith(_METHOD_ENDS)


def gemini_error(error: ApiError) -> dict[str, Any]:
    """An error in the form of Gemini's API, with the fields of OpenAI's."""
    body = error.body()["error"]
    return {"error": body | {"code": error.status, "status": _STATUSES.get(error.status, "INTERNAL")}}
