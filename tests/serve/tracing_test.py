"""OpenTelemetry: spans of requests and answers, as an OTLP receiver gets them; nothing that is secret is in them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pictool.errors import InputError
from pictool.linker.grid import parse_policy
from pictool.serve import tracing
from pictool.serve.backends.base import BackendSettings
from pictool.serve.backends.torch.backend import TorchBackend
from pictool.serve.service import Service
from pictool.serve.tenants import Keys, Tenant
from pictool.serve.tracing import make_provider
from pictool.store.store import Store
from serve.live import DOCS, NAME, QUESTION, Live, running, tiny_model

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "key-of-a-tenant"


@pytest.fixture(autouse=True)
def without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def traced(tmp_path: Path, provider: TracerProvider) -> Iterator[Live]:
    store = Store(tmp_path / "objects")
    backend = TorchBackend(tiny_model(), store, BackendSettings(parse_policy("legolink-4"), refresh_s=3600))
    keys = Keys({SECRET: Tenant("a", "salt of a")})
    with running(Service(backend, store.root, keys, tracer_provider=provider), store, SECRET) as live:
        yield live


def ask(live: Live, **more: Any) -> Any:
    body = {"model": NAME, "max_tokens": 2, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    return live.client.post("/v1/chat/completions", json=body | more, headers={"traceparent": PARENT})


def test_a_request_is_a_span_of_its_caller_s_trace_with_the_answer_in_it(tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with traced(tmp_path, provider) as live:
        usage = ask(live).json()["usage"]
        live.client.get("/health")
        assert ask(live, temperature=9).status_code == 422
    spans = exporter.get_finished_spans()
    by_name = {span.name: span for span in spans}
    answer, request = by_name[f"chat {NAME}"], by_name["POST /v1/chat/completions"]
    assert request.parent is not None and f"{request.parent.span_id:016x}" in PARENT
    assert answer.parent is not None and answer.context is not None and request.context is not None
    assert f"{answer.context.trace_id:032x}" in PARENT and not [span for span in spans if "health" in span.name]
    assert answer.attributes is not None
    shown = dict(answer.attributes)
    assert (shown["gen_ai.usage.input_tokens"], shown["gen_ai.usage.output_tokens"]) == (
        usage["prompt_tokens"], usage["completion_tokens"],
    )  # fmt: skip
    assert shown["gen_ai.operation.name"] == "chat" and shown["gen_ai.response.finish_reasons"] in (
        ("length",),
        ("stop",),
    )
    assert shown["pic.policy"] == "legolink-4" and "linked" in [event.name for event in answer.events]


def test_a_collector_that_is_gone_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_LAST_S", 0.01)
    is_back = threading.Event()

    class Hanging(InMemorySpanExporter):
        def shutdown(self) -> None:
            is_back.wait(60)

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Hanging()))
    tracing.shut_down(provider)
    assert not is_back.is_set() and "spans" in caplog.text
    is_back.set()


def test_no_span_has_a_key_or_a_text(tmp_path: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with traced(tmp_path, provider) as live:
        ask(live, messages=[{"role": "user", "content": DOCS[0]}], stop=["a-stop-string"])
        with live.client_of(None) as client:
            contents = {"contents": [{"role": "user", "parts": [{"text": DOCS[1]}]}]}
            path = f"/v1beta/models/{NAME}:generateContent?key={SECRET}"
            assert client.post(path, json=contents).status_code == 200
    text = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert "generateContent" in text
    for secret in (SECRET, "harbour", "Numbers", "a-stop-string", "salt of a"):
        assert secret not in text


class Receiver(BaseHTTPRequestHandler):
    """An OTLP receiver: it keeps what comes."""

    got: list[tuple[str, Span]]

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        sent = ExportTraceServiceRequest.FromString(data)
        for resource in sent.resource_spans:
            (name,) = (each.value.string_value for each in resource.resource.attributes if each.key == "service.name")
            self.got += [(name, span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_standard_variables_say_where_spans_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_provider() is None
    monkeypatch.setattr(Receiver, "got", [], raising=False)
    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        provider = make_provider()
        assert provider is not None
        with traced(tmp_path, provider) as live:
            ask(live)
        provider.shutdown()
        receiver.shutdown()
        thread.join()
    assert {(name, span.name) for name, span in Receiver.got} >= {
        ("mine", f"chat {NAME}"), ("mine", "POST /v1/chat/completions"),
    }  # fmt: skip


def test_they_can_be_turned_off_and_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    for name in ("opentelemetry.instrumentation.asgi", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(InputError, match=r"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT .*pictool\[otel\]"):
                make_provider()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_provider() is None
