"""OpenAI's API: chat completions and completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Header
from fastapi.responses import Response

from pictool.serve.answers import DONE, AnswerForm, PartialAnswer, respond, usage_of
from pictool.serve.bodies import BodyRoute
from pictool.serve.errors import ApiError
from pictool.serve.prompts.requests import (
    cached_pieces,
    format_of,
    lease_seconds,
    linking_of,
    prompts_of,
    require_supported,
    sampling_of,
    turns_of,
)
from pictool.serve.schema import ChatRequest, CompletionRequest, GenerationRequest
from pictool.serve.service import ApiCall, Call
from pictool.serve.work import (
    AnswerRequest,
    CallEvent,
    ChatPrompt,
    DeltaEvent,
    Event,
    FinishEvent,
    RawPrompt,
    ReasoningEvent,
    TokenInfo,
)

POLICY = Annotated[str | None, Header(description="A policy as legolink-16; full or off: exact.")]
MAX_PROMPTS = 64
router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=None)
async def chat(call: Call, body: ChatRequest, x_pic_policy: POLICY = None) -> Response | dict[str, Any]:
    work = await chat_work(call, body, x_pic_policy)
    return await respond(call, [work], ChatForm(call.service.backend.model, body), body.stream)


@router.post("/v1/completions", response_model=None)
async def complete(call: Call, body: CompletionRequest, x_pic_policy: POLICY = None) -> Response | dict[str, Any]:
    works = await _completion_works(call, body, x_pic_policy)
    return await respond(call, works, CompletionForm(call.service.backend.model, body, len(works)), body.stream)


async def chat_work(
    call: ApiCall, body: ChatRequest, policy: str | None, lease_s: float | None = None
) -> AnswerRequest:
    """What a chat completion asks for. `lease_s` is the time of markers that have none. Raises ApiError."""
    service = call.service
    service.require_model(body.model)
    require_supported(body, service.backend)
    answer_format, schemas = await asyncio.to_thread(format_of, body, service.backend)
    await service.require_followed(call.tenant, schemas)
    turns = await asyncio.to_thread(turns_of, body.messages, call.find_cache, call.find_file, body.cache_ids or ())
    prompt = ChatPrompt(turns, () if body.tool_choice == "none" else tuple(body.tools or ()))
    linking, most = linking_of(body, policy), body.max_completion_tokens or body.max_tokens
    prompt, retrieved = await service.documents(call.tenant, body.documents or [], prompt, linking, most)
    return AnswerRequest(
        call.tenant, prompt, sampling_of(body), most, body.n or 1, (body.top_logprobs or 0) if body.logprobs else None,
        linking, answer_format, lease_seconds(body.messages, lease_s), retrieved,
    )  # fmt: skip


async def count_tokens(call: ApiCall, work: AnswerRequest) -> int:
    """The tokens of a chat's prompt."""
    assert isinstance(work.prompt, ChatPrompt)
    return await call.unless_gone(call.service.backend.count(work.prompt, call.tenant))


async def _completion_works(call: ApiCall, body: CompletionRequest, policy: str | None) -> list[AnswerRequest]:
    """What a completion asks for, a request for each prompt. Raises ApiError."""
    call.service.require_model(body.model)
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of: is not supported; use n", param="best_of")
    before = await asyncio.to_thread(cached_pieces, call.find_cache, body.cache_ids or ())
    prompts = prompts_of(body)
    if len(prompts) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt: has {len(prompts)} prompts, but at most {MAX_PROMPTS} are allowed", param="prompt"
        )
    return [
        AnswerRequest(
            call.tenant, RawPrompt((*before, *prompt)), sampling_of(body), body.max_tokens or 16, body.n or 1,
            body.logprobs, linking_of(body, policy),
        )
        for prompt in prompts
    ]  # fmt: skip


class _OpenAIForm(AnswerForm):
    """What both forms have in common. Choices are numbered through all prompts.

    Attributes:
        prefix: of a response's id. kind, chunk_kind: its type, and that of a chunk.
        opening: what the first chunk of each answer has, if it says nothing else.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    opening: ClassVar[dict[str, Any] | None] = None
    done: ClassVar[bytes] = DONE

    def __init__(self, model: str, body: GenerationRequest, num_prompts: int = 1) -> None:
        super().__init__()
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._n, self._num_prompts = body.n or 1, num_prompts
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._opened, self._held = set[int](), list[dict[str, Any]]()

    def whole(self) -> dict[str, Any]:
        answers = [answer for request in self.collected for answer in request.listed]
        reports = [request.report() for request in self.collected]
        choices = [
            self._choice(index, self.answer(answer), answer.tokens, _reason(answer))
            for index, answer in enumerate(answers)
        ]
        return self._head | {
            "object": self.kind, "choices": choices, "usage": usage_of(self.collected),
            "pic": reports if len(reports) > 1 else reports[0],
        }  # fmt: skip

    def chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if not isinstance(event, DeltaEvent | ReasoningEvent | CallEvent | FinishEvent):
            return
        index = (len(self.collected) - 1) * self._n + event.index
        if self.opening is not None and index not in self._opened:
            self._opened.add(index)
            yield self._chunk([self._choice(index, self.opening)])
        tokens = event.tokens if isinstance(event, DeltaEvent) else ()
        reason = _reason(self.latest.answers[event.index]) if isinstance(event, FinishEvent) else None
        chunk = self._chunk([self._choice(index, self.delta(event), tokens, reason)])
        if isinstance(event, FinishEvent) and event.index == self._n - 1:
            self._held.append(chunk)  # until it is known what was done, which may need the verification first
        else:
            yield chunk

    def end(self) -> Iterator[dict[str, Any]]:
        while self._held:
            yield self._held.pop() | {"pic": self.latest.report()}
        if self._has_usage and len(self.collected) == self._num_prompts:
            yield self._chunk([]) | {"usage": usage_of(self.collected)}

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[TokenInfo] = (), reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": index, "finish_reason": reason, "logprobs": self.logprobs(tokens)} | content

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.chunk_kind, "choices": choices}

    @abstractmethod
    def answer(self, answer: PartialAnswer) -> dict[str, Any]:
        """What the choice of an answer has of it."""

    @abstractmethod
    def delta(self, event: DeltaEvent | ReasoningEvent | CallEvent | FinishEvent) -> dict[str, Any]:
        """What the choice of a chunk has of an event."""

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        """The log-probabilities of a choice; None: they are not asked for."""


class ChatForm(_OpenAIForm):
    """Chat completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    opening: ClassVar[dict[str, Any] | None] = {"delta": {"role": "assistant", "content": ""}}

    def __init__(self, model: str, body: ChatRequest) -> None:
        super().__init__(model, body)
        self._has_logprobs = bool(body.logprobs)

    def answer(self, answer: PartialAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message |= {"content": answer.text or None, "tool_calls": list(map(_called, answer.calls))}
        return {"message": message}

    def delta(self, event: DeltaEvent | ReasoningEvent | CallEvent | FinishEvent) -> dict[str, Any]:
        match event:
            case FinishEvent():
                return {"delta": {}}
            case CallEvent():
                return {"delta": {"tool_calls": [{"index": event.number} | _called(event)]}}
        return {"delta": {"content" if isinstance(event, DeltaEvent) else "reasoning_content": event.text}}

    def logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        return {"content": list(map(token_report, tokens)), "refusal": None} if self._has_logprobs else None


class CompletionForm(_OpenAIForm):
    """Completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, body: CompletionRequest, num_prompts: int) -> None:
        super().__init__(model, body, num_prompts)
        self._has_logprobs = body.logprobs is not None

    def answer(self, answer: PartialAnswer) -> dict[str, Any]:
        return {"text": answer.text}

    def delta(self, event: DeltaEvent | ReasoningEvent | CallEvent | FinishEvent) -> dict[str, Any]:
        return {"text": event.text if isinstance(event, DeltaEvent) else ""}

    def logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        texts = [token.text for token in tokens]
        return {
            "tokens": texts, "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }  # fmt: skip


def _called(call: CallEvent) -> dict[str, Any]:
    """A call, as a chat's messages have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(answer: PartialAnswer) -> str | None:
    return "tool_calls" if answer.reason == "stop" and answer.calls else answer.reason


def token_report(token: TokenInfo) -> dict[str, Any]:
    """A token with its log-probability, as a chat has it."""
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in token.top]
    return {
        "token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": top
    }  # fmt: skip


def page(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


def page_after(listed: list[dict[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """The page of a list that follows the item with the id `after`; "": the first one."""
    if after:
        listed = listed[next((i + 1 for i, item in enumerate(listed) if item["id"] == after), len(listed)) :]
    return page(listed[:limit], len(listed) > limit)
