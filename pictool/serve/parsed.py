"""Answers whose calls and reasoning are parsed out of the model's text: the events of all dialects."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pictool.reading import require_shape
from pictool.runtime.chat.parsing import AnswerParser, AnswerPart
from pictool.serve.errors import ApiError
from pictool.serve.work import (
    AnswerRequest,
    CallEvent,
    ChatPrompt,
    DeltaEvent,
    Event,
    FinishEvent,
    ReasoningEvent,
    TailEvent,
)


async def parsed(
    events: AsyncGenerator[Event, None], work: AnswerRequest, template: Mapping[str, Any]
) -> AsyncGenerator[Event, None]:
    """The events of a request for answers with special tokens, with its calls and reasoning apart."""
    tools = work.prompt.tools if isinstance(work.prompt, ChatPrompt) else ()
    parsers, calls, tail = dict[int, AnswerParser](), Counter[int](), ""
    reasoning = defaultdict[int, _ReasoningCount](_ReasoningCount)
    try:
        async for event in events:
            if isinstance(event, TailEvent):
                tail = event.text
                continue
            if not isinstance(event, DeltaEvent | FinishEvent):
                yield event
                continue
            index = event.index
            if index not in parsers:
                parsers[index] = AnswerParser(template, tail, tools, bool(tools))
            if isinstance(event, DeltaEvent):
                parts = await asyncio.to_thread(parsers[index].feed, event.text)
                if event.tokens:
                    yield DeltaEvent(index, "", event.tokens)
            else:
                parts = await asyncio.to_thread(parsers[index].end, event.end or None)
            num_new = event.num_tokens if isinstance(event, DeltaEvent) else 0
            num_reasoning = reasoning[index].add(num_new, parts, isinstance(event, FinishEvent))
            for part in _events(parts, index, calls):
                yield part
            if isinstance(event, FinishEvent):
                yield replace(event, num_reasoning=num_reasoning)
    finally:
        await events.aclose()


@dataclass
class _ReasoningCount:
    """The tokens of an answer whose text is reasoning: a token is of the next part that becomes certain."""

    total: int = 0
    _held: int = 0
    _is_open: bool = False

    def add(self, num_tokens: int, parts: Sequence[AnswerPart], is_end: bool) -> int:
        self._held += num_tokens
        if parts:
            self._is_open = parts[-1].kind == "reasoning"
        if parts or is_end:
            self.total += self._held if self._is_open else 0
            self._held = 0
        return self.total


async def called(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The events of answers that must be calls, in JSON. One that is cut is text."""
    texts = defaultdict[int, str](str)
    try:
        async for event in events:
            if isinstance(event, DeltaEvent):
                texts[event.index] += event.text
                if event.tokens:
                    yield DeltaEvent(event.index, "", event.tokens)
                continue
            if isinstance(event, FinishEvent):
                yield _called(event, texts[event.index])
            yield event
    finally:
        await events.aclose()


def _called(end: FinishEvent, text: str) -> Event:
    """What a forced answer is. Raises ApiError: a call that its client could not send back."""
    if end.reason != "stop" or end.stop is not None:
        return DeltaEvent(end.index, text)
    try:
        require_shape(text.encode())
    except ValueError as error:
        raise ApiError(400, f"tool_choice: the call {error}; bound its schema", param="tool_choice") from error
    call = json.loads(text)  # the grammar saw to it that it is one
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return CallEvent(end.index, 0, f"call_{secrets.token_hex(12)}", call["name"], arguments)


def _events(parts: Sequence[AnswerPart], index: int, calls: Counter[int]) -> Iterator[Event]:
    for part in parts:
        if part.kind == "call":
            yield CallEvent(index, calls[index], f"call_{secrets.token_hex(12)}", part.name, part.text)
            calls[index] += 1
        else:
            yield (DeltaEvent if part.kind == "text" else ReasoningEvent)(index, part.text)
