"""Calls and reasoning in a model's text, by its `response_template`, in a bounded process (`parser_process.py`)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pictool.bounded_process import BoundedProcess, ProcessFailure

_log = logging.getLogger("pictool.serve")
LIMIT_S, LIMIT_BYTES = 3.0, 1 << 30  # for a piece of an answer
_process = BoundedProcess("pictool.runtime.chat.parser_process", LIMIT_S, LIMIT_BYTES)


@dataclass(frozen=True)
class AnswerPart:
    """A piece of text or of reasoning, or a whole call: `text` is the object of its arguments, in JSON."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    name: str = ""


class AnswerParser:
    """Turns the text of one answer into parts, as it comes. Nothing of the text is lost: what cannot be parsed is text.

    Its methods wait for the process, `LIMIT_S` at most: not for an event loop.

    Args:
        template: of `transformers`' chat_parsing. prefix: the end of the prompt, which may have begun the answer.
        tools: that were offered, with the types of their arguments. takes_calls: whether calls may be made.
    """

    def __init__(
        self, template: Mapping[str, Any], prefix: str, tools: Sequence[Mapping[str, Any]], takes_calls: bool
    ) -> None:
        self._start: dict[str, Any] | None = {
            "template": template, "prefix": prefix, "tools": list(tools), "takes_calls": takes_calls
        }  # fmt: skip
        self._id, self._held, self._is_broken = secrets.token_hex(8), "", False

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that have become certain with more text."""
        return self._ask({"text": text})

    def end(self, end: str | None) -> list[AnswerPart]:
        """The other parts, once the text has ended: by an end token with this text, else (None) it was cut."""
        return self._ask({"text": "", "end": end})

    def _ask(self, request: dict[str, Any]) -> list[AnswerPart]:
        self._held += request["text"]
        if not self._is_broken:
            if self._start is not None:
                request["start"], self._start = self._start, None
            try:
                reply = _process.ask({"id": self._id, **request})
            except ProcessFailure as error:
                reply = {"failure": str(error)}
            if "failure" not in reply:
                self._held = self._held[len(self._held) - reply["held"] :]
                return [_part(kind, value) for kind, value in reply["parts"]]
            _log.warning("pic: an answer is not parsed: %s", reply["failure"])
            self._is_broken = True
        text, self._held = self._held, ""
        return [AnswerPart("text", text)] if text else []


def _part(kind: Any, value: Any) -> AnswerPart:
    return AnswerPart("call", value[1], value[0]) if kind == "call" else AnswerPart(kind, value)
