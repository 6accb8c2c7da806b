"""Parts of answers: what a backend sends, with the calls and the reasoning that are in an answer's text apart."""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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

Split = Callable[[Event], list[Event]]


def splitter_of(work: AnswerRequest, template: Mapping[str, Any] | None) -> Split | None:
    """What takes calls and reasoning out of the events of a request, which it is called with in order; None: nothing.

    Not for an event loop: an answer's text may be long.
    """
    if work.answer_format.keeps_special and template is not None:
        tools = work.prompt.tools if isinstance(work.prompt, ChatPrompt) else ()
        return _Parsing(lambda tail: AnswerParser(template, tail, tools, bool(tools))).split
    return _ForcedCalls().split if work.answer_format.is_call else None


class _Parsing:
    """Answers whose parts a parser tells apart. `make_parser` is called with the end of the prompt's text."""

    def __init__(self, make_parser: Callable[[str], AnswerParser]) -> None:
        self._tail = ""
        self._answers = defaultdict[int, _ParsedAnswer](lambda: _ParsedAnswer(make_parser(self._tail)))

    def split(self, event: Event) -> list[Event]:
        if isinstance(event, TailEvent):
            self._tail = event.text
            return []
        return [*self._answers[event.index].split(event)] if isinstance(event, DeltaEvent | FinishEvent) else [event]


class _ParsedAnswer:
    """The parts of one answer. Of reasoning its tokens are counted: a token is of the next part that is certain."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser, self._num_calls = parser, 0
        self._num_reasoning, self._num_held, self._is_reasoning = 0, 0, False

    def split(self, event: DeltaEvent | FinishEvent) -> Iterable[Event]:
        if isinstance(event, DeltaEvent):
            parts = self._parser.feed(event.text)
            self._num_held += event.num_tokens
            if event.tokens:
                yield DeltaEvent(event.index, "", event.tokens)
        else:
            parts = self._parser.end(event.end or None)
        if parts:
            self._is_reasoning = parts[-1].kind == "reasoning"
        if parts or isinstance(event, FinishEvent):
            self._num_reasoning += self._num_held if self._is_reasoning else 0
            self._num_held = 0
        for part in parts:
            yield self._event(part, event.index)
        if isinstance(event, FinishEvent):
            yield replace(event, num_reasoning=self._num_reasoning)

    def _event(self, part: AnswerPart, index: int) -> Event:
        if part.kind != "call":
            return (DeltaEvent if part.kind == "text" else ReasoningEvent)(index, part.text)
        self._num_calls += 1
        return CallEvent(index, self._num_calls - 1, _new_id(), part.name, part.text)


class _ForcedCalls:
    """Answers that must be calls, in JSON. One that is cut is text."""

    def __init__(self) -> None:
        self._texts = defaultdict[int, str](str)

    def split(self, event: Event) -> list[Event]:
        """Raises ApiError: a call that its client could not send back."""
        if isinstance(event, DeltaEvent):
            self._texts[event.index] += event.text
            return [DeltaEvent(event.index, "", event.tokens)] if event.tokens else []
        return [_forced_call(event, self._texts[event.index]), event] if isinstance(event, FinishEvent) else [event]


def _forced_call(end: FinishEvent, text: str) -> Event:
    if end.reason != "stop" or end.stop is not None:
        return DeltaEvent(end.index, text)
    try:
        require_shape(text.encode())
    except ValueError as error:
        raise ApiError(400, f"tool_choice: the call {error}; limit its schema", param="tool_choice") from error
    call = json.loads(text)  # the grammar saw to it that it is one
    return CallEvent(end.index, 0, _new_id(), call["name"], json.dumps(call["arguments"], ensure_ascii=False))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
