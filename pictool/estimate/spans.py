"""OpenTelemetry's spans of requests to models: as OTLP's JSON has them, and as its SDKs print them.

Prompts are in attributes (`gen_ai.input.messages`, or some for each message, as of OpenLLMetry and OpenInference) or in
events, one for each message or for all.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pictool.estimate.bodies import Record

_MESSAGE = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_DETAILS = "gen_ai.client.inference.operation.details"
_INDEXED = re.compile(
    r"(?:gen_ai\.prompt|llm\.input_messages)\.(\d{1,9})\.(?:message\.)?"
    r"(role|content|contents\.\d{1,9}\.message_content\.text)"
)
_ERRORS = (2, "STATUS_CODE_ERROR", "ERROR")
_OPERATIONS = ("gen_ai.operation.name", "llm.request.type", "openinference.span.kind")


def spans_of(record: Record) -> Iterator[Record]:
    """The spans of a line of OTLP; log records of one span are its events."""
    for resource in _list(record, "resourceSpans"):
        for scope in _list(resource, "scopeSpans"):
            yield from _list(scope, "spans")
    events = defaultdict[str, list[Record]](list)
    for resource in _list(record, "resourceLogs"):
        for scope in _list(resource, "scopeLogs"):
            for event in _list(scope, "logRecords"):
                events[str(event.get("spanId", ""))].append(event)
    for span, found in events.items():
        yield {"spanId": span, "attributes": [], "events": found, "startTimeUnixNano": found[0].get("timeUnixNano")}


def flat_span(span: Record) -> dict[str, Any]:
    """A span as a record: id, parent, operation, model, status, time, and body (None: it has no prompt)."""
    context = span["context"] if isinstance(span.get("context"), Mapping) else {}
    status = span["status"] if isinstance(span.get("status"), Mapping) else {}
    events = [_event(event) for event in _list(span, "events")]
    attributes = _attributes(span.get("attributes"))
    for name, fields in events:
        attributes |= fields if name == _DETAILS else {}
    body, moment = _body(attributes, events), span.get("startTimeUnixNano", span.get("start_time"))
    operation = next((attributes[name] for name in _OPERATIONS if name in attributes), "chat" if body else "")
    return {
        "id": span.get("spanId", span.get("span_id", context.get("span_id"))),
        "parent": span.get("parentSpanId", span.get("parent_id", span.get("parent_span_id"))),
        "operation": str(operation).lower(),
        "model": attributes.get("gen_ai.request.model", attributes.get("llm.model_name")),
        "status": "error" if status.get("code", status.get("status_code")) in _ERRORS else None,
        "time": int(moment) if isinstance(moment, str) and moment.isdecimal() and len(moment) < 20 else moment,
        "body": body,
    }  # fmt: skip


def _body(attributes: Record, events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    messages = (
        _value(attributes.get("gen_ai.input.messages"))
        or [message for name, fields in events for message in _messages(name, fields)]
        or _indexed(attributes)
        or _value(attributes.get("gen_ai.prompt"))
    )
    named = {"system": "gen_ai.system_instructions", "tools": "gen_ai.tool.definitions"}
    more = {name: _value(attributes[attribute]) for name, attribute in named.items() if attribute in attributes}
    return {"messages": messages, **more} if messages else None


def _messages(name: str, fields: Record) -> list[Any]:
    """The messages of an event."""
    if found := _MESSAGE.fullmatch(name):
        inner = _value(fields.get("gen_ai.event.content"))
        return [{"role": found[1], **fields, **(inner if isinstance(inner, Mapping) else {})}]
    if name == "gen_ai.content.prompt":
        prompt = _value(fields.get("gen_ai.prompt"))
        return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return []


def _indexed(attributes: Record) -> list[dict[str, Any]]:
    """Messages that have an attribute for each of their fields."""
    messages = defaultdict[int, dict[str, Any]](dict)
    for name, value in attributes.items():
        if found := _INDEXED.fullmatch(name):
            message = messages[int(found[1])]
            if found[2] == "role":
                message["role"] = value
            else:
                message["content"] = f"{message.get('content', '')}{value}"
    return [messages[number] for number in sorted(messages)]


def _event(event: Record) -> tuple[str, dict[str, Any]]:
    """The name and the fields of an event, or of a log record."""
    attributes, body = _attributes(event.get("attributes")), _plain(event.get("body"))
    name = event.get("name") or event.get("eventName") or attributes.get("event.name")
    return str(name), {**attributes, **(body if isinstance(body, dict) else {})}


def _attributes(listed: Any) -> dict[str, Any]:
    """Attributes by name: OTLP lists them with their types, SDKs print them as an object."""
    if isinstance(listed, Mapping):
        return dict(listed)
    pairs = [pair for pair in listed if isinstance(pair, Mapping)] if isinstance(listed, list) else []
    return {str(pair.get("key")): _plain(pair.get("value")) for pair in pairs}


def _plain(value: Any) -> Any:
    """A value of OTLP without its type."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "stringValue" | "intValue" | "doubleValue" | "boolValue":
            return inner
        case "arrayValue":
            return [_plain(part) for part in inner.get("values") or ()]
        case "kvlistValue":
            return _attributes(inner.get("values"))
    return value


def _value(value: Any) -> Any:
    """An attribute that may be the JSON of what it says."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _list(record: Record, name: str) -> list[Record]:
    value = record.get(name)
    return [inner for inner in value if isinstance(inner, Mapping)] if isinstance(value, list) else []
