"""What a server records of each request for answers: counts, a span, and lines of its logs."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pictool.estimate.request_log import Named, Request
from pictool.estimate.segments import Segment
from pictool.serve.prompts.explained import summary
from pictool.serve.tracing import AnswerSpan
from pictool.serve.work import (
    AnswerRequest,
    Break,
    ChatPrompt,
    DeltaEvent,
    Event,
    FinishEvent,
    MarkedText,
    ObjectReference,
    Piece,
    PlainText,
    RawPrompt,
    Reuse,
    StartEvent,
    TokenizedText,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from pictool.estimate.request_log import RequestLog
    from pictool.serve.metrics import Metrics

_KINDS = {"developer": "system", "system": "system", "assistant": "assistant", "tool": "tool", "function": "tool"}
_log = logging.getLogger("pictool.serve")


@dataclass(frozen=True)
class Records:
    """Where requests are recorded; `clock` is that of the log."""

    metrics: Metrics
    clock: Callable[[], float]
    request_log: RequestLog | None = None
    tracer_provider: TracerProvider | None = None


class RequestRecord:
    """What is recorded of one request, by the events of its answers. `started` is by time.perf_counter."""

    def __init__(self, records: Records, model: str, work: AnswerRequest, started: float) -> None:
        self._records, self._work, self._started, self._came = records, work, started, records.clock()
        self._span = AnswerSpan(records.tracer_provider, work, model)
        self._reuse: Reuse | None = None
        self._has_text = False

    def add(self, event: Event) -> None:
        metrics = self._records.metrics
        self._span.add(event)
        if isinstance(event, StartEvent):
            self._reuse = event.reuse
            metrics.count_prompt(event.reuse)
            _log.info("pic: a request of %s: %s", self._work.tenant.name, summary(event.reuse.parts))
        elif isinstance(event, DeltaEvent) and not self._has_text:
            self._has_text = True
            metrics.ttft.observe(time.perf_counter() - self._started)
        elif isinstance(event, FinishEvent):
            metrics.count_generated(event.num_tokens)

    def end(self, error: BaseException | None = None) -> None:
        """The last event has come, or an error."""
        self._span.end(error)
        if error is not None:
            return
        seconds, log = time.perf_counter() - self._started, self._records.request_log
        self._records.metrics.duration.observe(seconds)
        if log is not None and self._reuse is not None:
            parts, num_linked = tuple(_segments(self._work.prompt)), self._reuse.linked + self._reuse.recomputed
            log.add(Request(self._came, self._work.tenant.name, parts, self._reuse.num_tokens, num_linked, seconds))


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
