"""OpenAI's Responses: a request becomes one of a chat, and the events of its answer theirs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from pydantic import ConfigDict, Field, TypeAdapter

from pictool.serve.answers import AnswerCollector, AnswerForm, respond, usage_of
from pictool.serve.bodies import BodyRoute, validated
from pictool.serve.errors import ApiError, not_found
from pictool.serve.kept import KeptResponse
from pictool.serve.prompts.requests import forced_function, function_tool
from pictool.serve.routes.openai import POLICY, chat_work, count_tokens, page_after, token_report
from pictool.serve.schema import (
    MAX_PARTS,
    AnswerOptions,
    ChatMessage,
    ChatRequest,
    DocumentPart,
    DocumentSource,
    Ids,
    Objects,
    OtherPart,
    PromptModel,
    StrictModel,
    TextPart,
)
from pictool.serve.service import ApiCall, Call
from pictool.serve.work import AnswerRequest, CallEvent, DeltaEvent, Event, FinishEvent, ReasoningEvent, TokenInfo

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


class PromptRequest(PromptModel):
    """What makes a prompt."""

    refused = ("background", "conversation", "prompt", "moderation", "context_management")

    model: str
    input: str | Annotated[list[InputItem], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    cache_ids: Ids | None = None


class ResponsesRequest(PromptRequest, AnswerOptions):
    max_output_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None


router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/responses", response_model=None)
async def create(call: Call, body: ResponsesRequest, x_pic_policy: POLICY = None) -> Response | dict[str, Any]:
    previous = _previous(call, body)
    work = await chat_work(call, _chat_of(call, body, previous), x_pic_policy)
    if body.prompt_cache_options is not None and body.prompt_cache_options.ttl is not None:
        work = replace(work, ttl_s=_LEASE_S)
    return await respond(call, [work], ResponseForm(call, body, work, previous), body.stream)


@router.post("/v1/responses/input_tokens")
async def count(call: Call, body: PromptRequest) -> dict[str, Any]:
    work = await chat_work(call, _chat_of(call, body, _previous(call, body)), None)
    return {"object": "response.input_tokens", "input_tokens": await count_tokens(call, work)}


def _kept(call: Call, name: str) -> KeptResponse:
    found = call.service.responses.find(call.tenant.id, name)
    if found is None:
        raise not_found(f"response {name[:80]!r}", "response_id", "response_not_found")
    return found


Kept = Annotated[KeptResponse, Depends(_kept)]


@router.get("/v1/responses/{name}")
def show(kept: Kept, stream: bool = False) -> dict[str, Any]:
    if stream:
        raise ApiError(400, "stream: a finished response cannot be streamed; omit it", param="stream")
    return kept.body


@router.delete("/v1/responses/{name}")
def remove(call: Call, kept: Kept, name: str) -> dict[str, Any]:
    call.service.responses.remove(call.tenant.id, name)
    return {"id": name, "object": "response", "deleted": True}


@router.get("/v1/responses/{name}/input_items")
def items(
    kept: Kept, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str = "",
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:  # fmt: skip
    return page_after(kept.given if order == "asc" else kept.given[::-1], limit, after)


# From a request to one of a chat


def _previous(call: ApiCall, body: PromptRequest) -> KeptResponse | None:
    """The response that a request follows. Raises ApiError 400: it is lost, deleted, or another tenant's."""
    if body.previous_response_id is None:
        return None
    found = call.service.responses.find(call.tenant.id, body.previous_response_id)
    if found is None:
        raise ApiError(
            400, f"previous_response_id: no response {body.previous_response_id[:80]!r}; send its items",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
    return found


def _resolved(call: ApiCall, items: list[InputItem]) -> list[InputItem]:
    """Items, with kept ones in the places of those that are named by their ids. Raises ApiError 400: one is not."""
    resolved = list[InputItem]()
    for item in items:
        if item.type == _REFERENCE:
            if (kept := call.service.responses.item(call.tenant.id, item.id or "")) is None:
                raise ApiError(
                    400, f"input: {_REFERENCE} {str(item.id)[:80]!r} is not stored; send the item", param="input"
                )
            item = InputItem.model_validate(kept)
        resolved.append(item)
    return resolved


def _chat_of(call: ApiCall, body: PromptRequest, previous: KeptResponse | None) -> ChatRequest:
    """The request of a chat that asks for the same; its items are resolved. Raises ApiError."""
    if body.truncation not in (None, "disabled"):
        raise ApiError(400, "truncation: is not supported, nothing is dropped; omit it", param="truncation")
    if not isinstance(body.input, list):
        text = [] if body.input is None else [InputPart(type="input_text", text=body.input)]
        body.input = [InputItem(role="user", content=text)] if text else []
    if not body.input:
        raise ApiError(400, "input: is missing; send a string, or the next items", param="input")
    body.input = _resolved(call, body.input)
    messages = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    before = [] if previous is None else [*map(InputItem.model_validate, previous.history)]
    messages += _messages([*before, *body.input])
    tools = [_tool(tool) for tool in body.tools or () if tool.get("type") == "function"]
    chat: dict[str, Any] = {
        "model": body.model, "messages": messages, "tools": tools, "cache_ids": body.cache_ids,
        "tool_choice": _choice(body.tool_choice, tools), "response_format": _format(body.text),
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
            raise ApiError(400, f"input: items of type {item.type[:80]!r} are not supported", param="input")
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
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, "tools: a function needs its name", param="tools")
    return function_tool({name: tool.get(name) for name in ("name", "description", "parameters", "strict")})


def _choice(choice: str | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    name, is_function = choice.get("name"), choice.get("type") == "function"
    return forced_function(name or choice.get("type"), tools if name and is_function else (), "function")


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


# From events to responses


class ResponseForm(AnswerForm):
    """A response of an answer. It is kept, unless the request says no."""

    def __init__(
        self, call: ApiCall, body: ResponsesRequest, work: AnswerRequest, previous: KeptResponse | None
    ) -> None:
        super().__init__()
        self._call, self._body, self._work, self._previous = call, body, work, previous
        self._id, self._created = f"resp_{secrets.token_hex(12)}", int(call.service.clock())
        self._output, self._tokens, self._number = list[dict[str, Any]](), list[TokenInfo](), -1
        self._open: dict[str, Any] | None = None  # the item to which more may come, the last of the output

    def whole(self) -> dict[str, Any]:
        return self._response()

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if self._number < 0:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._response("in_progress"))
        if isinstance(event, CallEvent):
            yield from self._close()
            yield from self._function_call(event)
        elif isinstance(event, FinishEvent):
            yield from self._close(is_cut=event.reason == "length")
        elif isinstance(event, DeltaEvent | ReasoningEvent):
            self._tokens += event.tokens if isinstance(event, DeltaEvent) else ()
            if event.text:
                yield from self._text(event.text, "message" if isinstance(event, DeltaEvent) else "reasoning")

    def end(self) -> Iterator[dict[str, Any]]:
        response = self._response()
        if self._body.store is not False:
            self._call.service.responses.add(self._call.tenant.id, response, _given(self._body), self._previous)
        yield self._event(f"response.{response['status']}", response=response)

    def error(self, error: ApiError) -> dict[str, Any]:
        body = error.body()["error"]
        return self._event("error", **{name: body[name] for name in ("code", "message", "param")})

    def _text(self, text: str, kind: Literal["message", "reasoning"]) -> Iterator[dict[str, Any]]:
        """More of an item: the one that is open, or a new one."""
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        part = self._output[-1]["content"][0]
        part["text"] += text
        yield self._event(f"response.{part['type']}.delta", **self._place(), delta=text, **self._logprobs(part))

    def _logprobs(self, part: dict[str, Any]) -> dict[str, Any]:
        """Those of the tokens that have come since the last ones, which are added to a part that has any."""
        if "logprobs" not in part:
            return {}
        tokens, self._tokens = list(map(token_report, self._tokens)), []
        part["logprobs"] += tokens
        return {"logprobs": tokens}

    def _begin(self, kind: Literal["message", "reasoning"]) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{kind[:2]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._output.append(item)
        self._open = item
        yield self._item_event("added", item)
        item["content"].append(part)
        yield self._event("response.content_part.added", **self._place(), part=dict(part))

    def _close(self, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """The end of the item that is open, if any."""
        if self._open is None:
            return
        item, self._open = self._open, None
        item["status"] = "incomplete" if is_cut else "completed"
        (part,) = item["content"]
        yield self._event(f"response.{part['type']}.done", **self._place(), text=part["text"], **self._logprobs(part))
        yield self._event("response.content_part.done", **self._place(), part=dict(part))
        yield self._item_event("done", item)

    def _function_call(self, call: CallEvent) -> Iterator[dict[str, Any]]:
        item = {
            "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "completed", "call_id": call.id,
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
        self._output.append(item)
        name, place = "response.function_call_arguments", self._place()
        del place["content_index"]
        yield self._item_event("added", item | {"arguments": "", "status": "in_progress"})
        yield self._event(f"{name}.delta", **place, delta=call.arguments)
        yield self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name)
        yield self._item_event("done", item)

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1, "item_id": self._output[-1]["id"], "content_index": 0}

    def _item_event(self, what: str, item: dict[str, Any]) -> dict[str, Any]:
        return self._event(f"response.output_item.{what}", output_index=len(self._output) - 1, item=deepcopy(item))

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": name, "sequence_number": self._number} | fields

    def _response(self, status: str | None = None) -> dict[str, Any]:
        """The response, which has ended unless a status is given."""
        body, more = self._body, dict[str, Any]()
        if status is None:
            status = "incomplete" if self.latest.answers[0].reason == "length" else "completed"
            more = {"usage": _usage(self.latest), "pic": self.latest.report()}
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "model": self._call.service.backend.model, "output": deepcopy(self._output), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "metadata": body.metadata or {}, "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id, "store": body.store is not False,
            "max_output_tokens": body.max_output_tokens, "temperature": self._work.sampling.temperature,
            "top_p": self._work.sampling.top_p, "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "text": {"format": (body.text and body.text.format) or {"type": "text"}}, "truncation": "disabled",
            "prompt_cache_key": body.prompt_cache_key, "usage": None,
        } | more  # fmt: skip


def _given(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of a request, each with an id."""
    assert isinstance(body.input, list)
    items = [{"type": item.type, **item.model_dump(exclude_unset=True)} for item in body.input]
    return [{"id": f"msg_{secrets.token_hex(12)}", **item} for item in items]


def _usage(collected: AnswerCollector) -> dict[str, Any]:
    usage = usage_of([collected])
    return {
        "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"], "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip
