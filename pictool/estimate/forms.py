"""The forms in which requests are logged, one function each: from a record to the prompts in it.

OpenAI's chat, completions, responses and batch files, Anthropic's messages, Gemini's contents, LiteLLM's payloads and
LangSmith's runs, Mooncake's traces, LMCache's agentic traces (which are chats), vLLM's KV events and the lines of its
request log, and what `pic serve --request-log` writes.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pictool.estimate.hashing import mixed
from pictool.estimate.segments import BYTES_PER_TOKEN, KINDS, HashedBlocks, LoggedPrompt, Segment
from pictool.reading import shown

Record = Mapping[str, Any]
MIN_MARKED = 64  # characters: as `pic serve` has it, a shorter document stays text
MOONCAKE_TOKENS = 512  # of a block of its traces
_TIMES = ("time", "timestamp", "ts", "startTime", "start_time", "created_at", "created", "arrival_time")
_TENANTS = ("tenant", "team_id", "user_api_key_team_id", "user_api_key_hash", "organization")
_WRAPPERS = ("body", "request", "request_body", "request_json", "kwargs", "proxy_server_request")
_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "ai": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
}  # fmt: skip
_VLLM = re.compile(
    r"Received request (?P<id>\S+?):? (?:details: )?prompt: (?P<prompt>None|'.*?'|\".*?\"), (?:params: .*?)?"
    r"prompt_token_ids: (?P<ids>None|\[[\d, ]*\])|Request (?P<id2>\S+) details: prompt: (?P<prompt2>None|'.*'|\".*\"), "
    r"prompt_token_ids: (?P<ids2>None|\[[\d, ]*\])"
)
_VLLM_TIME = re.compile(r"\b(?P<month>\d\d)-(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\b")


class FormError(ValueError):
    """A record of no known form."""


class Forms:
    """Turns records into prompts. It keeps what KV events said of blocks, and nothing else."""

    def __init__(self) -> None:
        self.found = dict[str, int]()  # prompts by the name of their form
        self._blocks = dict[Any, tuple[Any, tuple[int, ...]]]()  # of KV events: (parent, token ids) by hash

    def prompts(self, record: Any) -> list[LoggedPrompt]:
        """The prompts of a record.

        Raises:
            FormError: its form is not known. ValueError, TypeError, KeyError: it is not as its form has it.
        """
        if isinstance(record, list) and len(record) > 1 and isinstance(record[1], list):
            record = {"ts": record[0], "events": record[1]}
        if not isinstance(record, Mapping):
            raise FormError("is no object of a known form")
        for name, keys, read in _READERS:
            if all(key in record for key in keys):
                found = read(self, record)
                self.found[name] = self.found.get(name, 0) + len(found)
                return found
        raise FormError("has none of the fields of a request")

    def line(self, text: str) -> list[LoggedPrompt] | None:
        """The prompts of a line of vLLM's log; None: it is none of a request."""
        found = _VLLM.search(text)
        if found is None:
            return None
        ids, prompt = found["ids"] or found["ids2"], found["prompt"] or found["prompt2"]
        if ids and ids not in ("None", "[]"):
            content: Any = np.fromstring(ids[1:-1], dtype=np.int64, sep=",").astype(np.int32)
        elif prompt and prompt != "None":
            content = str(ast.literal_eval(prompt))
        else:
            return []
        self.found["vLLM request log"] = self.found.get("vLLM request log", 0) + 1
        moment = _VLLM_TIME.search(text[: found.start()])
        return [LoggedPrompt((Segment("prompt", content),), None if moment is None else _log_time(moment))]

    def kv_events(self, record: Record) -> list[LoggedPrompt]:
        """The prompts whose blocks were stored: each event has its token ids, and the block that it continues."""
        prompts = []
        for event in record["events"]:
            if isinstance(event, list) and event:
                event = {
                    "type": event[0],
                    **dict(zip(("block_hashes", "parent_block_hash", "token_ids"), event[1:], strict=False)),
                }
            if not isinstance(event, Mapping) or event.get("type", event.get("event_type")) != "BlockStored":
                continue
            hashes, parent, tokens = event["block_hashes"], event.get("parent_block_hash"), event["token_ids"]
            ids = [int(token) for token in tokens]
            size = len(ids) // max(1, len(hashes))
            before = self._before(parent)
            for number, name in enumerate(hashes):
                self._blocks[_hashable(name)] = (parent, tuple(ids[number * size : (number + 1) * size]))
                parent = name
            prompts.append(LoggedPrompt((Segment("prompt", _token_ids(before + ids)),), _time(record)))
        return prompts

    def _before(self, name: Any) -> list[int]:
        parts, seen = list[tuple[int, ...]](), set[Any]()
        while (name := _hashable(name)) in self._blocks and name not in seen:
            seen.add(name)
            name, ids = self._blocks[name]
            parts.append(ids)
        return [token for ids in reversed(parts) for token in ids]


def _hashable(name: Any) -> Any:
    return name if isinstance(name, int | str | None) else json.dumps(name)


def _token_ids(ids: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise FormError("has token ids that are no whole numbers")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < 1 << 31:
        raise FormError("has token ids below 0 or above 2^31")
    return array.astype(np.int32)


def _log_time(found: re.Match[str]) -> float:
    fields = {name: int(text) for name, text in found.groupdict().items()}
    return datetime(datetime.now(tz=UTC).year, tzinfo=UTC, **fields).timestamp()  # a log has no year


def _time(record: Record) -> float | None:
    """When a request came, in seconds since 1970; milliseconds are told by their size."""
    for name in _TIMES:
        value = record.get(name)
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                continue
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18:
            seconds = float(value)
            return seconds if seconds < 1e11 else seconds / 1e3 if seconds < 1e14 else seconds / 1e9
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


def _chat(forms: Forms, record: Record) -> list[LoggedPrompt]:
    messages = record["messages"]
    if isinstance(messages, str):
        return _one(record, [Segment("prompt", messages)])
    if not isinstance(messages, list):
        raise FormError("has messages that are no list")
    segments = [*_tools(record), *_system(record.get("system"))]
    documents = [Segment("document", str(document["text"]), True) for document in _listed(record, "documents")]
    last = max((i for i, message in enumerate(messages) if _role(message) == "user"), default=-1)
    for number, message in enumerate(messages):
        segments += _message(message, documents if number == last else [])
    return _one(record, segments)


def _role(message: Any) -> str:
    """The kind of a message's author, in OpenAI's form, LangChain's, or its serialised constructors."""
    if not isinstance(message, Mapping):
        raise FormError("has a message that is no object")
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
            raise FormError("has a content part that is no object")
        if part.get("type") == "document":
            segments += [Segment(kind, text) for text in texts]
            texts = []
            segments.append(_marked("document", _document_text(part)))
            continue
        texts.append(_part_text(part))
        if part.get("cache_control") or part.get("prompt_cache_breakpoint"):
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
    match part.get("type"):
        case "tool_result":
            content = part.get("content")
            return content if isinstance(content, str) else "".join(
                _part_text(inner) for inner in content or () if isinstance(inner, Mapping)
            )  # fmt: skip
        case "tool_use" | "function_call":
            return _dumped({name: part.get(name) for name in ("name", "input", "arguments") if name in part})
        case "thinking" | "reasoning":
            return str(part.get("thinking", ""))
    return ""


def _system(system: Any) -> list[Segment]:
    if not system:
        return []
    content = system.get("parts") if isinstance(system, Mapping) else system
    return [Segment("template", "<|system|>\n"), *_content("system", content, {})]


def _tools(record: Record) -> list[Segment]:
    tools = record.get("tools")
    return [Segment("system", _dumped(tool)) for tool in tools] if isinstance(tools, list) else []


def _responses(forms: Forms, record: Record) -> list[LoggedPrompt]:
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


def _completion(forms: Forms, record: Record) -> list[LoggedPrompt]:
    prompt = record["prompt"]
    listed = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not isinstance(listed, list):
        raise FormError("has a prompt that is no text")
    found = []
    for part in listed:
        if not isinstance(part, str | list):
            raise FormError("has a prompt that is neither text nor token ids")
        content: Any = part if isinstance(part, str) else _token_ids(part)
        found += _one(record, [Segment("prompt", content)])
    return found


def _contents(forms: Forms, record: Record) -> list[LoggedPrompt]:
    segments = _system(record.get("systemInstruction", record.get("system_instruction")))
    for content in _listed(record, "contents"):
        segments += _message(content)
    return _one(record, segments)


def _run(forms: Forms, record: Record) -> list[LoggedPrompt]:
    """A LangSmith run of a model; of a chain, the same messages come again with its calls of models."""
    if record["run_type"] not in ("llm", "chat_model"):
        return []
    inputs = record["inputs"]
    more = {name: record[name] for name in ("start_time", "extra") if name in record} | {
        "response": record.get("outputs")
    }
    if "prompts" in inputs:
        return _completion(forms, more | {"prompt": inputs["prompts"]})
    messages = inputs["messages"]
    batches = messages if messages and isinstance(messages[0], list) else [messages]
    return [prompt for batch in batches for prompt in _chat(forms, more | {"messages": batch})]


def _mooncake(forms: Forms, record: Record) -> list[LoggedPrompt]:
    hashes = mixed(np.asarray([int(name) % (1 << 64) for name in record["hash_ids"]], dtype=np.uint64))
    if not len(hashes):
        return []
    tokens = np.full(len(hashes), MOONCAKE_TOKENS, dtype=np.int64)
    tokens[-1] = max(1, min(MOONCAKE_TOKENS, int(record["input_length"]) - MOONCAKE_TOKENS * (len(hashes) - 1)))
    moment = record.get("timestamp")
    seconds = moment / 1e3 if isinstance(moment, int | float) and math.isfinite(moment) else None
    return [LoggedPrompt((Segment("prompt", HashedBlocks(hashes, BYTES_PER_TOKEN * tokens, True)),), seconds)]


def _requests(forms: Forms, record: Record) -> list[LoggedPrompt]:
    """What `pic serve --request-log` writes. Lengths are as many bytes as make its tokens at `BYTES_PER_TOKEN`."""
    segments, sizes = [], [int(length) for _, _, blocks in record["segments"] for _, length in blocks]
    scale = BYTES_PER_TOKEN * int(record.get("tokens", 0)) / max(1, sum(sizes)) or 1.0
    if scale * max(sizes, default=0) >= 1 << 31:
        raise FormError(f"has tokens that are more than a prompt has: {shown(record['tokens'])}")
    for kind, is_marked, blocks in record["segments"]:
        if kind not in KINDS:
            raise FormError(f"has a segment of no known kind: {shown(kind)}")
        hashes = np.asarray([int(name, 16) for name, _ in blocks], dtype=np.uint64)
        lengths = np.asarray([int(length) for _, length in blocks], dtype=np.int64)
        if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) < 1 << 31:
            raise FormError("has a block of no length")
        lengths = np.maximum(1, np.rint(lengths * scale)).astype(np.int64)
        segments.append(Segment(kind, HashedBlocks(hashes, lengths), bool(is_marked)))
    return [LoggedPrompt(tuple(segments), _time(record), str(record.get("tenant", "")))]


def _wrapped(name: str) -> Callable[[Forms, Record], list[LoggedPrompt]]:
    """A request inside of its record, which has the time, the tenant and the response."""

    def read(forms: Forms, record: Record) -> list[LoggedPrompt]:
        inner = record[name]
        inner = json.loads(inner) if isinstance(inner, str) and inner.lstrip()[:1] == "{" else inner
        inner = inner["body"] if isinstance(inner, Mapping) and isinstance(inner.get("body"), Mapping) else inner
        if not isinstance(inner, Mapping):
            raise FormError(f"has a {name} that is no object")
        outer = {key: value for key, value in record.items() if key not in _WRAPPERS}
        for _, keys, read_inner in _READERS[: -len(_WRAPPERS)]:
            if all(key in inner for key in keys):
                return read_inner(forms, {**outer, **inner})
        raise FormError(f"has a {name} with none of the fields of a request")

    return read


def _one(record: Record, segments: Sequence[Segment]) -> list[LoggedPrompt]:
    body = {name: record[name] for name in ("messages", "prompt", "documents", "tools") if name in record}
    return [
        LoggedPrompt(tuple(segments), _time(record), _tenant(record), tuple(_outputs(record.get("response"))), body)
    ]


def _outputs(response: Any) -> Iterator[str]:
    """The texts of a logged response, in any of the forms."""
    if isinstance(response, str):
        yield response
    if not isinstance(response, Mapping):
        return
    if isinstance(response.get("body"), Mapping):
        response = response["body"]
    for choice in response.get("choices") or ():
        message = choice.get("message") if isinstance(choice, Mapping) else None
        text = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(text, str):
            yield text
    for part in response.get("content") or () if isinstance(response.get("content"), list) else ():
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


def _listed(record: Record, name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


_Reader = tuple[str, tuple[str, ...], Callable[[Forms, Record], list[LoggedPrompt]]]
_READERS: list[_Reader] = [
    ("pic serve", ("pic_request", "segments"), _requests),
    ("Mooncake", ("hash_ids", "input_length"), _mooncake),
    ("KV events", ("events",), Forms.kv_events),
    ("LangSmith", ("run_type", "inputs"), _run),
    ("Messages or chat", ("messages",), _chat),
    ("Gemini", ("contents",), _contents),
    ("Responses", ("input",), _responses),
    ("prompts", ("prompt",), _completion),
    *((f"{name} of a proxy or batch", (name,), _wrapped(name)) for name in _WRAPPERS),
]
