"""Bodies of requests, by API, one function each: from what a client sends to the prompts in it.

OpenAI's chat, completions and responses, Anthropic's messages, Gemini's contents, Bedrock's messages and texts. A body
here also has what its record says of it: a time, a tenant, the response.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pictool.estimate.segments import HashedBlocks, LoggedPrompt, Segment

Record = Mapping[str, Any]
MIN_MARKED = 64  # characters: as `pic serve` has it, a shorter document stays text
_TIMES = (
    "time", "timestamp", "ts", "startTime", "start_time", "created_at", "created", "arrival_time", "request_created_at",
    "requestCreatedAt", "started_at",
)  # fmt: skip
_TENANTS = ("tenant", "team_id", "user_api_key_team_id", "user_api_key_hash", "organization")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "ai": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
}  # fmt: skip


_CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint", "cachePoint")


class FormError(ValueError):
    """A record of no known form."""


def _chat(record: Record) -> list[LoggedPrompt]:
    messages = record["messages"]
    if isinstance(messages, str):
        return _one(record, [Segment("prompt", messages)])
    if not isinstance(messages, list):
        raise FormError("has messages that are not a list")
    if messages and all(isinstance(batch, list) for batch in messages):  # as LangChain sends several at once
        return [prompt for batch in messages for prompt in _chat({**record, "messages": batch})]
    segments = [*_tools(record), *_system(record.get("system"))]
    documents = [Segment("document", str(document["text"]), True) for document in _listed(record, "documents")]
    last = max((i for i, message in enumerate(messages) if _role(message) == "user"), default=-1)
    for number, message in enumerate(messages):
        segments += _message(message, documents if number == last else [])
    return _one(record, segments)


def _role(message: Any) -> str:
    """The kind of a message's author, in OpenAI's form, LangChain's, or its serialised constructors."""
    if not isinstance(message, Mapping):
        raise FormError("has a message that is not an object")
    role = message.get("role", message.get("type"))
    if role == "constructor" and isinstance(message.get("id"), list) and message["id"]:
        role = str(message["id"][-1]).removesuffix("Chunk").removesuffix("Message").lower()
    return _ROLES.get(role if isinstance(role, str) else "", "user")


def _message(message: Record, before: Sequence[Segment] = ()) -> list[Segment]:
    role = _role(message)
    inner = next((message[name] for name in ("kwargs", "data") if isinstance(message.get(name), Mapping)), message)
    content = inner.get("content", inner.get("parts"))
    segments = [Segment("template", f"<|{role}|>\n"), *before, *_content(role, content, inner)]
    if calls := inner.get("tool_calls"):
        segments.append(Segment(role, _dumped(calls)))
    return segments


def _content(kind: str, content: Any, message: Record) -> list[Segment]:
    """The parts of a message. Texts up to a cache marker are one document, as in `pic serve`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [_marked(kind, content) if message.get("cache_control") else Segment(kind, content)]
    if not isinstance(content, list):
        raise FormError("has a message whose content is neither text nor parts")
    segments, texts = list[Segment](), list[str]()
    for part in content:
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, Mapping):
            raise FormError("has a content part that is not an object")
        if part.get("type") == "document":
            segments += [Segment(kind, text) for text in texts]
            texts = []
            segments.append(_marked("document", _document_text(part)))
            continue
        texts.append(_part_text(part))
        if any(part.get(mark) for mark in _CACHE_MARKS):
            segments.append(_marked(kind, "".join(texts)))
            texts = []
    joined = [_marked(kind, "".join(texts))] if message.get("cache_control") and texts else []
    return [part for part in (*segments, *(joined or (Segment(kind, text) for text in texts))) if part.content != ""]


def _marked(kind: str, text: str) -> Segment:
    return (
        Segment("document" if kind == "user" else kind, text, True) if len(text) >= MIN_MARKED else Segment(kind, text)
    )


def _document_text(part: Record) -> str:
    source = part.get("source")
    if isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(source, Mapping):
        data = source.get("data", source.get("content"))
        return data if isinstance(data, str) else "".join(map(_part_text, data)) if isinstance(data, list) else ""
    return ""


def _part_text(part: Record) -> str:
    """The text of a content part; what is called or returned, as JSON. Images have none."""
    if isinstance(part.get("text"), str):
        return str(part["text"])
    for name in ("toolUse", "functionCall"):  # Bedrock's and Gemini's parts have no type
        if isinstance(part.get(name), Mapping):
            return _dumped({key: part[name][key] for key in ("name", "input", "args") if key in part[name]})
    if isinstance(part.get("toolResult"), Mapping):
        return _returned(part["toolResult"].get("content"))
    match part.get("type"):
        case "text":  # OpenTelemetry's
            return part["content"] if isinstance(part.get("content"), str) else ""
        case "tool_result":
            return _returned(part.get("content"))
        case "tool_call_response":
            return _returned(part.get("response", part.get("result")))
        case "tool_use" | "function_call" | "tool_call":
            return _dumped({name: part.get(name) for name in ("name", "input", "arguments") if name in part})
        case "thinking" | "reasoning":
            return str(part.get("thinking", part.get("content", "")))
    return _dumped(part["json"]) if "json" in part else ""


def _returned(content: Any) -> str:
    """What a tool returned."""
    if isinstance(content, list):
        return "".join(_part_text(inner) for inner in content if isinstance(inner, Mapping))
    return content if isinstance(content, str) else "" if content is None else _dumped(content)


def _system(system: Any) -> list[Segment]:
    if not system:
        return []
    content = system.get("parts") if isinstance(system, Mapping) else system
    return [Segment("template", "<|system|>\n"), *_content("system", content, {})]


def _tools(record: Record) -> list[Segment]:
    config = record.get("toolConfig")  # Bedrock's
    tools = config.get("tools") if isinstance(config, Mapping) else record.get("tools")
    return [Segment("system", _dumped(tool)) for tool in tools] if isinstance(tools, list) else []


def _responses(record: Record) -> list[LoggedPrompt]:
    """OpenAI's responses, and LMCache's agentic traces, whose `input` are messages of a chat."""
    segments, items = [*_tools(record), *_system(record.get("instructions"))], record["input"]
    if isinstance(items, str):
        return _one(record, [*segments, Segment("template", "<|user|>\n"), Segment("user", items)])
    if not isinstance(items, list):
        raise FormError("has an input that is neither text nor items")
    for item in items:
        if isinstance(item, Mapping) and "output" in item:
            output = item["output"] if isinstance(item["output"], str) else _dumped(item["output"])
            segments += [Segment("template", "<|tool|>\n"), Segment("tool", output)]
        elif isinstance(item, Mapping) and item.get("type") == "function_call":
            segments.append(Segment("assistant", _part_text(item)))
        else:
            segments += _message(item)
    return _one(record, segments)


def _completion(record: Record) -> list[LoggedPrompt]:
    prompt = record["prompt"]
    listed = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not isinstance(listed, list):
        raise FormError("has a prompt that is not text")
    found = []
    for part in listed:
        if not isinstance(part, str | list):
            raise FormError("has a prompt that is neither text nor token ids")
        content: Any = part if isinstance(part, str) else token_ids(part)
        found += _one(record, [Segment("prompt", content)])
    return found


def _contents(record: Record) -> list[LoggedPrompt]:
    segments = _system(record.get("systemInstruction", record.get("system_instruction")))
    for content in _listed(record, "contents"):
        segments += _message(content)
    return _one(record, segments)


def token_ids(ids: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise FormError("has token ids that are not whole numbers")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < 1 << 31:
        raise FormError("has token ids below 0 or above 2^31")
    return array.astype(np.int32)


def time_of(record: Record) -> float | None:
    """When a request came, in seconds since 1970; milli-, micro- and nanoseconds are told by their size."""
    for name in _TIMES:
        value = record.get(name)
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                continue
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e19:
            return next(value / unit for unit in (1.0, 1e3, 1e6, 1e9) if value / unit < 1e11)
    return None


def _tenant(record: Record) -> str:
    """Whose a request is, as far as the record says it."""
    places = [record]
    places += [record[name] for name in ("metadata", "extra") if isinstance(record.get(name), Mapping)]
    for place in places:
        for name in _TENANTS:
            if isinstance(place.get(name), str):
                return str(place[name])
    salt = record.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def _one(record: Record, segments: Sequence[Segment]) -> list[LoggedPrompt]:
    return [LoggedPrompt(tuple(segments), time_of(record), _tenant(record))]


def _listed(record: Record, name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(record: Record) -> list[LoggedPrompt]:
    return _one(record, [Segment("prompt", str(record["inputText"]))])


_APIS: dict[str, tuple[str, Callable[[Record], list[LoggedPrompt]]]] = {  # by the field that has the prompt
    "messages": ("chat or Messages", _chat),
    "contents": ("Gemini", _contents),
    "input": ("Responses", _responses),
    "prompt": ("completions", _completion),
    "inputText": ("Titan", _text),
}
_NOTHING: tuple[Any, ...] = (None, "", "{}", "[]", "null", [], {})


def is_nothing(value: Any) -> bool:
    """Whether a field is there without a prompt, as gateways leave it that do not log prompts."""
    return value in _NOTHING


def has_fields(value: Any) -> bool:
    """Whether a value is a body of a request, with a prompt or without."""
    return isinstance(value, Mapping) and any(name in value for name in _APIS)


def body_of(value: Any, is_input: bool = False) -> dict[str, Any] | None:
    """The body in a field: itself, its JSON, in a request's `body`, or its messages alone; None: no prompt is in it.

    Args:
        is_input: whether it is an observation's input, which may be a text, or one message.

    Raises:
        FormError: what is there is no body.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            if not is_input:
                raise
    if is_nothing(value):
        return None
    if isinstance(value, str) and is_input:
        return {"prompt": value}
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, Mapping):
        raise FormError("has a request that is not an object")
    for name in ("body", "kwargs", "request"):
        if not has_fields(value) and isinstance(value.get(name), Mapping):
            value = value[name]
    if is_input and "content" in value and not has_fields(value):
        return {"messages": [value]}  # one message
    if not has_fields(value):
        raise FormError("has none of the fields of a request")
    body = dict(value)
    if isinstance(messages := body.get("messages"), str) and messages.lstrip()[:1] == "[":
        body["messages"] = json.loads(messages)
    return body if any(not is_nothing(body.get(name)) for name in _APIS) else None


def prompts_of(body: Record) -> tuple[str, list[LoggedPrompt]]:
    """The API of a body, and the prompts in it; such without any text are none.

    Raises:
        FormError: a prompt is of no known form.
    """
    name, read = next(_APIS[field] for field in _APIS if not is_nothing(body.get(field)))
    return name, [prompt for prompt in read(body) if any(map(_has_text, prompt.segments))]


def _has_text(segment: Segment) -> bool:
    return segment.kind != "template" and not isinstance(segment.content, HashedBlocks) and len(segment.content) > 0
