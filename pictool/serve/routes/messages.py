"""Anthropic's Messages: a request becomes one of a chat, and the events of its answer theirs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag, TypeAdapter

from pictool.serve.answers import AnswerForm, AnswerPart, PartialAnswer, respond
from pictool.serve.bodies import BodyRoute, validated
from pictool.serve.errors import ApiError
from pictool.serve.prompts.requests import forced_function, function_tool
from pictool.serve.routes.openai import POLICY, chat_work, count_tokens
from pictool.serve.schema import (
    MAX_PARTS,
    MAX_TOOLS,
    AnswerOptions,
    CacheControl,
    ChatMessage,
    ChatRequest,
    DocumentPart,
    Ids,
    OtherPart,
    Part,
    Parts,
    PromptModel,
    Stops,
    StrictModel,
    TextPart,
)
from pictool.serve.service import Call
from pictool.serve.work import AnswerRequest, CallEvent, Event, ReasoningEvent, Reuse

_CHAT = TypeAdapter(ChatRequest)
_LEASE_S = 300.0  # of a marker without a time


class ToolUse(StrictModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)
    cache_control: CacheControl | None = None


class ToolResult(StrictModel):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Parts | None = None
    cache_control: CacheControl | None = None


class Thinking(StrictModel):
    """What the model wrote before its answer."""

    type: Literal["thinking"]
    thinking: str


def _kind_of(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in ("tool_use", "tool_result", "thinking") else "part"


Block = Annotated[
    Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[Part, Tag("part")],
    Discriminator(_kind_of),
]
Blocks = Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]


class InputMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ToolDefinition(StrictModel):
    """A tool of the client's, or (with another type than custom) one of Anthropic's, which is left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: str | None = None
    format: JsonFormat | None = None


class ThinkingConfig(StrictModel):
    type: str


class CountRequest(PromptModel):
    """What makes a prompt."""

    refused = ("top_k", "container", "context_management", "diagnostics", "mcp_servers")

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    cache_control: CacheControl | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_ids: Ids | None = None


class MessagesRequest(CountRequest, AnswerOptions):
    max_tokens: int = Field(ge=0, le=1 << 31)
    stop_sequences: Stops | None = None


router = APIRouter(tags=["anthropic"], route_class=BodyRoute)


@router.post("/v1/messages", response_model=None)
async def create(call: Call, body: MessagesRequest, x_pic_policy: POLICY = None) -> Response | dict[str, Any]:
    work = await chat_work(call, _chat_of(body), x_pic_policy, _LEASE_S)
    return await respond(call, [work], MessageForm(call.service.backend.model, body, work), body.stream)


@router.post("/v1/messages/count_tokens")
async def count(call: Call, body: CountRequest) -> dict[str, int]:
    return {"input_tokens": await count_tokens(call, await chat_work(call, _chat_of(body), None))}


# From a request to one of a chat


def _chat_of(body: CountRequest) -> ChatRequest:
    """The request of a chat that asks for the same. Raises ApiError."""
    if body.messages[-1].role == "assistant":
        raise ApiError(
            400, "messages: the last message is the assistant's; prefilled answers are not supported", param="messages"
        )
    if body.cache_control is not None:
        _mark(body.messages[-1], body.cache_control)
    system = [] if body.system is None else [InputMessage(role="system", content=body.system)]
    messages = [message for given in (*system, *body.messages) for message in _messages_of(given)]
    tools = [_tool(tool) for tool in body.tools or () if tool.type in (None, "custom")]
    chat: dict[str, Any] = {
        "model": body.model, "messages": messages, "tools": tools, "tool_choice": _choice(body, tools),
        "cache_ids": body.cache_ids,
    }  # fmt: skip
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "output", "schema": body.output_config.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        chat |= {
            "max_tokens": body.max_tokens or 1, "temperature": body.temperature, "top_p": body.top_p,
            "stop": body.stop_sequences, "pic": body.pic, "verify": body.verify,
        }  # fmt: skip
    return validated(_CHAT, chat)


def _mark(message: InputMessage, mark: CacheControl) -> None:
    """Give the marker of a whole request to its last block, unless that has one."""
    if isinstance(message.content, str):
        message.content = [TextPart(type="text", text=message.content)]
    last = message.content[-1] if message.content else None
    if isinstance(last, TextPart | DocumentPart | ToolResult):
        last.cache_control = last.cache_control or mark


def _parts(blocks: Iterable[Any]) -> list[Any]:
    """Blocks as the parts of a chat's message; those that are none are refused by their type. Raises ApiError."""
    parts = list[Any]()
    for block in blocks:
        if isinstance(block, DocumentPart) and block.citations is not None and block.citations.get("enabled"):
            raise ApiError(400, "citations: are not supported; omit them", param="citations")
        parts.append(OtherPart(type=block.type) if isinstance(block, ToolUse | ToolResult | Thinking) else block)
    return parts


def _messages_of(given: InputMessage) -> list[ChatMessage]:
    """The messages of a chat: each result of a tool is one of its own."""
    if isinstance(given.content, str):
        return [ChatMessage(role=given.role, content=given.content)]
    if not given.content:
        return [ChatMessage(role=given.role, content=[])]
    if given.role == "assistant":
        return [_assistant(given.content)]
    messages = list[ChatMessage]()
    for is_result, blocks in groupby(given.content, lambda block: isinstance(block, ToolResult)):
        if is_result:
            messages += map(_result, blocks)
        else:
            messages.append(ChatMessage(role=given.role, content=_parts(blocks)))
    return messages or [ChatMessage(role=given.role, content=[])]


def _result(result: Any) -> ChatMessage:
    content = _parts(result.content) if isinstance(result.content, list) else result.content or ""
    more = {"tool_call_id": result.tool_use_id}
    return ChatMessage(role="tool", content=content, cache_control=result.cache_control, **more)


def _assistant(blocks: list[Any]) -> ChatMessage:
    """A turn of the model's: its texts, and beside them its reasoning and its calls."""
    texts = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, Thinking))
    uses = [block for block in blocks if isinstance(block, ToolUse)]
    calls = [{"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}} for use in uses]
    mark = next((use.cache_control for use in uses if use.cache_control), None)
    more: dict[str, Any] = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    more |= {"tool_calls": calls} if calls else {}
    return ChatMessage(role="assistant", content=_parts(texts), cache_control=mark, **more)


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    if not tool.name or tool.input_schema is None:
        raise ApiError(400, "tools: each needs a name and an input_schema", param="tools")
    named = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return function_tool(named)


def _choice(body: CountRequest, tools: list[dict[str, Any]]) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "any":
        return "required"
    return forced_function(choice.name, tools, "tool")


# From events to messages


class MessageForm(AnswerForm):
    """A message of an answer. One of no tokens has none: the prompt was read, and its texts are kept."""

    def __init__(self, model: str, body: MessagesRequest, work: AnswerRequest) -> None:
        super().__init__()
        self._id, self._model, self._is_empty = f"msg_{secrets.token_hex(12)}", model, body.max_tokens == 0
        self._has_thinking = body.thinking is None or body.thinking.type != "disabled"
        self._is_long = work.ttl_s is not None and work.ttl_s > 300
        self._opened: type[AnswerPart] | None = None  # the type of the block that is open
        self._index, self._has_begun = -1, False

    def whole(self) -> dict[str, Any]:
        content = [_block(part) for part in self._answer.merged if self._is_shown(part)]
        return self._head(self._answer) | {"content": content, "pic": self.latest.report()}

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": self._head(PartialAnswer()) | {"content": []}}
        if self._is_empty or not isinstance(event, AnswerPart) or not self._is_shown(event):
            return
        if self._opened is not type(event) or isinstance(event, CallEvent):
            yield from self._close()
            self._opened, self._index = type(event), self._index + 1
            empty = replace(event, arguments="{}") if isinstance(event, CallEvent) else replace(event, text="")
            yield {"type": "content_block_start", "index": self._index, "content_block": _block(empty)}
        yield {"type": "content_block_delta", "index": self._index, "delta": _delta(event)}

    def end(self) -> Iterator[dict[str, Any]]:
        yield from self._close()
        head = self._head(self._answer)
        delta = {name: head[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": head["usage"], "pic": self.latest.report()}
        yield {"type": "message_stop"}

    def error(self, error: ApiError) -> dict[str, Any]:
        return messages_error(error)

    def _close(self) -> list[dict[str, Any]]:
        return [] if self._opened is None else [{"type": "content_block_stop", "index": self._index}]

    @property
    def _answer(self) -> PartialAnswer:
        return PartialAnswer(reason="length") if self._is_empty else self.latest.answers[0]

    def _is_shown(self, part: AnswerPart) -> bool:
        if isinstance(part, CallEvent):
            return True
        return bool(part.text) and (self._has_thinking or not isinstance(part, ReasoningEvent))

    def _head(self, answer: PartialAnswer) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "stop_reason": _reason(answer), "stop_sequence": answer.stop,
            "usage": self._usage(self.latest.reuse, answer.num_tokens),
        }  # fmt: skip

    def _usage(self, reuse: Reuse, num_generated: int) -> dict[str, Any]:
        """The tokens of a prompt: those that were compiled for it, those that were reused, and all others."""
        written = min(reuse.num_compiled, reuse.num_tokens)
        read = min(max(0, reuse.cached - written), reuse.num_tokens - written)
        by_time = {"ephemeral_1h_input_tokens": written * self._is_long}
        return {
            "input_tokens": reuse.num_tokens - written - read, "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read, "output_tokens": num_generated,
            "cache_creation": by_time | {"ephemeral_5m_input_tokens": written * (not self._is_long)},
        }  # fmt: skip


def _reason(answer: PartialAnswer) -> str | None:
    if answer.reason == "length":
        return "max_tokens"
    if answer.stop is not None:
        return "stop_sequence"
    if answer.reason == "stop":
        return "tool_use" if answer.calls else "end_turn"
    return None


def _block(part: AnswerPart) -> dict[str, Any]:
    if isinstance(part, CallEvent):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments)}
    if isinstance(part, ReasoningEvent):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _delta(part: AnswerPart) -> dict[str, Any]:
    """What a part adds to its block."""
    if isinstance(part, CallEvent):
        return {"type": "input_json_delta", "partial_json": part.arguments}
    name = "thinking" if isinstance(part, ReasoningEvent) else "text"
    return {"type": f"{name}_delta", name: part.text}


# Errors

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error",
}  # fmt: skip


def is_messages(request: Request) -> bool:
    """Whether a request is in this form, so that its errors are, too."""
    return request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def messages_status(error: ApiError) -> int:
    """The status of an error in this form."""
    return {422: 400, 503: 529}.get(error.status, error.status)


def messages_error(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """An error in this form, with the fields of OpenAI's."""
    body = error.body()["error"] | {"type": _TYPES.get(messages_status(error), "api_error")}
    return {"type": "error", "error": body, "request_id": request_id}
