"""What of a request is written to the log of requests."""

from __future__ import annotations

import json

import numpy as np

from pictool.estimate.request_log import Named, Request
from pictool.estimate.segments import Segment
from pictool.serve.work import (
    AnswerRequest,
    Break,
    ChatPrompt,
    MarkedText,
    ObjectReference,
    Piece,
    PlainText,
    RawPrompt,
    Reuse,
    TokenizedText,
)

_KINDS = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}


def logged(work: AnswerRequest, reuse: Reuse, time: float, seconds: float) -> Request:
    """A request as it is logged, once it was answered."""
    parts = tuple(_segments(work.prompt))
    return Request(time, work.tenant.name, parts, reuse.num_tokens, reuse.linked + reuse.recomputed, seconds)


def _segments(prompt: ChatPrompt | RawPrompt) -> list[Segment | Named]:
    """In the order of a template that prints no documents: they come before the text of the last user's message."""
    if isinstance(prompt, RawPrompt):
        return [_segment("prompt", piece) for piece in prompt.pieces]
    segments: list[Segment | Named] = [Segment("system", json.dumps(tool)) for tool in prompt.tools]
    for turn in prompt.without_documents().turns:
        kind = _KINDS.get(turn.role, "user")
        segments.append(Segment("template", f"<|{kind}|>\n"))
        segments += [_segment(kind, piece) for piece in turn.pieces]
    return segments


def _segment(kind: str, piece: Piece) -> Segment | Named:
    match piece:
        case ObjectReference(key, num_tokens):
            return Named(key, num_tokens)
        case MarkedText(text):
            return Segment("document", text, True)
        case TokenizedText(ids):
            return Segment(kind, np.asarray(ids, dtype=np.int32))
        case PlainText(text):
            return Segment(kind, text)
        case Break():
            raise AssertionError("a request has none; they come with the layout")
