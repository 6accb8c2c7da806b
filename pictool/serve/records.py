"""What a server records of each request for answers: counts, a span, and a line of its log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from pictool.serve.prompts.explained import summary
from pictool.serve.work import AnswerRequest, ChatPrompt, DeltaEvent, Event, FinishEvent, StartEvent

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from pictool.serve.metrics import Metrics

_log = logging.getLogger("pictool.serve")


class RequestRecord:
    """What is recorded of one request, by the events of its answers, from its place in the queue to its last token.

    Args:
        provider: of spans; None: there are none.
        started: when it came, by time.perf_counter.
    """

    def __init__(
        self, metrics: Metrics, provider: TracerProvider | None, model: str, work: AnswerRequest, started: float
    ) -> None:
        self._metrics, self._tenant, self._started = metrics, work.tenant.name, started
        self._span = None if provider is None else _started_span(provider, model, work)
        self._num_tokens, self._reasons, self._has_text = 0, list[str](), False

    def add(self, event: Event) -> None:
        """Note what an event says."""
        if isinstance(event, StartEvent):
            self._metrics.count_prompt(event.reuse)
            _log.info("pic: a request of %s: %s", self._tenant, summary(event.reuse.parts))
            if self._span is not None:
                self._span.set_attribute("gen_ai.usage.input_tokens", event.reuse.num_tokens)
                for name in ("policy", "chunks", "exact", "linked", "recomputed", "cached"):
                    self._span.set_attribute(f"pic.{name}", getattr(event.reuse, name))
                self._span.add_event("linked")
        elif isinstance(event, DeltaEvent) and not self._has_text:
            self._has_text = True
            self._metrics.ttft.observe(time.perf_counter() - self._started)
            if self._span is not None:
                self._span.add_event("first text")
        elif isinstance(event, FinishEvent):
            self._metrics.count_generated(event.num_tokens)
            self._num_tokens += event.num_tokens
            self._reasons.append(event.reason)

    def end(self, error: BaseException | None = None) -> None:
        """The last event has come, or an error."""
        if error is None:
            self._metrics.duration.observe(time.perf_counter() - self._started)
        if self._span is None:
            return
        self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)  # its message may quote a request
        self._span.end()


def _started_span(provider: TracerProvider, model: str, work: AnswerRequest) -> Span:
    operation = "chat" if isinstance(work.prompt, ChatPrompt) else "text_completion"
    sampling = work.sampling
    options = {"max_tokens": work.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    attributes: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.request.model": model}
    attributes |= {f"gen_ai.request.{name}": value for name, value in options.items() if value is not None}
    return provider.get_tracer("pictool").start_span(f"{operation} {model}", attributes=attributes)
