"""OpenTelemetry traces of requests: the standard variables OTEL_* say where they go. They hold no text and no key.

Attributes are those of the semantic conventions for generative AI where they are stable, and `pic.*`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

from pictool.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_UNTRACED = "health,metrics"
_LAST_S = 3.0  # for the spans that are left when a server ends
_log = logging.getLogger("pictool.serve")
_ADDRESSES = ("http.url", "http.target", "url.full")


def make_provider() -> TracerProvider | None:
    """What sends spans by OTLP over HTTP, as OTEL_* say; None: no variable names an endpoint, or they turn traces off.

    Raises:
        InputError: a variable names an endpoint, and the packages are not installed.
    """
    value = os.environ.get
    named = next((name for name in _ENDPOINTS if value(name)), None)
    if named is None or value("OTEL_SDK_DISABLED", "").lower() == "true" or value("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        import opentelemetry.instrumentation.asgi  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InputError(
            f"{named} is set, but traces need pip install 'pictool[otel]'; install it, or set OTEL_SDK_DISABLED=true"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "pic")}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def shut_down(provider: TracerProvider) -> None:
    """Send what is left, for a few seconds at most: a collector that is gone does not hold up the server's end."""
    sending = threading.Thread(target=provider.shutdown, name="pic-traces", daemon=True)
    sending.start()
    sending.join(_LAST_S)
    if sending.is_alive():
        _log.warning("pic: traces: no answer from the collector for %g s; the last spans are lost", _LAST_S)


def trace_requests(app: FastAPI, provider: TracerProvider) -> None:
    """A span for each request, child of the one that its header `traceparent` names."""
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    from opentelemetry.util.http import parse_excluded_urls

    app.add_middleware(
        OpenTelemetryMiddleware, tracer_provider=provider, exclude_spans=["receive", "send"],
        excluded_urls=parse_excluded_urls(_UNTRACED), server_request_hook=_without_query,
    )  # fmt: skip


def _without_query(span: Span, scope: dict[str, Any]) -> None:
    """Leave the query of an address out: Gemini's clients have their key in it."""
    for name, value in dict(getattr(span, "attributes", None) or {}).items():
        if name in _ADDRESSES:
            span.set_attribute(name, str(value).partition("?")[0])
    span.set_attribute("url.query", "")
