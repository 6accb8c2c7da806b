"""The forms in which requests are logged: how a record's form is recognised, and where it has what is needed.

`FORMS` is the table of gateways, traces and batches; the bodies of requests in them are read by API (`bodies.py`).
Beside it are records that have no body: lines of vLLM's request log, and what `pic serve` logged until 0.3. Each
request counts once; what does not count is counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pictool.estimate.bodies import (
    FormError,
    Record,
    body_of,
    has_fields,
    is_nothing,
    prompts_of,
    time_of,
    token_ids,
)
from pictool.estimate.segments import BYTES_PER_TOKEN, KINDS, HashedBlocks, LoggedPrompt, Segment
from pictool.estimate.spans import flat_span, spans_of
from pictool.reading import shown

_WRAPPERS = ("body", "proxy_server_request", "request_body", "request_json", "kwargs", "request")
_VLLM_NEEDS = " (start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG)"
_TWICE = "logged twice"
_REQUEST = re.compile(r"\b(?:Received request|Request) (?P<id>\S{1,300}?):? (?:details: )?(?P<field>prompt|params): ")
_PROMPT = re.compile(r"None|'([^'\\]*+(?:\\.[^'\\]*+)*+)'|\"([^\"\\]*+(?:\\.[^\"\\]*+)*+)\"", re.DOTALL)
_IDS, _IDS_FIELD = re.compile(r"\[[\d, ]*+\]"), "prompt_token_ids: "
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_LOG_LINE = re.compile(r"(?:\([^()\n]{1,80}\) )?(?:INFO|DEBUG|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d ")
_LOG_TIME = re.compile(r"\b(?P<month>\d\d)-(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)\b")
_NO_CHAT = re.compile(  # endpoints, operations and models that have no prompt of a language model
    r"(?P<embeddings>embed(?!ded))|(?P<moderations>moderation)|(?P<rerank>rerank)|(?P<images>image_gen|images/|dall-e|gpt-image)"
    r"|(?P<audio>audio/|speech|transcription|whisper|\btts-)",
    re.IGNORECASE,
)
_FAILED = ("failed", "failure", "error", "errored", "expired")
_NONE = ("no kind",)  # of the observations of a form are requests


@dataclass(frozen=True)
class LogForm:
    """A form of records. Paths are names with dots between (`*` is any name); the first with something there counts.

    Fields:
        name: as reports have it; "": records are named by the API of their bodies.
        marks: sets of paths; a record is of this form if it has all of one set.
        prompt: to the body of the request; "": the record itself.
        id, parent: of the request; a form with parents has observations within each other.
        kind, calls: what an observation is, and which kinds are requests to a model; (): all are.
        endpoint: all that tells embeddings from chats: URLs, operations and models.
        status, error: an HTTP status or a word; what is there only if the request failed.
        response: with the outputs.
        needs: what must be done for the log to have prompts.
        gaps: texts that the gateway writes in place of others.
        is_input: whether the body may also be a text or one message.
        view: makes the record that paths are read from.
    """

    name: str
    marks: tuple[tuple[str, ...], ...]
    prompt: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    parent: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    endpoint: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    error: tuple[str, ...] = ()
    response: tuple[str, ...] = ("response",)
    needs: str = ""
    gaps: tuple[str, ...] = ()
    is_input: bool = False
    view: Callable[[Record], Record] = dict

    def has(self, record: Record) -> bool:
        """Whether a record is of this form."""
        return any(all(is_there(record, path) for path in marks) for marks in self.marks)


_MODELS = ("model", "body.model", "request.model")
_GENERATIONS = "export observations of type GENERATION, with their input"
FORMS = (
    LogForm(
        "LiteLLM's spend logs", (("call_type", "spend"), ("call_type", "proxy_server_request")),
        prompt=("proxy_server_request", "messages"), id=("request_id",), endpoint=("call_type", "model"),
        status=("metadata.error_information.error_code", "status"), gaps=("litellm_truncated", "redacted-by-litellm"),
        needs="set store_prompts_in_spend_logs: true in general_settings, and a large MAX_STRING_LENGTH_PROMPT_IN_DB",
    ),
    LogForm(
        "Langfuse", (("traceId", "type"), ("trace_id", "type", "start_time")), prompt=("input",), id=("id",),
        parent=("parentObservationId", "parent_observation_id"), kind=("type",), calls=("generation",),
        endpoint=("type", "model"), status=("level",), response=("output",), is_input=True, needs=_GENERATIONS,
    ),
    LogForm("Langfuse's traces", (("sessionId", "tags", "input"), ("htmlPath",)), calls=_NONE, needs=_GENERATIONS),
    LogForm(
        "Helicone", (("request_created_at",), ("requestCreatedAt",), ("requestBody",), ("providerRequest",)),
        prompt=("request_body", "requestBody", "providerRequest.json"), id=("request_id", "requestId"),
        endpoint=("request_path", "requestPath", "target_url", "targetUrl", "providerRequest.url", "request_model",
                  "requestModel", "model", "request_body.model", "requestBody.model", "providerRequest.json.model"),
        status=("response_status", "responseStatus", "providerResponse.status"),
        response=("response_body", "responseBody", "providerResponse.json"), needs="export with --include-body",
    ),
    LogForm(
        "OpenAI's batches", (("custom_id", "body"),), prompt=("body",), id=("custom_id",), endpoint=("url", *_MODELS),
        status=("response.status_code",), error=("error",),
    ),
    LogForm("Anthropic's batches", (("custom_id", "params"),), prompt=("params",), id=("custom_id",)),
    LogForm(
        "results of a batch", (("custom_id", "response"), ("custom_id", "result")),
        needs="name the batch's input file, too",
    ),
    LogForm(
        "Bedrock", (("modelId", "operation", "input"), ("schemaType", "modelId")), prompt=("input.inputBodyJson",),
        id=("requestId",), endpoint=("operation", "modelId"), error=("errorCode",), response=("output.outputBodyJson",),
        needs="enable text in model invocation logging; bodies above 100 KB are in the S3 objects of inputBodyS3Path",
    ),
    LogForm(
        "Kong", (("ai.proxy",), ("ai.payload",), ("ai", "started_at")),
        prompt=("ai.*.payload.request", "ai.payload.request"), id=("request.id",),
        endpoint=("ai.*.meta.request_mode", "upstream_uri", "request.uri", "ai.*.meta.request_model"),
        status=("response.status",), response=("ai.*.payload.response",),
        needs="set logging.log_payloads: true of the ai-proxy plugin",
    ),
    LogForm("Kong without ai-proxy", (("client_ip", "started_at", "latencies"),), calls=_NONE),
    LogForm(
        "LangSmith", (("run_type", "inputs"),), prompt=("inputs",), id=("id",), parent=("parent_run_id",),
        kind=("run_type",), calls=("llm", "chat_model"), endpoint=("run_type",), status=("status",), error=("error",),
        response=("outputs",), is_input=True, view=lambda record: {**record, "inputs": _inputs(record["inputs"])},
    ),
    LogForm(
        "OpenTelemetry", (("spanId", "attributes"), ("span_id", "attributes"), ("context", "attributes")),
        prompt=("body",), id=("id",), parent=("parent",), kind=("operation",),
        calls=("chat", "text_completion", "completion", "generate_content", "llm"), endpoint=("operation", "model"),
        status=("status",), view=flat_span,
        needs="set OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT where the spans are made",
    ),
)  # fmt: skip
_PLAIN = LogForm(
    "", (), prompt=(*_WRAPPERS, ""), id=("id", "request_id", "requestId", "litellm_call_id"),
    endpoint=("endpoint", "url", "path", "request_path", "uri", "call_type", "operation", "request.url",
              "request.path", *_MODELS),
    status=("status_code", "response.status_code", "response.status", "response_status", "error.code", "status"),
    error=("error",),
)  # fmt: skip


def _inputs(inputs: Any) -> Any:
    """The inputs of a LangSmith run as a body."""
    return {"prompt": inputs["prompts"]} if isinstance(inputs, Mapping) and "prompts" in inputs else inputs


def _at(value: Any, names: Sequence[str]) -> Any:
    """What is at a path; None: nothing."""
    if not names or names == [""]:
        return value
    if not isinstance(value, Mapping):
        return None
    if names[0] == "*":
        found = (_at(inner, names[1:]) for inner in value.values())
        return next((inner for inner in found if not is_nothing(inner)), None)
    return _at(value.get(names[0]), names[1:])


def first_at(record: Record, paths: Sequence[str]) -> Any:
    """What is at the first of some paths with something there."""
    found = (_at(record, path.split(".")) for path in paths)
    return next((value for value in found if not is_nothing(value)), None)


def is_there(record: Record, path: str) -> bool:
    """Whether a record has a field, with something in it or not."""
    *outer, name = path.split(".")
    holder = _at(record, outer)
    return isinstance(holder, Mapping) and name in holder


def records_of(value: Any) -> Iterator[Any]:
    """The records in a value: itself, or those of a list or an export that only holds others."""
    listed = _listed_in(value) if isinstance(value, Mapping) else value
    if isinstance(listed, list) and listed and all(isinstance(record, Mapping) for record in listed):
        for record in listed:
            yield from records_of(record)
    else:
        yield value


def _listed_in(record: Record) -> list[Any] | None:
    if "resourceSpans" in record or "resourceLogs" in record:
        return list(spans_of(record)) or None
    for name, key in (("requests", "custom_id"), ("observations", "type"), ("data", "")):
        listed = record.get(name)
        if isinstance(listed, list) and not has_fields(record):
            return listed if all(isinstance(inner, Mapping) and (not key or key in inner) for inner in listed) else None
    for name in ("events", "logEvents"):  # of CloudWatch
        listed = record.get(name)
        if isinstance(listed, list) and all(isinstance(inner, Mapping) and "message" in inner for inner in listed):
            return [json.loads(inner["message"]) for inner in listed]
    return None


class _Known:
    """Values that came before, the latest `limit` of them; None: all."""

    def __init__(self, limit: int | None) -> None:
        self._digests, self._limit = dict[bytes, None](), limit

    def __contains__(self, value: object) -> bool:
        return _digest(value) in self._digests

    def add(self, value: object) -> bool:
        """Add a value; returns whether it came before."""
        digest = _digest(value)
        is_known = digest in self._digests
        self._digests[digest] = None
        if self._limit is not None and len(self._digests) > self._limit:
            del self._digests[next(iter(self._digests))]
        return is_known


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(errors="surrogatepass"), digest_size=12).digest()


class Forms:
    """Turns records into prompts. It keeps ids of requests.

    Args:
        max_ids: the latest ids of each kind that are kept; None: all, so that each request counts once however far
            apart its records are.

    Attributes:
        found: prompts by the name of their form. left_out: records that count as no prompt, by the reason.
    """

    def __init__(self, max_ids: int | None = None) -> None:
        self.found, self.left_out = Counter[str](), Counter[str]()
        self._ids, self._inside, self._around = (_Known(max_ids) for _ in range(3))

    def prompts(self, record: Any) -> list[LoggedPrompt]:
        """The prompts of a record.

        Raises:
            FormError: its form is not known. ValueError, TypeError, KeyError: it is not as its form has it.
        """
        if not isinstance(record, Mapping):
            raise FormError("is not an object of a known form")
        if form := next((form for form in FORMS if form.has(record)), None):
            return self._requests(form, form.view(record))
        if "pic_request" in record and "segments" in record:
            self.found["pic serve"] += 1
            return [_served(record)]
        return self._requests(_PLAIN, record)

    def _requests(self, form: LogForm, record: Record) -> list[LoggedPrompt]:
        """The prompts of a record with a body."""
        body = _body(form, record)
        reason = _reason(form, record, body)
        is_nested = bool(form.parent) and self._is_nested(form, record, is_request=not reason)
        if reason or is_nested or body is None:
            return self._leave_out(reason or "within or around another record of the same request")
        api, found = prompts_of(body)
        if not found:
            return self._leave_out("without text")
        if (name := first_at(record, form.id)) and not form.parent and self._ids.add((form.name, name, _texts(found))):
            return self._leave_out(_TWICE)
        self.found[form.name or api] += len(found)
        return found

    def _leave_out(self, reason: str) -> list[LoggedPrompt]:
        self.left_out[reason] += 1
        return []

    def _is_nested(self, form: LogForm, record: Record, is_request: bool) -> bool:
        """Whether an observation is a request that counts already: itself, one that it is within, or one within it."""
        name, parent = first_at(record, form.id), first_at(record, form.parent)
        if name is None:
            return False
        if name in self._inside or (parent is not None and parent in self._inside):
            self._inside.add(name)
            return True
        is_around = name in self._around
        if is_request and not is_around:
            self._inside.add(name)
        if (is_request or is_around) and parent is not None:
            self._around.add(parent)
        return is_around

    @staticmethod
    def is_line(text: str) -> bool:
        """Whether a text is a line of vLLM's log."""
        return bool(_LOG_LINE.match(text) or _REQUEST.search(text))

    def line(self, text: str) -> list[LoggedPrompt]:
        """The prompts of a line of vLLM's log.

        Raises:
            FormError: its prompt does not end. ValueError: it has characters or token ids that are none.
        """
        found = _REQUEST.search(text)
        if found is None:
            return self._leave_out(f"lines of vLLM's log{_VLLM_NEEDS}")
        name = found["id"]
        if found["field"] == "params":
            return [] if name in self._ids else self._leave_out(f"without a prompt{_VLLM_NEEDS}")
        prompt = _PROMPT.match(text, found.end())
        if prompt is None:
            raise FormError("has an unterminated prompt")
        at = text.rfind(_IDS_FIELD, prompt.end())
        ids = None if at < 0 else _IDS.match(text, at + len(_IDS_FIELD))
        content: Any = _ESCAPE.sub(lambda found: _character(*found.groups()), prompt[1] or prompt[2] or "")
        if ids is not None and ids[0] != "[]":
            content = token_ids(json.loads(ids[0]))
        if not len(content):
            return self._leave_out("without text")
        logged = LoggedPrompt((Segment("prompt", content),), _log_time(text[: found.start()]))
        self._ids.add(name)
        if self._ids.add((name, _texts([logged]))):
            return self._leave_out(_TWICE)
        self.found["vLLM's request log"] += 1
        return [logged]


def _body(form: LogForm, record: Record) -> Record | None:
    """The body of a request, with what its record says of it; None: no prompt is in it."""
    value = first_at(record, form.prompt)
    body = None if is_nothing(value) else body_of(value, form.is_input)
    if body is None or value is record:
        return body
    outer = {name: inner for name, inner in record.items() if name not in _WRAPPERS and not has_fields({name: inner})}
    return {**outer, "response": first_at(record, form.response), **body}


def _reason(form: LogForm, record: Record, body: Record | None) -> str:
    """Why a record counts as no prompt; "": it counts."""
    needs = f" ({form.name}: {form.needs})" if form.needs else ""
    kind, error = str(first_at(record, form.kind)).lower(), first_at(record, form.error)
    if found := _other_purpose(form, record, body):
        return found
    if form.calls and kind not in form.calls:
        return "no requests to a model" + (needs if form.calls == _NONE else "")
    if (status := _failure(first_at(record, form.status))) or error:
        return f"failed ({status})" if status.isdecimal() else "failed"
    if body is None:
        return f"without a prompt{needs}"
    dumped = json.dumps(body) if form.gaps else ""
    if any(gap in dumped for gap in form.gaps):
        return f"cut or redacted{needs}"
    return ""


def _other_purpose(form: LogForm, record: Record, body: Record | None) -> str:
    """What a request is for if not for a chat: by its endpoint, model, body or response; "": it is for a chat."""
    values = [value for path in form.endpoint if isinstance(value := _at(record, path.split(".")), str)]
    if found := _NO_CHAT.search(" ".join("/".join(value.split("?")[0].split("/")[-2:]) for value in values)):
        return str(found.lastgroup)
    if body is None or "input" not in body:
        return ""
    items, response = body["input"], body.get("response")
    data = response.get("data") if isinstance(response, Mapping) else None
    signs = (
        isinstance(items, list) and all(isinstance(item, str | int) for item in items),
        isinstance(data, list) and any(isinstance(part, Mapping) and "embedding" in part for part in data[:1]),
        "encoding_format" in body, "dimensions" in body,
    )  # fmt: skip
    return "embeddings" if any(signs) else ""


def _failure(status: Any) -> str:
    """The status of a request that failed; "": it did not."""
    text = str(status)
    if text.isdecimal() and len(text) == 3 and isinstance(status, int | str):
        return text if text >= "400" else ""
    return text if text.lower() in _FAILED else ""


def _texts(prompts: Sequence[LoggedPrompt]) -> bytes:
    """A digest of prompts."""
    digest = hashlib.blake2b(digest_size=12)
    for segment in (segment for prompt in prompts for segment in prompt.segments):
        content = segment.content
        assert not isinstance(content, HashedBlocks)
        data = content.encode(errors="surrogatepass") if isinstance(content, str) else content.tobytes()
        digest.update(f"{segment.kind} {len(data)} ".encode())
        digest.update(data)
    return digest.digest()


def _character(byte: str | None, short: str | None, long: str | None, letter: str | None) -> str:
    digits = byte or short or long
    return chr(int(digits, 16)) if digits else _LETTERS.get(letter or "", letter or "")


def _log_time(text: str) -> float | None:
    """The time at the beginning of a line of a log, which has no year: this one, UTC."""
    if (found := _LOG_TIME.search(text)) is None:
        return None
    fields = {name: int(digits) for name, digits in found.groupdict().items()}
    with suppress(ValueError):
        return datetime(datetime.now(tz=UTC).year, tzinfo=UTC, **fields).timestamp()
    return None


def _served(record: Record) -> LoggedPrompt:
    """What `pic serve` logged until 0.3: keyed hashes of blocks. Lengths become as many bytes as make its tokens."""
    segments, sizes = [], [int(length) for _, _, blocks in record["segments"] for _, length in blocks]
    scale = BYTES_PER_TOKEN * int(record.get("tokens", 0)) / max(1, sum(sizes)) or 1.0
    if scale * max(sizes, default=0) >= 1 << 31:
        raise FormError(f"has more tokens than a prompt can have: {shown(record['tokens'])}")
    for kind, is_marked, blocks in record["segments"]:
        if kind not in KINDS:
            raise FormError(f"has a segment of unknown kind: {shown(kind)}")
        hashes = np.asarray([int(name, 16) for name, _ in blocks], dtype=np.uint64)
        lengths = np.asarray([int(length) for _, length in blocks], dtype=np.int64)
        if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) < 1 << 31:
            raise FormError("has a block without a length")
        lengths = np.maximum(1, np.rint(lengths * scale)).astype(np.int64)
        segments.append(Segment(kind, HashedBlocks(hashes, lengths), bool(is_marked)))
    return LoggedPrompt(tuple(segments), time_of(record), str(record.get("tenant", "")))
