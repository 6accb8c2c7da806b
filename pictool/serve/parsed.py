"""Answers whose calls and reasoning are parsed out of the model's text: the events of all dialects."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from pictool.runtime.chat.parsing import AnswerParser, AnswerPart
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
            for part in _events(parts, index, calls):
                yield part
            if isinstance(event, FinishEvent):
                yield event
    finally:
        await events.aclose()


def _events(parts: Sequence[AnswerPart], index: int, calls: Counter[int]) -> Iterator[Event]:
    for part in parts:
        if part.kind == "call":
            yield CallEvent(index, calls[index], f"call_{secrets.token_hex(12)}", part.name, part.text)
            calls[index] += 1
        else:
            yield (DeltaEvent if part.kind == "text" else ReasoningEvent)(index, part.text)
