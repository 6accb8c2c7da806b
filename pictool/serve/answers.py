"""Answers in the forms of OpenAI's API: whole, and as streams of events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pictool.serve.errors import ApiError
from pictool.serve.work import (
    CallEvent,
    DeltaEvent,
    Event,
    FinishEvent,
    ReasoningEvent,
    Reuse,
    StartEvent,
    TailEvent,
    TokenInfo,
    VerificationEvent,
)

DONE = b"data: [DONE]\n\n"


@dataclass
class PartialAnswer:
    """An answer as far as it has arrived. `parts` are its texts, reasoning and calls, in their order."""

    parts: list[DeltaEvent | ReasoningEvent | CallEvent] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    reason: str | None = None
    num_tokens: int = 0
    num_reasoning: int = 0
    stop: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, DeltaEvent))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningEvent))

    @property
    def calls(self) -> list[CallEvent]:
        return [part for part in self.parts if isinstance(part, CallEvent)]

    @property
    def merged(self) -> list[DeltaEvent | ReasoningEvent | CallEvent]:
        """The parts with texts that follow one another as one."""
        found: list[DeltaEvent | ReasoningEvent | CallEvent] = []
        for kind, group in groupby(self.parts, type):
            if kind is CallEvent:
                found += group
            elif text := "".join(part.text for part in group if not isinstance(part, CallEvent)):
                found.append(DeltaEvent(0, text) if kind is DeltaEvent else ReasoningEvent(0, text))
        return found


@dataclass
class AnswerCollector:
    """The events of one request, collected into answers."""

    reuse: Reuse = Reuse("full")
    answers: dict[int, PartialAnswer] = field(default_factory=dict)
    verified: Mapping[str, Any] | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self.reuse = event.reuse
        elif isinstance(event, VerificationEvent):
            self.verified = event.report
        elif not isinstance(event, TailEvent):
            answer = self.answers.setdefault(event.index, PartialAnswer())
            if isinstance(event, FinishEvent):
                answer.reason, answer.num_tokens, answer.stop = event.reason, event.num_tokens, event.stop
                answer.num_reasoning = event.num_reasoning
            else:
                answer.parts.append(event)
                answer.tokens += event.tokens if isinstance(event, DeltaEvent) else ()

    @property
    def listed(self) -> list[PartialAnswer]:
        """The answers in order."""
        return [self.answers[index] for index in sorted(self.answers)]

    def report(self) -> dict[str, Any]:
        """The field `pic` of the response."""
        verified = {} if self.verified is None else {"verify": dict(self.verified)}
        return self.reuse.report() | verified


async def collect(events: AsyncIterator[Event]) -> AnswerCollector:
    """All events of a work."""
    collected = AnswerCollector()
    async for event in events:
        collected.add(event)
    return collected


def usage_of(works: Sequence[AnswerCollector]) -> dict[str, Any]:
    """The usage of a response that is made of these works."""
    prompt = sum(work.reuse.num_tokens for work in works)
    generated = sum(answer.num_tokens for work in works for answer in work.listed)
    reasoning = sum(answer.num_reasoning for work in works for answer in work.listed)
    cached = sum(work.reuse.cached for work in works)
    written = sum(work.reuse.num_compiled for work in works)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One of the two forms: ids and names, and how a choice shows text and, if `has_logprobs`, log-probabilities."""

    id: str
    model: str
    is_chat: bool
    has_logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, works: Sequence[AnswerCollector]) -> dict[str, Any]:
        """The response of works; choices are numbered through."""
        answers = [answer for work in works for answer in work.listed]
        name = "chat.completion" if self.is_chat else "text_completion"
        return self.head(name) | {
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of(works), "pic": _reports(works),
        }  # fmt: skip

    def _choice(self, index: int, answer: PartialAnswer) -> dict[str, Any]:
        more: dict[str, Any] = {"index": index, "finish_reason": _reason(answer.reason, bool(answer.calls))}
        logprobs = self._logprobs(answer.tokens)
        if self.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.calls:
                message |= {"content": answer.text or None, "tool_calls": [called(call) for call in answer.calls]}
            return more | {"message": message, "logprobs": logprobs}
        return more | {"text": answer.text, "logprobs": logprobs}

    def chunk(
        self, index: int, delta: DeltaEvent | ReasoningEvent | CallEvent | FinishEvent | None, has_calls: bool = False
    ) -> dict[str, Any]:
        """An event of a stream: more of an answer, its end, or (None) the beginning of a chat's."""
        text = delta.text if isinstance(delta, DeltaEvent) else ""
        tokens = delta.tokens if isinstance(delta, DeltaEvent) else ()
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(tokens)}
        choice["finish_reason"] = _reason(delta.reason, has_calls) if isinstance(delta, FinishEvent) else None
        if not self.is_chat:
            choice["text"] = text
        elif delta is None:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["delta"] = _delta(delta)
        return self.head("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": [choice]}

    def last_chunk(self, works: Sequence[AnswerCollector]) -> dict[str, Any]:
        """The event with the usage."""
        return self.head("chat.completion.chunk" if self.is_chat else "text_completion") | {
            "choices": [], "usage": usage_of(works)
        }  # fmt: skip

    def head(self, name: str) -> dict[str, Any]:
        """What every response and event begins with; `name` is of its kind."""
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        if self.is_chat:
            return {"content": [token_report(token) for token in tokens], "refusal": None}
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        return {
            "tokens": [token.text for token in tokens], "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens], "text_offset": offsets,
        }  # fmt: skip


def called(call: CallEvent) -> dict[str, Any]:
    """A call, as a chat's messages have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta(event: DeltaEvent | ReasoningEvent | CallEvent | FinishEvent) -> dict[str, Any]:
    if isinstance(event, CallEvent):
        return {"tool_calls": [{"index": event.number} | called(event)]}
    if isinstance(event, FinishEvent):
        return {}
    return {"content" if isinstance(event, DeltaEvent) else "reasoning_content": event.text}


def _reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def token_report(token: TokenInfo) -> dict[str, Any]:
    """A token with its log-probability, as a chat has it."""
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in token.top]
    return {
        "token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": top
    }  # fmt: skip


def _reports(works: Sequence[AnswerCollector]) -> Any:
    reports = [work.report() for work in works]
    return reports[0] if len(reports) == 1 else reports


def sse(value: object, name: str | None = None) -> bytes:
    """An event of a stream, perhaps with its name."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class StartedStream:
    """A stream of events whose first one has arrived, so that a bad request is refused before its stream begins."""

    def __init__(self, first: Event, events: AsyncGenerator[Event, None]) -> None:
        self._first: Event | None = first
        self._events = events

    def __aiter__(self) -> StartedStream:
        return self

    async def __anext__(self) -> Event:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._events)

    async def aclose(self) -> None:
        """End what gives the events."""
        await self._events.aclose()


async def stream(form: Form, works: Sequence[StartedStream], n: int, has_usage: bool) -> AsyncGenerator[bytes, None]:
    """The events of works, one after another, as OpenAI's clients read them. An error ends the stream with one."""
    finished: list[AnswerCollector] = []
    try:
        for number, events in enumerate(works):
            collected, begun = AnswerCollector(), set[int]()
            ended: list[FinishEvent] = []
            async for event in events:
                collected.add(event)
                if isinstance(event, TailEvent | StartEvent | VerificationEvent):
                    continue
                index = number * n + event.index
                if form.is_chat and index not in begun:
                    begun.add(index)
                    yield sse(form.chunk(index, None))
                if isinstance(event, FinishEvent) and event.index == n - 1:
                    ended.append(event)  # with what was done, which may need the verification first
                else:
                    yield sse(form.chunk(index, event, bool(collected.answers[event.index].calls)))
            finished.append(collected)
            for event in ended:
                has_calls = bool(collected.answers[event.index].calls)
                yield sse(form.chunk(number * n + event.index, event, has_calls) | {"pic": collected.report()})
        if has_usage:
            yield sse(form.last_chunk(finished))
        yield DONE
    except Exception as error:
        yield sse(ApiError.of(error).body())
    finally:
        for events in works:
            await events.aclose()
