"""Answers in the forms of OpenAI's API: whole, and as streams of events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pictool.serve.errors import ApiError
from pictool.serve.work import DeltaEvent, Event, FinishEvent, Reuse, StartEvent, TokenInfo, VerificationEvent

DONE = b"data: [DONE]\n\n"


@dataclass
class PartialAnswer:
    """An answer as far as it has arrived."""

    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    reason: str | None = None
    num_tokens: int = 0


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
        else:
            answer = self.answers.setdefault(event.index, PartialAnswer())
            if isinstance(event, DeltaEvent):
                answer.text += event.text
                answer.tokens += event.tokens
            else:
                answer.reason, answer.num_tokens = event.reason, event.num_tokens

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
    cached = sum(work.reuse.cached for work in works)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
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
        more = {"index": index, "finish_reason": answer.reason}
        logprobs = self._logprobs(answer.tokens)
        if self.is_chat:
            return more | {
                "message": {"role": "assistant", "content": answer.text, "refusal": None}, "logprobs": logprobs
            }  # fmt: skip
        return more | {"text": answer.text, "logprobs": logprobs}

    def chunk(self, index: int, delta: DeltaEvent | FinishEvent | None) -> dict[str, Any]:
        """An event of a stream: more text, the end of a choice, or (None) the beginning of a chat's."""
        text = delta.text if isinstance(delta, DeltaEvent) else ""
        tokens = delta.tokens if isinstance(delta, DeltaEvent) else ()
        choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(tokens)}
        choice["finish_reason"] = delta.reason if isinstance(delta, FinishEvent) else None
        if not self.is_chat:
            choice["text"] = text
        elif delta is None:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["delta"] = {"content": text} if isinstance(delta, DeltaEvent) else {}
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
            return {"content": [_token(token) for token in tokens], "refusal": None}
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token.text)
        return {
            "tokens": [token.text for token in tokens], "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens], "text_offset": offsets,
        }  # fmt: skip


def _token(token: TokenInfo) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in token.top]
    return {
        "token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": top
    }  # fmt: skip


def _reports(works: Sequence[AnswerCollector]) -> Any:
    reports = [work.report() for work in works]
    return reports[0] if len(reports) == 1 else reports


def sse(value: object) -> bytes:
    """An event of a stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


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
                if not isinstance(event, DeltaEvent | FinishEvent):
                    continue
                index = number * n + event.index
                if form.is_chat and index not in begun:
                    begun.add(index)
                    yield sse(form.chunk(index, None))
                if isinstance(event, FinishEvent) and event.index == n - 1:
                    ended.append(event)  # with what was done, which may need the verification first
                else:
                    yield sse(form.chunk(index, event))
            finished.append(collected)
            for event in ended:
                yield sse(form.chunk(number * n + event.index, event) | {"pic": collected.report()})
        if has_usage:
            yield sse(form.last_chunk(finished))
        yield DONE
    except Exception as error:
        yield sse(ApiError.of(error).body())
    finally:
        for events in works:
            await events.aclose()
