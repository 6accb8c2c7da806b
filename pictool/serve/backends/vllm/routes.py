"""Chat and completions inside vLLM's server: references become the connector's parameters, and vLLM does the rest."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, TypeAdapter, ValidationError

from pictool.engines.vllm.client.serving import RequestTap
from pictool.engines.vllm.request import SALT_PREFIX as PREFIX
from pictool.serve.admission import Admission, held
from pictool.serve.backends.vllm.backend import VllmBackend
from pictool.serve.bodies import invalid, read_json, validated
from pictool.serve.errors import ApiError
from pictool.serve.prompts.layout import PromptLayout
from pictool.serve.prompts.learning import texts_of, texts_of_body
from pictool.serve.prompts.reading import cached_pieces, hint_of, linking_of, prompts_of, turns_of
from pictool.serve.prompts.retrieving import RetrievedDocument
from pictool.serve.routes.openai import MAX_PROMPTS, POLICY
from pictool.serve.schema import (
    MAX_PARTS,
    ChatMessage,
    CompletionRequest,
    DocumentQuery,
    Documents,
    DocumentText,
    GenerationRequest,
    Messages,
)
from pictool.serve.service import Service, unless_gone
from pictool.serve.tenants import Tenant
from pictool.serve.work import ChatPrompt, Linking, PlainText, RawPrompt, Reuse, Turn

_log = logging.getLogger("vllm.pictool.serve")
_OURS = ("pic", "verify", "cache_ids")
_REFERENCES = ("cache", "file", "document")
_MARKERS = ("cache_control", "prompt_cache_breakpoint")
_MESSAGES: TypeAdapter[Sequence[ChatMessage]] = TypeAdapter(Messages)
_DOCUMENTS: TypeAdapter[list[DocumentText] | DocumentQuery] = TypeAdapter(Documents | DocumentQuery)
_GENERATION, _COMPLETION = TypeAdapter(GenerationRequest), TypeAdapter(CompletionRequest)
_SOME = TypeAdapter(Annotated[list[Any], Field(min_length=1, max_length=MAX_PARTS)])  # messages as vLLM knows them
LayOut = Callable[
    [Service, VllmBackend, Tenant, dict[str, Any], GenerationRequest, Linking],
    Awaitable[tuple["RoutedRequest", dict[str, Any]]],
]
HandOn = Callable[[Mapping[str, Any], Request, str], Awaitable[Response]]


@dataclass(frozen=True)
class RoutedRequest:
    """A request apart from its prompt. `prompt_layout` is the prompt, if it was laid out here.

    `tenant` has the salt under which the prompt is linked; `texts` are what may be learned of it.
    """

    tenant: Tenant
    linking: Linking
    prompt_layout: PromptLayout | None = None
    texts: Sequence[str] = ()
    retrieved: tuple[RetrievedDocument, ...] = ()


def vllm_routes(service: Service, backend: VllmBackend) -> APIRouter:
    """The routes that replace vLLM's own, for one service."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request, x_pic_policy: POLICY = None) -> Response:
        return await answer(request, x_pic_policy, _chat, backend.serving.chat)

    @router.post("/v1/completions", response_model=None)
    async def complete(request: Request, x_pic_policy: POLICY = None) -> Response:
        return await answer(request, x_pic_policy, _completion, backend.serving.complete)

    async def answer(request: Request, header: str | None, lay_out: LayOut, hand_on: HandOn) -> Response:
        """Hold a place from here to the end of the response."""
        started, tenant, body = time.perf_counter(), service.tenant(request), await _read(request)
        own, linking = _options(service, tenant, body, header)
        place = await unless_gone(request, backend.admission.take(tenant.name, (own.n or 1) * _num_prompts(body)))
        response = None
        try:
            routed, body = await lay_out(service, backend, tenant, body, own, linking)
            response = await _hand_on(service, backend, hand_on, request, body, routed, started)
        finally:
            if not isinstance(response, StreamingResponse):
                place.release()
        return AdmittedResponse(response, place) if isinstance(response, StreamingResponse) else response

    return router


class AdmittedResponse(Response):
    """A stream during which its request holds a place, whether or not a client reads it to its end."""

    def __init__(self, stream: StreamingResponse, place: Admission) -> None:
        self._stream, self._place = stream, place
        self.status_code, self.raw_headers, self.background = stream.status_code, stream.raw_headers, None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with held(self._place):
            await self._stream(scope, receive, send)


async def _read(request: Request) -> dict[str, Any]:
    """The body of a request. Raises ApiError."""
    body = await read_json(request)
    if not isinstance(body, dict):
        raise ApiError(422, "body: must be an object")
    return body


def _options(
    service: Service, tenant: Tenant, body: Mapping[str, Any], header: str | None
) -> tuple[GenerationRequest, Linking]:
    """The fields that both backends have, within their bounds; those of vLLM's that a tenant may not set are refused.

    Raises:
        ApiError: also for a salt, which a tenant's key says, and for two ways to link.
    """
    own = validated(_GENERATION, {**body, "model": body.get("model") or ""})
    if _num_prompts(body) > MAX_PROMPTS:
        raise ApiError(400, f"prompt: has {_num_prompts(body)} prompts; {MAX_PROMPTS} at most", param="prompt")
    salt = body.get("cache_salt")
    if salt is not None and (service.keys.are_required or tenant.salt):
        raise ApiError(400, "cache_salt: the key says it here; leave it out", param="cache_salt")
    if isinstance(salt, str) and salt.startswith(PREFIX):
        raise ApiError(400, f"cache_salt: must not begin with {PREFIX}", param="cache_salt")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, Mapping) and "pic" in transfer and (own.pic is not None or own.cache_ids):
        raise ApiError(400, "kv_transfer_params: pic is asked for twice; leave one out", param="kv_transfer_params")
    return own, linking_of(own, header)


async def _chat(
    service: Service,
    backend: VllmBackend,
    tenant: Tenant,
    body: dict[str, Any],
    own: GenerationRequest,
    linking: Linking,
) -> tuple[RoutedRequest, dict[str, Any]]:
    """What a chat asks for, and the body for vLLM. It is laid out here only if it has references, or no template."""
    validated(_SOME, body.get("messages"), "messages")
    rest = _without_ours(body, linking)
    if backend.serving.template and not own.cache_ids and not _has_references(body):
        return _as_it_is(backend, tenant, linking, rest)
    messages = validated(_MESSAGES, body.get("messages"), "messages")
    wanted = validated(_DOCUMENTS, body.get("documents") or [], "documents")
    if body.get("echo") or (isinstance(body.get("kv_transfer_params"), Mapping)):
        raise ApiError(400, "echo, kv_transfer_params: not beside references to documents", param="messages")
    find_cache, find_file = service.find_cache(tenant), service.find_file(tenant)
    turns = await asyncio.to_thread(turns_of, messages, find_cache, find_file, own.cache_ids or ())
    tools = () if body.get("tool_choice") == "none" else tuple(body.get("tools") or ())
    most = body.get("max_completion_tokens") or own.max_tokens
    chat, retrieved = await service.documents(tenant, wanted, ChatPrompt(turns, tools), linking, most)
    prompt_layout, params = await backend.prompt(tenant, chat, linking, rest)
    rest |= {"messages": [_message(turn) for turn in turns], "documents": None}
    rest["kv_transfer_params"] = {"pic": params, "prompt_token_ids": prompt_layout.tokens.tolist()}
    return RoutedRequest(_owner(tenant, rest), linking, prompt_layout, texts_of(chat), retrieved), rest


def _message(turn: Turn) -> dict[str, Any]:
    """A message with text only, for vLLM's own checks; its tokens are passed separately."""
    text = "".join(piece.text for piece in turn.pieces if isinstance(piece, PlainText))
    return {"role": turn.role, "content": text, **turn.more}


async def _completion(
    service: Service,
    backend: VllmBackend,
    tenant: Tenant,
    body: dict[str, Any],
    own: GenerationRequest,
    linking: Linking,
) -> tuple[RoutedRequest, dict[str, Any]]:
    """What a completion asks for, and the body for vLLM. Objects come before its prompt, each tokenized on its own."""
    rest = _without_ours(body, linking)
    if not own.cache_ids:
        return _as_it_is(backend, tenant, linking, rest)
    if body.get("echo") or isinstance(body.get("kv_transfer_params"), Mapping):
        raise ApiError(400, "echo, kv_transfer_params: not beside cache_ids", param="cache_ids")
    named = {"model": "", "prompt": body.get("prompt")}
    prompts = prompts_of(validated(_COMPLETION, named))
    before = await asyncio.to_thread(cached_pieces, service.find_cache(tenant), own.cache_ids)
    prompt_layout = [await backend.prompt(tenant, RawPrompt((*before, *prompt)), linking) for prompt in prompts]
    rest["prompt"] = [entry.tokens.tolist() for entry, _ in prompt_layout]
    rest["kv_transfer_params"] = {"pic": prompt_layout[0][1]}
    return RoutedRequest(_owner(tenant, rest), linking, prompt_layout[0][0], texts_of_body(body)), rest


def _as_it_is(
    backend: VllmBackend, tenant: Tenant, linking: Linking, rest: dict[str, Any]
) -> tuple[RoutedRequest, dict[str, Any]]:
    """A request whose prompt vLLM lays out; documents in it may be recognised."""
    params = backend.params(backend.policy_of(linking), linking)
    transfer = rest.get("kv_transfer_params") or {}
    if not isinstance(transfer, Mapping) or "pic" in transfer:  # the client says it, or vLLM refuses it
        return RoutedRequest(tenant, linking), rest
    rest["kv_transfer_params"] = {**transfer, "pic": params}
    texts, encoder = texts_of_body(rest), backend.serving.model.encoder
    if marker := next((text[slice(*found[0])] for text in texts if (found := encoder.markers(text))), None):
        _log.warning("pic: a request's text has the marker %s, which vLLM reads as a control token", marker)
    return RoutedRequest(_owner(tenant, rest), linking, texts=texts), rest


def _owner(tenant: Tenant, rest: Mapping[str, Any]) -> Tenant:
    """The tenant, under the salt of a body: without keys, a client may name one."""
    salt = rest.get("cache_salt")
    return Tenant(tenant.name, salt) if isinstance(salt, str) else tenant


def _without_ours(body: Mapping[str, Any], linking: Linking) -> dict[str, Any]:
    """The body without the fields that vLLM does not know."""
    rest = {name: value for name, value in body.items() if name not in _OURS}
    if linking.verifies and rest.get("seed") is None:  # both answers are sampled alike
        rest["seed"] = secrets.randbits(62)
    if isinstance(seed := rest.get("seed"), int) and (seed == -1 or seed >= 1 << 63):  # none, and too large, for vLLM
        rest["seed"] = seed % (1 << 63)
    return rest


def _has_references(body: Mapping[str, Any]) -> bool:
    """Whether a chat names documents, by parts or markers of its messages, or beside them."""
    if body.get("documents"):
        return True
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
        if any(part.get("type") in _REFERENCES for part in parts):
            return True
        marked = [*parts, message] if isinstance(message, Mapping) else parts
        if any(part.get(name) not in (None, False) for part in marked for name in _MARKERS):
            return True
    return False


async def _hand_on(
    service: Service, backend: VllmBackend, hand_on: HandOn, request: Request, body: Mapping[str, Any],
    routed: RoutedRequest, started: float,
) -> Response:  # fmt: skip
    """vLLM's own response, with the field `pic`."""
    try:
        with RequestTap() as tap:
            response = await hand_on(body, request, routed.tenant.salt)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False, include_input=False), 400) from error
    reported = RequestReport(service, backend, routed, tap, started)
    if isinstance(response, StreamingResponse):
        num_choices = int(body.get("n") or 1) * max(1, _num_prompts(body))
        response.body_iterator = reported.stream(response.body_iterator, num_choices)  # type: ignore[arg-type]
    elif isinstance(response, JSONResponse) and response.status_code == 200:
        whole = json.loads(bytes(response.body)) | {"pic": await reported.report()}
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        return JSONResponse(whole, headers=headers)
    return response


def _num_prompts(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class RequestReport:
    """What was done for one HTTP request: its field `pic`, and the metrics."""

    def __init__(
        self, service: Service, backend: VllmBackend, routed: RoutedRequest, tap: RequestTap, started: float
    ) -> None:
        self._service, self._backend, self._routed, self._tap = service, backend, routed, tap
        self._started = started

    async def report(self) -> Any:
        """The field `pic`, once all is answered: one, or one for each prompt. Counts it."""
        reports, linking = [], self._routed.linking
        for record in self._tap.prompts:
            reuse: Reuse = self._backend.reuse(linking, self._routed.prompt_layout, record)
            verified = {"verify": await self._backend.serving.verify(record)} if self._routed.linking.verifies else {}
            hint = hint_of(linking, self._routed.texts)
            reports.append(replace(reuse, hint=hint, retrieved=self._routed.retrieved).report() | verified)
            self._service.metrics.count_prompt(reuse)
            self._service.metrics.count_generated(sum(map(len, record.tokens.values())))
        if self._tap.first_s is not None:
            self._service.metrics.ttft.observe(self._tap.first_s - self._started)
        self._service.metrics.duration.observe(time.perf_counter() - self._started)
        if self._routed.linking.recognises:
            await self._backend.learn(self._routed.tenant, self._routed.texts)
        return reports[0] if len(reports) == 1 else reports

    async def stream(self, events: AsyncIterator[str | bytes], num_choices: int) -> AsyncGenerator[str | bytes, None]:
        """The events of vLLM's stream; the last one with a choice has the field `pic`."""
        num_ended = 0
        try:
            async for event in events:
                ended = _ended_choices(event)
                num_ended += ended
                is_last = ended and num_ended == num_choices
                yield await self._with_report(event) if is_last else event
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()

    async def _with_report(self, event: str | bytes) -> str:
        text = event if isinstance(event, str) else event.decode()
        said = json.loads(text.removeprefix("data: ")) | {"pic": await self.report()}
        return f"data: {json.dumps(said, ensure_ascii=False)}\n\n"


def _ended_choices(event: str | bytes) -> int:
    """How many choices an event of a stream ends."""
    text = event if isinstance(event, str) else event.decode()
    if not text.startswith("data: {") or '"finish_reason":"' not in text.replace('": "', '":"'):
        return 0
    choices = json.loads(text.removeprefix("data: ")).get("choices") or []
    return sum(choice.get("finish_reason") is not None for choice in choices)
