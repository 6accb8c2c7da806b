"""Logs as gateways write them. Each has the same chats in its own form, among embeddings, failed requests, copies, and
observations around them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Chat = tuple[str, str]  # system text and question
Line = Mapping[str, Any] | str
SYSTEM = "You answer questions about the harbour of Bilstead, and name the document that you have it from. " * 4
NAMES = ("Ships", "Boats", "Tugs")
CHATS = [(SYSTEM, f"{name}: who may land there, and what does it cost?") for name in NAMES]
CHATS.append(("You translate.", 'Where is the it\'s-a-"harbour" café?\n\u2028'))
EMBEDDED = "a text to embed, which is no prompt"
TOLD = {"role": "assistant", "content": "Nobody knows."}


def openai(chat: Chat) -> dict[str, Any]:
    system, question = chat
    return {"model": "m", "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}


def anthropic(chat: Chat) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 9, "system": chat[0], "messages": [{"role": "user", "content": chat[1]}]}


def openai_embedding() -> dict[str, Any]:
    return {"model": "text-embedding-3-small", "input": EMBEDDED}


def litellm_spend(chats: Sequence[Chat]) -> list[Line]:
    def row(number: int, body: Any, **more: Any) -> Line:
        return {
            "request_id": f"chatcmpl-{number}",
            "call_type": "acompletion",
            "api_key": "88dc28",
            "spend": 0.01,
            "startTime": f"2026-01-01T00:00:0{number}Z",
            "model": "m",
            "metadata": '{"usage_object": {}}',
            "cache_hit": "None",
            "status": "success",
            "messages": "{}",
            "response": "{}",
            "proxy_server_request": json.dumps(body),
            **more,
        }

    good = [row(number, openai(chat)) for number, chat in enumerate(chats)]
    return [
        row(9, openai(chats[0]), status="failure", metadata={"error_information": {"error_code": "429"}}),
        *good,
        good[1],
        row(8, openai_embedding(), call_type="aembedding"),
        row(7, {"input": EMBEDDED}, call_type="amoderation"),
        row(6, openai((f"{SYSTEM[:9]}... (litellm_truncated skipped 99 chars) ...", "?"))),
    ]


def litellm_payloads(chats: Sequence[Chat]) -> list[Line]:
    def row(number: int, messages: Any, **more: Any) -> Line:
        return {
            "id": f"{number}",
            "call_type": "completion",
            "status": "success",
            "messages": messages,
            "startTime": 1.7e9 + number,
            "response": {"choices": [{"message": TOLD}]},
            "model": "m",
            **more,
        }

    good = [row(number, openai(chat)["messages"]) for number, chat in enumerate(chats)]
    other = {"status": "failure", "response": None, "error": {"code": 503}}
    return [
        row(9, openai(chats[1])["messages"], **other),
        *good,
        row(8, [{"role": "user", "content": EMBEDDED}], call_type="aembedding"),
        good[0],
    ]


def langfuse(chats: Sequence[Chat]) -> list[Line]:
    def observation(name: str, kind: str, parent: str | None, chat: Chat, **more: Any) -> Line:
        return {
            "id": name,
            "traceId": f"t{name[0]}",
            "type": kind,
            "parentObservationId": parent,
            "level": "DEFAULT",
            "startTime": "2026-01-01T00:00:00.000Z",
            "input": openai(chat)["messages"],
            "output": TOLD,
            **more,
        }

    lines: list[Line] = []
    for number, chat in enumerate(chats):
        inner = observation(f"{number}g", "GENERATION", f"{number}s", chat)
        deeper = observation(f"{number}h", "GENERATION", f"{number}g", chat)  # as if two integrations traced one call
        both = [inner, deeper] if number % 2 else [deeper, inner]
        lines += [observation(f"{number}s", "SPAN", None, chat), *both]
    failed = observation("9g", "GENERATION", None, chats[0], level="ERROR", statusMessage="429")
    trace = {"id": "t0", "sessionId": None, "tags": [], "input": openai(chats[0])["messages"], "output": None}
    return [trace, *lines, failed, observation("8e", "EMBEDDING", None, ("", EMBEDDED), input=EMBEDDED)]


def langfuse_page(chats: Sequence[Chat]) -> list[Line]:
    return [{"data": langfuse(chats), "meta": {"page": 1}}]


def helicone(chats: Sequence[Chat]) -> list[Line]:
    def row(number: int, body: Any, status: int = 200, path: str = "/v1/chat/completions") -> Line:
        return {
            "request_id": f"{number}",
            "request_created_at": "2026-01-01T00:00:00Z",
            "request_body": body,
            "request_path": f"https://embeddings.example.org{path}",
            "response_status": status,
            "response_body": {},
        }

    good = [row(number, openai(chat)) for number, chat in enumerate(chats)]
    return [
        row(8, openai(chats[0]), 429),
        row(9, openai(chats[0]), 503),
        *good,
        row(7, openai_embedding(), path="/v1/embeddings"),
        good[2],
    ]


def helicone_camel_case(chats: Sequence[Chat]) -> list[Line]:
    names = {
        "request_id": "requestId",
        "request_created_at": "requestCreatedAt",
        "request_body": "requestBody",
        "request_path": "requestPath",
        "response_status": "responseStatus",
        "response_body": "responseBody",
    }
    rows = [line for line in helicone(chats) if not isinstance(line, str)]
    return [{names[name]: value for name, value in row.items()} for row in rows]


def helicone_logger(chats: Sequence[Chat]) -> list[Line]:
    def row(body: Any, status: int = 200, url: str = "chat/completions") -> Line:
        return {
            "providerRequest": {"url": f"https://x.org/v1/{url}", "json": body, "meta": {}},
            "providerResponse": {"json": {}, "status": status, "headers": {}},
            "timing": {},
        }

    return [row(openai(chats[0]), 500), *map(row, map(openai, chats)), row(openai_embedding(), url="embeddings")]


def openai_batch(chats: Sequence[Chat]) -> list[Line]:
    def row(number: int, body: Any, url: str = "/v1/chat/completions") -> Line:
        return {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}

    good = [row(number, openai(chat)) for number, chat in enumerate(chats)]
    response = {"status_code": 200, "request_id": "r", "body": {"choices": [{"message": TOLD}]}}
    result = {"id": "batch_req_1", "custom_id": "request-0", "response": response, "error": None}
    moderation = {"model": "omni-moderation-latest", "input": EMBEDDED}
    return [result, *good, good[0], row(9, openai_embedding(), "/v1/embeddings"), row(8, moderation, "/v1/moderations")]


def anthropic_batch(chats: Sequence[Chat]) -> list[Line]:
    requests = [{"custom_id": f"{number}", "params": anthropic(chat)} for number, chat in enumerate(chats)]
    result = {
        "custom_id": "0",
        "result": {"type": "succeeded", "message": {"content": [{"type": "text", "text": "x"}]}},
    }
    return [{"requests": requests[:2]}, *requests[2:], requests[0], result]


def bedrock(chats: Sequence[Chat]) -> list[Line]:
    def row(
        number: int, body: Any, operation: str = "Converse", model: str = "anthropic.claude-v2:1", **more: Any
    ) -> Line:
        return {
            "schemaType": "ModelInvocationLog",
            "schemaVersion": "1.0",
            "timestamp": "2026-01-01T00:00:00Z",
            "accountId": "1",
            "region": "us-east-1",
            "requestId": f"r{number}",
            "operation": operation,
            "modelId": model,
            "input": {"inputContentType": "application/json", "inputBodyJson": body, "inputTokenCount": 5},
            "output": {"outputBodyJson": {}},
            **more,
        }

    def converse(chat: Chat) -> Any:
        return {"system": [{"text": chat[0]}], "messages": [{"role": "user", "content": [{"text": chat[1]}]}]}

    first, *others = [row(number, converse(chat)) for number, chat in enumerate(chats)]
    wrapped = {"events": [{"eventId": "1", "timestamp": 1, "message": json.dumps(first)}]}  # as CloudWatch exports it
    return [
        row(9, converse(chats[0]), errorCode="ThrottlingException"),
        wrapped,
        row(0, converse(chats[0])),
        *others,
        row(8, {"inputText": EMBEDDED}, "InvokeModel", "amazon.titan-embed-text-v2:0"),
        row(7, None),
    ]


def kong(chats: Sequence[Chat]) -> list[Line]:
    def row(number: int, body: Any, status: int = 200, mode: str = "oneshot", uri: str = "/chat") -> Line:
        payload = {} if body is None else {"request": json.dumps(body), "response": "{}"}
        part = {"payload": payload, "meta": {"request_model": "m", "request_mode": mode}, "usage": {"prompt_tokens": 3}}
        return {
            "ai": {"proxy" if number % 2 else "ai-proxy": part},
            "started_at": 1700000000000,
            "client_ip": "1.2.3.4",
            "request": {"id": f"{number}", "uri": uri, "method": "POST"},
            "response": {"status": status},
        }

    good = [row(number, openai(chat)) for number, chat in enumerate(chats)]
    plain = {
        "latencies": {},
        "started_at": 1,
        "client_ip": "1.2.3.4",
        "request": {"uri": "/users"},
        "response": {"status": 200},
    }
    embedding = row(8, openai_embedding(), uri="/v1/embeddings")
    return [row(9, openai(chats[0]), 429), plain, *good, good[1], embedding, row(7, None)]


def otlp(spans: Sequence[Mapping[str, Any]]) -> Line:
    def value(inner: Any) -> Any:
        return {"stringValue": inner} if isinstance(inner, str) else {"intValue": f"{inner}"}

    def listed(attributes: Mapping[str, Any]) -> Any:
        return [{"key": key, "value": value(inner)} for key, inner in attributes.items()]

    found = [
        {
            **span,
            "attributes": listed(span["attributes"]),
            "events": [{**event, "attributes": listed(event["attributes"])} for event in span.get("events", ())],
        }
        for span in spans
    ]
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "openai"}, "spans": found}]}]}


def span(
    name: str, attributes: Mapping[str, Any], parent: str = "", operation: str = "chat", **more: Any
) -> dict[str, Any]:
    return {
        "traceId": "t",
        "spanId": name,
        "parentSpanId": parent,
        "name": operation,
        "startTimeUnixNano": "1700000000000000000",
        "attributes": {"gen_ai.operation.name": operation, **attributes},
        "status": {},
        **more,
    }


def otel_messages(chats: Sequence[Chat]) -> list[Line]:
    def said(chat: Chat) -> dict[str, Any]:
        messages = [{"role": "user", "parts": [{"type": "text", "content": chat[1]}]}]
        system = [{"type": "text", "content": chat[0]}]
        return {"gen_ai.system_instructions": json.dumps(system), "gen_ai.input.messages": json.dumps(messages)}

    spans = [span(f"c{number}", said(chat), parent=f"a{number}") for number, chat in enumerate(chats)]
    agents = [span(f"a{number}", said(chat), operation="invoke_agent") for number, chat in enumerate(chats)]
    http = {**span("h0", {"http.method": "POST"}, parent="c0"), "attributes": {"http.method": "POST"}}
    failed = span("f", said(chats[0]), status={"code": 2})
    return [
        otlp([*spans[:2], agents[0], http]),
        otlp([*agents[1:], *spans[2:], failed]),
        otlp([span("e", {"gen_ai.request.model": "e"}, operation="embeddings"), span("n", {})]),
    ]


def otel_events(chats: Sequence[Chat]) -> list[Line]:
    def events(chat: Chat) -> list[Any]:
        names = ("gen_ai.system.message", "gen_ai.user.message")
        found = [{"name": name, "attributes": {"content": text}} for name, text in zip(names, chat, strict=True)]
        return [*found, {"name": "gen_ai.choice", "attributes": {"content": "no prompt"}}]

    spans = [span(f"{number}", {}, events=events(chat)) for number, chat in enumerate(chats)]
    printed = {**spans[0], "context": {"span_id": "0"}, "parent_id": None}
    del printed["spanId"], printed["parentSpanId"]
    return [printed, otlp(spans[1:])]


def otel_log_records(chats: Sequence[Chat]) -> list[Line]:
    def record(number: int, name: str, text: str) -> Any:
        body = {"kvlistValue": {"values": [{"key": "content", "value": {"stringValue": text}}]}}
        named = [{"key": "event.name", "value": {"stringValue": name}}]
        return {"timeUnixNano": "1700000000000000000", "spanId": f"{number}", "body": body, "attributes": named}

    return [
        {
            "resourceLogs": [
                {
                    "scopeLogs": [
                        {
                            "logRecords": [
                                record(number, "gen_ai.system.message", chat[0]),
                                record(number, "gen_ai.user.message", chat[1]),
                            ]
                        }
                    ]
                }
            ]
        }
        for number, chat in enumerate(chats)
    ]


def openllmetry(chats: Sequence[Chat]) -> list[Line]:
    def attributes(prefix: str, chat: Chat) -> dict[str, Any]:
        pairs = zip(("system", "user"), chat, strict=True)
        return {
            f"{prefix}.{number}{name}": value
            for number, (role, text) in enumerate(pairs)
            for name, value in ((".role", role), (".content", text))
        }

    spans = [span(f"{number}", attributes("gen_ai.prompt", chat)) for number, chat in enumerate(chats)]
    return [otlp(spans)]


def vllm_old(chats: Sequence[Chat]) -> list[Line]:
    lines = [
        f"INFO 11-24 10:00:0{number} [logger.py:43] Received request chatcmpl-{number}: prompt: {rendered(chat)!r}, "
        "params: SamplingParams(n=1, stop=[', params: ']), prompt_token_ids: None, prompt_embeds shape: None, "
        "lora_request: None."
        for number, chat in enumerate(chats)
    ]
    return ["INFO 11-24 10:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 0.0 tokens/s", *lines, lines[0]]


def vllm_today(chats: Sequence[Chat]) -> list[Line]:
    def both(number: int, chat: Chat) -> list[Line]:
        start = f"11-28 10:00:0{number} [request_logger.py:55] "
        details = f"prompt: {rendered(chat)!r}, prompt_token_ids: None, prompt_embeds shape: None."
        return [
            f"(APIServer pid=7) DEBUG {start}Request chatcmpl-{number} details: {details}",
            f"(APIServer pid=7) INFO {start}Received request chatcmpl-{number}: params: P(n=1), lora_request: None.",
        ]

    return [line for number, chat in enumerate(chats) for line in both(number, chat)]


def rendered(chat: Chat) -> str:
    return f"<|system|>\n{chat[0]}<|user|>\n{chat[1]}"


LOGS: tuple[Callable[[Sequence[Chat]], list[Line]], ...] = (
    litellm_spend, litellm_payloads, langfuse, langfuse_page, helicone, helicone_camel_case, helicone_logger,
    openai_batch, anthropic_batch, bedrock, kong, otel_messages, otel_events, otel_log_records, openllmetry,
    vllm_old, vllm_today,
)  # fmt: skip
