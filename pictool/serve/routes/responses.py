"""OpenAI's Responses: a request becomes one of a chat, and the events of its answer theirs."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field, TypeAdapter

from pictool.serve.answers import AnswerCollector, StartedStream, sse, token_report, usage_of
from pictool.serve.bodies import BodyRoute, validated
from pictool.serve.errors import ApiError, not_found
from pictool.serve.kept import KeptResponse
from pictool.serve.routes.openai import POLICY, EventStream, chat_work, page
from pictool.serve.schema import (
    MAX_PARTS,
    ChatMessage,
    ChatRequest,
    DocumentPart,
    DocumentSource,
    Ids,
    Objects,
    OtherPart,
    PicOptions,
    StrictModel,
    TextPart,
)
from pictool.serve.service import Service, unless_gone
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    CallEvent,
    ChatPrompt,
    DeltaEvent,
    Event,
    FinishEvent,
    ReasoningEvent,
    TokenInfo,
)

_REFUSED = ("background", "conversation", "prompt", "moderation", "context_management")
_REFERENCE = "item_reference"
_CHAT = TypeAdapter(ChatRequest)
_LEASE_S = 1800.0  # the only time that prompt_cache_options has


class InputPart(StrictModel):
    """A part of an item. Which fields it has depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None
    file_id: str | None = None
    file_data: str | None = None
    prompt_cache_breakpoint: Any = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputItem(StrictModel):
    """An item of a conversation: a message, reasoning, a call, or its result."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | InputParts | None = None


class TextConfig(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class CacheOptions(StrictModel):
    mode: str | None = None
    ttl: Literal["30m"] | None = None


class PromptRequest(StrictModel):
    """What makes a prompt."""

    model: str
    input: str | Annotated[list[InputItem], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    cache_ids: Ids | None = None


class ResponsesRequest(PromptRequest):
    max_output_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    pic: bool | PicOptions | None = None
    verify: bool | None = None


def response_routes(service: Service) -> APIRouter:
    """The routes, for one service."""
    router = APIRouter(tags=["openai"], route_class=BodyRoute)

    @router.post("/v1/responses", response_model=None)
    async def create(
        request: Request, body: ResponsesRequest, x_pic_policy: POLICY = None
    ) -> Response | dict[str, Any]:
        started, tenant = time.perf_counter(), service.tenant(request)
        previous = _previous(service, tenant, body)
        _resolve(service, tenant, body)
        work = await chat_work(service, tenant, _chat_of(body, previous), x_pic_policy)
        if body.prompt_cache_options is not None and body.prompt_cache_options.ttl is not None:
            work = replace(work, ttl_s=_LEASE_S)
        form = ResponseForm(service, tenant, body, work, previous)
        events = service.events(work, started)
        if not body.stream:
            return await unless_gone(request, form.whole(events))
        return EventStream(form.stream(StartedStream(await unless_gone(request, anext(events)), events)))

    @router.post("/v1/responses/input_tokens")
    async def count(request: Request, body: PromptRequest) -> dict[str, Any]:
        tenant = service.tenant(request)
        _resolve(service, tenant, body)
        work = await chat_work(service, tenant, _chat_of(body, _previous(service, tenant, body)), None)
        assert isinstance(work.prompt, ChatPrompt)
        num_tokens = await unless_gone(request, service.backend.count(work.prompt, tenant))
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    _add_kept_routes(router, service)
    return router


def _add_kept_routes(router: APIRouter, service: Service) -> None:
    def kept(request: Request, name: str) -> KeptResponse:
        found = service.responses.find(service.tenant(request).id, name)
        if found is None:
            raise not_found(f"response {name[:80]!r}", "response_id", "response_not_found")
        return found

    @router.get("/v1/responses/{name}")
    def show(request: Request, name: str, stream: bool = False) -> dict[str, Any]:
        if stream:
            raise ApiError(400, "stream: a response that is over is not streamed; leave it out", param="stream")
        return kept(request, name).body

    @router.delete("/v1/responses/{name}")
    def remove(request: Request, name: str) -> dict[str, Any]:
        kept(request, name)
        service.responses.remove(service.tenant(request).id, name)
        return {"id": name, "object": "response", "deleted": True}

    @router.get("/v1/responses/{name}/input_items")
    def items(
        request: Request, name: str, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str = "",
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:  # fmt: skip
        given = kept(request, name).given
        listed = given if order == "asc" else given[::-1]
        if after:
            listed = listed[next((i + 1 for i, item in enumerate(listed) if item["id"] == after), len(listed)) :]
        return page(listed[:limit], len(listed) > limit)


# From a request to one of a chat


def _previous(service: Service, tenant: Tenant, body: PromptRequest) -> KeptResponse | None:
    """The response that a request follows. Raises ApiError 400: it is lost, deleted, or another tenant's."""
    if body.previous_response_id is None:
        return None
    found = service.responses.find(tenant.id, body.previous_response_id)
    if found is None:
        raise ApiError(
            400, f"previous_response_id: there is no response {body.previous_response_id[:80]!r} here; send its items",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    return found


def _resolve(service: Service, tenant: Tenant, body: PromptRequest) -> None:
    """Put kept items in the places of those that are named by their ids. Raises ApiError 400: one is not kept."""
    if not isinstance(body.input, list) or all(item.type != _REFERENCE for item in body.input):
        return
    kept = service.responses.items(tenant.id)
    for index, item in enumerate(body.input):
        if item.type == _REFERENCE:
            if (found := kept.get(item.id or "")) is None:
                raise ApiError(
                    400, f"input: {_REFERENCE} {str(item.id)[:80]!r} is not kept here; send the item", param="input"
                )
            body.input[index] = InputItem.model_validate(found.value)


def _chat_of(body: PromptRequest, previous: KeptResponse | None) -> ChatRequest:
    """The request of a chat that asks for the same. Raises ApiError."""
    for name in _REFUSED:
        if getattr(body, name):
            raise ApiError(400, f"{name}: is not supported here; leave it out", param=name)
    if body.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation: nothing is dropped here; leave it out", param="truncation")
    if body.input is None or body.input == []:
        raise ApiError(400, "input: is missing; send a text, or the items that come next", param="input")
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    own = body.input if isinstance(body.input, list) else [InputItem(role="user", content=body.input)]
    before = [] if previous is None else [*map(InputItem.model_validate, previous.history)]
    messages += _messages([*before, *own])
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]
    chat: dict[str, Any] = {
        "model": body.model, "messages": messages, "tools": list(map(_tool, functions)), "cache_ids": body.cache_ids,
        "tool_choice": _choice(body.tool_choice, functions), "response_format": _format(body.text),
    }  # fmt: skip
    if isinstance(body, ResponsesRequest):
        has_logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ())
        chat |= {
            "max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p,
            "logprobs": has_logprobs, "top_logprobs": body.top_logprobs, "pic": body.pic, "verify": body.verify,
        }  # fmt: skip
    return validated(_CHAT, chat)


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """The messages of items. What the model wrote, up to a result or another's message, is one turn."""
    messages, turn = list[ChatMessage](), dict[str, Any]()

    def end_turn() -> None:
        if turn:
            messages.append(ChatMessage(**{"role": "assistant", "content": None} | turn))
            turn.clear()

    for item in items:
        if item.type == "reasoning":
            text = "".join(part.text or "" for part in item.content) if isinstance(item.content, list) else ""
            turn |= {"reasoning_content": text, "thinking": text} if text else {}
        elif item.type == "function_call":
            function = {"name": _required(item, "name"), "arguments": _required(item, "arguments")}
            call = {"id": _required(item, "call_id"), "type": "function", "function": function}
            turn["tool_calls"] = [*turn.get("tool_calls", ()), call]
        elif item.type == "function_call_output":
            end_turn()
            parts = _parts(_required(item, "output"))
            messages.append(ChatMessage(role="tool", content=parts, tool_call_id=_required(item, "call_id")))  # type: ignore[call-arg]
        elif item.type != "message":
            raise ApiError(400, f"input: an item of type {item.type[:80]!r} is not known here", param="input")
        elif _required(item, "role") == "assistant":
            if "content" in turn or "tool_calls" in turn:
                end_turn()
            turn["content"] = _parts(_required(item, "content"))
        else:
            end_turn()
            messages.append(ChatMessage(role=item.role, content=_parts(_required(item, "content"))))  # type: ignore[arg-type]
    end_turn()
    return messages


def _required(item: InputItem, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(400, f"input: an item of type {item.type[:80]} needs {name}", param="input")
    return value


def _parts(content: str | list[InputPart]) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in content]


def _part(part: InputPart) -> Any:
    """A part of a chat's message; one of a kind that is not known is refused by its name."""
    if part.type in ("input_text", "output_text", "text", "refusal"):
        text = part.refusal if part.type == "refusal" else part.text
        return TextPart(type="text", text=text or "", prompt_cache_breakpoint=part.prompt_cache_breakpoint)
    if part.type == "input_file" and part.file_id is not None:
        return DocumentPart(type="document", source=DocumentSource(type="file", file_id=part.file_id))
    if part.type == "input_file" and part.file_data is not None:
        head, _, data = part.file_data.rpartition(",")
        kind = head.removeprefix("data:").partition(";")[0] or "application/pdf"
        return DocumentPart(type="document", source=DocumentSource(type="base64", media_type=kind, data=data))
    return OtherPart(type=part.type)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    if not isinstance(function.get("name"), str):
        raise ApiError(400, "tools: a function needs its name", param="tools")
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None, functions: Sequence[Mapping[str, Any]]) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    name = choice.get("name")
    if choice.get("type") != "function" or name not in [tool.get("name") for tool in functions]:
        named = name or choice.get("type")
        raise ApiError(400, f"tool_choice: there is no function {str(named)[:80]!r} here", param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


# From events to responses


class ResponseForm:
    """A response of an answer, as events; the last one has it whole. It is kept, unless the request says no."""

    def __init__(
        self, service: Service, tenant: Tenant, body: ResponsesRequest, work: AnswerRequest,
        previous: KeptResponse | None,
    ) -> None:  # fmt: skip
        self._service, self._tenant, self._body, self._work, self._previous = service, tenant, body, work, previous
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(service.clock())
        self._output, self._tokens, self._number = list[dict[str, Any]](), list[TokenInfo](), -1

    async def whole(self, events: AsyncGenerator[Event, None]) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for event in self._events(events):
            last = event
        response: dict[str, Any] = last["response"]
        return response

    async def stream(self, events: StartedStream) -> AsyncGenerator[bytes, None]:
        """The events of a response; an error ends it with one."""
        try:
            async for event in self._events(events):
                yield sse(event, event["type"])
        except Exception as error:
            told = ApiError.of(error).body()["error"]
            yield sse(self._event("error", code=told["code"], message=told["message"], param=told["param"]), "error")
        finally:
            await events.aclose()

    async def _events(self, events: AsyncIterator[Event]) -> AsyncGenerator[dict[str, Any], None]:
        collected, has_begun = AnswerCollector(), False
        async for event in events:
            collected.add(event)
            if not has_begun:
                has_begun = True
                for name in ("response.created", "response.in_progress"):
                    yield self._event(name, response=self._response("in_progress"))
            if isinstance(event, DeltaEvent | ReasoningEvent | CallEvent):
                for told in self._more(event):
                    yield told
            elif isinstance(event, FinishEvent):
                for told in self._end(event.reason == "length"):
                    yield told
        status = "incomplete" if collected.answers[0].reason == "length" else "completed"
        response = self._response(status, collected)
        if self._body.store is not False:
            self._service.responses.add(self._tenant.id, response, _given(self._body), self._previous)
        yield self._event(f"response.{status}", response=response)

    def _more(self, event: DeltaEvent | ReasoningEvent | CallEvent) -> list[dict[str, Any]]:
        """The events of more of an answer: what it adds to the item that is open, or to a new one."""
        if isinstance(event, CallEvent):
            return [*self._end(), *self._call(event)]
        self._tokens += event.tokens if isinstance(event, DeltaEvent) else ()
        if not event.text:
            return []
        kind, told = ("message" if isinstance(event, DeltaEvent) else "reasoning"), list[dict[str, Any]]()
        if not self._is_open(kind):
            told += [*self._end(), *self._begin(kind)]
        item = self._output[-1]
        item["content"][0]["text"] += event.text
        logprobs = self._logprobs(item) if kind == "message" else {}
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        return [*told, self._event(name, **self._place(), delta=event.text, **logprobs)]

    def _logprobs(self, item: dict[str, Any]) -> dict[str, Any]:
        tokens, self._tokens = [token_report(token) for token in self._tokens], []
        item["content"][0]["logprobs"] += tokens
        return {"logprobs": tokens}

    def _is_open(self, kind: str) -> bool:
        return bool(self._output) and self._output[-1]["type"] == kind and self._output[-1]["status"] == "in_progress"

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{kind[:2]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item)
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copied(item))
        item["content"].append(part)
        return [added, self._event("response.content_part.added", **self._place(), part=dict(part))]

    def _end(self, is_cut: bool = False) -> list[dict[str, Any]]:
        """The end of the item that is open, if any."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return []
        item = self._output[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        part = item["content"][0]
        name, more = "response.reasoning_text.done", {}
        if item["type"] == "message":
            more, name = self._logprobs(item), "response.output_text.done"
        return [
            self._event(name, **self._place(), text=part["text"], **more),
            self._event("response.content_part.done", **self._place(), part=dict(part)),
            self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copied(item)),
        ]

    def _call(self, call: CallEvent) -> list[dict[str, Any]]:
        item = {
            "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
        self._output.append(item)
        place = {"output_index": len(self._output) - 1, "item_id": item["id"]}
        begun, index = item | {"arguments": "", "status": "in_progress"}, place["output_index"]
        name = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{name}.delta", **place, delta=call.arguments),
            self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", output_index=index, item=dict(item)),
        ]

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"], "content_index": 0}

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": name, "sequence_number": self._number} | fields

    def _response(self, status: str, collected: AnswerCollector | None = None) -> dict[str, Any]:
        body = self._body
        more = {} if collected is None else {"usage": _usage(collected), "pic": collected.report()}
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._service.backend.model, "output": [_copied(item) for item in self._output], "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "metadata": body.metadata or {}, "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id, "store": body.store is not False,
            "max_output_tokens": body.max_output_tokens, "temperature": self._work.sampling.temperature,
            "top_p": self._work.sampling.top_p, "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "text": {"format": (body.text and body.text.format) or {"type": "text"}}, "truncation": "disabled",
            "prompt_cache_key": body.prompt_cache_key, "usage": None,
        } | more  # fmt: skip


def _copied(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    return {**item, **({"content": [dict(part) for part in item["content"]]} if "content" in item else {})}


def _given(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of a request, each with an id."""
    if not isinstance(body.input, list):
        content = [{"type": "input_text", "text": body.input or ""}]
        items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]
    else:
        items = [{"type": item.type, **item.model_dump(exclude_unset=True)} for item in body.input]
    return [{"id": f"msg_{secrets.token_hex(12)}", **item} for item in items]


def _usage(collected: AnswerCollector) -> dict[str, Any]:
    usage = usage_of([collected])
    return {
        "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"], "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip
