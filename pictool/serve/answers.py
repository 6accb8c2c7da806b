"""Answers: the events of a request, collected once for all APIs, and what an API makes of them (`AnswerForm`)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, ClassVar

from fastapi import Response
from fastapi.responses import StreamingResponse

from pictool.serve.errors import ApiError
from pictool.serve.service import ApiCall
from pictool.serve.work import (
    AnswerRequest,
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
AnswerPart = DeltaEvent | ReasoningEvent | CallEvent


@dataclass
class PartialAnswer:
    """An answer as far as it has arrived. `parts` are its texts, reasoning and calls, in their order."""

    parts: list[AnswerPart] = field(default_factory=list)
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
    def merged(self) -> list[AnswerPart]:
        """The parts with texts that follow one another as one."""
        found: list[AnswerPart] = []
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


def usage_of(collected: Sequence[AnswerCollector]) -> dict[str, Any]:
    """The usage of a response that is made of these requests, as OpenAI's chats have it."""
    prompt = sum(request.reuse.num_tokens for request in collected)
    answers = [answer for request in collected for answer in request.listed]
    generated = sum(answer.num_tokens for answer in answers)
    details = {
        "cached_tokens": sum(request.reuse.cached for request in collected),
        "cache_write_tokens": sum(request.reuse.num_compiled for request in collected),
    }
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": sum(answer.num_reasoning for answer in answers)},
    }  # fmt: skip


class AnswerForm(ABC):
    """What an API makes of the answers of one response.

    Attributes:
        collected: what has come of each request of the response: one, except of a completion with several prompts.
        media_type, done: of its stream, and what ends one that does not fail.
    """

    media_type: ClassVar[str] = "text/event-stream"
    done: ClassVar[bytes] = b""

    def __init__(self) -> None:
        self.collected = list[AnswerCollector]()

    @property
    def latest(self) -> AnswerCollector:
        """What has come of the request whose events come now."""
        return self.collected[-1]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response, after all events."""

    @abstractmethod
    def chunks(self, event: Event) -> Iterable[dict[str, Any]]:
        """What an event, which is collected already, adds to the stream."""

    def add(self, event: Event) -> Iterable[dict[str, Any]]:
        """Collect an event; what it adds to the stream, all of which has to be read."""
        self.latest.add(event)
        return self.chunks(event)

    def end(self) -> Iterable[dict[str, Any]]:
        """What is added after the last event of a request."""
        return ()

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]:
        """The last chunk of a stream that fails."""

    def encode(self, chunk: dict[str, Any]) -> bytes:
        return sse(chunk)

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return self.encode(self.error(error))


def sse(chunk: Mapping[str, Any]) -> bytes:
    """A chunk as a server-sent event, whose name is its type, if it has one."""
    head = f"event: {chunk['type']}\n".encode() if "type" in chunk else b""
    return head + b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events. Its source is closed when it ends, even if the client disconnects."""

    def __init__(self, content: AsyncGenerator[bytes, None], media_type: str = AnswerForm.media_type) -> None:
        self._content = content
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type=media_type)

    async def stream_response(self, send: Any) -> None:
        try:
            await super().stream_response(send)
        finally:
            await self._content.aclose()


async def respond(
    call: ApiCall, works: Sequence[AnswerRequest], form: AnswerForm, streams: bool | None
) -> Response | dict[str, Any]:
    """The whole response, or its stream. Errors up to the first event are the response's status."""
    if not streams:
        for work in works:
            await call.unless_gone(_read(form, call.service.events(work, call.started)))
        return form.whole()
    begun = []
    for work in works:
        events = call.service.events(work, call.started)
        begun.append((await call.unless_gone(anext(events)), events))
    return EventStream(_stream(form, begun), form.media_type)


async def _read(form: AnswerForm, events: AsyncIterator[Event]) -> None:
    """Collect all events of a request. What a form makes of them on the way is not sent."""
    form.collected.append(AnswerCollector())
    async for event in events:
        list(form.add(event))
    list(form.end())


async def _stream(
    form: AnswerForm, works: Sequence[tuple[Event, AsyncGenerator[Event, None]]]
) -> AsyncGenerator[bytes, None]:
    """The chunks of requests, one after another. An error ends the stream with one.

    Args:
        works: of each request its first event, so that a bad one is refused before its stream begins, and the others.
    """
    try:
        for first, events in works:
            form.collected.append(AnswerCollector())
            for chunk in form.add(first):
                yield form.encode(chunk)
            async for event in events:
                for chunk in form.add(event):
                    yield form.encode(chunk)
            for chunk in form.end():
                yield form.encode(chunk)
        if form.done:
            yield form.done
    except Exception as error:
        yield form.failed(ApiError.of(error))
    finally:
        for _, events in works:
            await events.aclose()
