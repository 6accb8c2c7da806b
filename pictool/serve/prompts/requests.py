"""From the bodies of requests to the router's work: messages to turns, caches to objects, options to sampling."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pictool.core import AnswerFormat, Sampling
from pictool.documents.reading import FileReader
from pictool.errors import InputError
from pictool.reading import parse_json
from pictool.serve.errors import ApiError
from pictool.serve.schema import (
    MAX_BIASES,
    CachePart,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DocumentPart,
    DocumentSource,
    DocumentText,
    FilePart,
    GenerationRequest,
    PicOptions,
    TextPart,
)
from pictool.serve.work import (
    Backend,
    Linking,
    MarkedText,
    ObjectReference,
    Piece,
    PlainText,
    ShortText,
    TemplateDocument,
    TokenizedText,
    Turn,
)
from pictool.store.leases import Lease, LeasedObject

MIN_MARKED = 64  # characters: a shorter text is not worth an object
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_OFF = ("off", "none", "false", "0")
_files = FileReader()
FindCache = Callable[[str, str], Lease]  # by its id, which the field named second has. Raises ApiError 404
FindFile = Callable[[str], str]  # its text


def linking_of(body: GenerationRequest, header: str | None) -> Linking:
    """How a request is linked: its field `pic`, else the header X-Pic-Policy."""
    options = body.pic
    verifies = bool(body.verify) or (isinstance(options, PicOptions) and options.verify)
    if options is False or (options is None and header is not None and header.strip().lower() in _OFF):
        return Linking("full", False, verifies)
    if isinstance(options, PicOptions):
        return Linking(options.policy or header, options.recognise, verifies, options.explain)
    return Linking(header, True, verifies)


def sampling_of(body: GenerationRequest) -> Sampling:
    """How tokens are chosen: as in OpenAI's API, at temperature 1 by default.

    Raises:
        ApiError: a value that cannot be.
    """
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    seed = secrets.randbits(63) if body.seed is None else body.seed % (1 << 64)
    try:
        return Sampling(
            1.0 if body.temperature is None else body.temperature, body.top_p or 1.0, seed, stop,
            body.frequency_penalty or 0.0, body.presence_penalty or 0.0, _biases(body.logit_bias or {}),
        )  # fmt: skip
    except InputError as error:
        raise ApiError(400, str(error)) from error


def _biases(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_BIASES:
        raise ApiError(
            400, f"logit_bias: has {len(given)} tokens, but at most {MAX_BIASES} are allowed", param="logit_bias"
        )
    for token, bias in given.items():
        is_token = token.isascii() and token.isdigit() and len(token) < 10
        if not is_token or type(bias) not in (int, float) or not -100 <= bias <= 100:
            problem = f"{token[:20]!r} must be a token id, and its value from -100 to 100"
            raise ApiError(400, f"logit_bias: {problem}", param="logit_bias")
    return tuple((int(token), float(bias)) for token, bias in given.items())


def require_supported(body: ChatRequest, backend: Backend) -> None:
    """Refuse what a chat completion of this server cannot do. Raises ApiError."""
    if body.tools and body.tool_choice in (None, "auto") and backend.response_template is None:
        problem = "its tokenizer has no response_template to parse calls with"
        raise ApiError(400, f"tools: {backend.model} does not support tools: {problem}", param="tools")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs to be true", param="top_logprobs")
    _require_calls(body.messages)


def _require_calls(messages: Sequence[ChatMessage]) -> None:
    """Refuse the result of a tool whose id no call before it has. Raises ApiError."""
    called = set[object]()
    for message in messages:
        more = message.model_extra or {}
        calls, answered = more.get("tool_calls"), more.get("tool_call_id")
        called |= (
            {str(call.get("id")) for call in calls if isinstance(call, dict)} if isinstance(calls, list) else set()
        )
        if message.role == "tool" and isinstance(answered, str) and answered not in called:
            problem = f"messages: no earlier call has the id {answered[:80]!r} of a result (role tool)"
            raise ApiError(400, problem, param="messages")


def format_of(body: ChatRequest, backend: Backend) -> tuple[AnswerFormat, list[tuple[str, str]]]:
    """What an answer's text is, and the schemas that must be followed, as JSON, each with the field that has it.

    Not for an event loop: schemas are as large as a body may be.

    Raises:
        ApiError: see `_answer_format`.
    """
    functions = [tool.get("function") for tool in body.tools or ()]
    schemas = [
        ("tools", json.dumps(function.get("parameters") or {"type": "object"}))
        for function in functions
        if isinstance(function, dict) and function.get("strict") is True
    ]
    answer_format = _answer_format(body, backend)
    if answer_format.schema is not None:
        schemas.append(("tool_choice" if answer_format.is_call else "response_format", answer_format.schema))
    return answer_format, schemas


def _answer_format(body: ChatRequest, backend: Backend) -> AnswerFormat:
    """Parsed, if its calls can be; or JSON. Raises ApiError: what is asked for is neither."""
    forced = _forced_call(body)
    if forced is not None:
        return AnswerFormat(schema=json.dumps(forced), is_call=True)
    form = body.response_format or {"type": "text"}
    if form.get("type") == "text":
        return AnswerFormat(backend.response_template is not None)
    schema: Any = {"type": "object"}
    if form.get("type") == "json_schema":
        named = form.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
    if form.get("type") not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise ApiError(
            400, "response_format: must be text, json_object, or json_schema with its schema", param="response_format"
        )
    if body.tools and body.tool_choice != "none":
        raise ApiError(400, "response_format: cannot be combined with tools", param="response_format")
    return AnswerFormat(schema=json.dumps(schema))


def _forced_call(body: ChatRequest) -> Mapping[str, Any] | None:
    """The schema of a call that the answer must be; None: it need not."""
    choice, functions = body.tool_choice, [tool.get("function") for tool in body.tools or ()]
    if choice in (None, "auto", "none"):
        return None
    named: Any = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    calls: list[dict[str, Any]] = [
        {"type": "object", "additionalProperties": False, "required": ["name", "arguments"],
         "properties": {"name": {"const": function["name"]},
                        "arguments": function.get("parameters") or {"type": "object"}}}
        for function in functions
        if isinstance(function, dict) and isinstance(function.get("name"), str) and name in (None, function["name"])
    ]  # fmt: skip
    if not calls or (name is None and choice != "required"):
        raise ApiError(400, "tool_choice: must be auto, none, required, or a function among tools", param="tool_choice")
    defs: dict[str, Any] = {}
    for call in calls:
        for key, found in (call["properties"]["arguments"].get("$defs") or {}).items():
            if defs.setdefault(key, found) != found:
                raise ApiError(
                    400, f"tool_choice: two tools define $defs/{key[:80]} differently; force one", param="tool_choice"
                )
    return {"anyOf": calls, "$defs": defs}


def function_tool(named: Mapping[str, Any]) -> dict[str, Any]:
    """A function as a tool of a chat: its name, description, parameters and strict, as far as it has them."""
    return {"type": "function", "function": {name: value for name, value in named.items() if value is not None}}


def forced_function(name: object, tools: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """The choice of one of these tools of a chat. Raises ApiError: there is none of that name."""
    if name not in [tool["function"]["name"] for tool in tools]:
        raise ApiError(400, f"tool_choice: no {kind} {str(name)[:80]!r} among the tools", param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def turns_of(
    messages: Sequence[ChatMessage], find_cache: FindCache, find_file: FindFile, cache_ids: Iterable[str] = ()
) -> tuple[Turn, ...]:
    """The turns of a chat. Caches named beside the messages come before the text of the last user's message.

    Of those caches, texts that were system messages come first in the chat.
    """
    turns = [_turn(message, find_cache, find_file) for message in messages]
    system, documents = list[Piece](), list[Piece]()
    for cache_id in cache_ids:
        for entry in find_cache(cache_id, "cache_ids").objects:
            (system if entry.role == "system" else documents).append(leased_piece(entry))
    if documents:
        last = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=None)
        if last is None:
            raise ApiError(400, "cache_ids: need a user message to put the caches into", param="cache_ids")
        turns[last] = Turn(turns[last].role, (*documents, *turns[last].pieces), turns[last].more)
    if system and turns and turns[0].role == "system":
        turns[0] = Turn("system", (*system, *turns[0].pieces), turns[0].more)
    elif system:
        turns.insert(0, Turn("system", tuple(system)))
    return tuple(turns)


def leased_piece(entry: LeasedObject) -> Piece:
    """An object of a cache as a piece of a prompt."""
    return ObjectReference(entry.key, entry.num_tokens, entry.continues)


def _turn(message: ChatMessage, find_cache: FindCache, find_file: FindFile) -> Turn:
    pieces, open_texts = list[Piece](), list[str]()
    is_marked = message.cache_control is not None or _is_break(message.prompt_cache_breakpoint)
    for part in [] if isinstance(message.content, str | None) else message.content:
        if isinstance(part, TextPart):
            open_texts.append(part.text)
            if part.cache_control is not None or _is_break(part.prompt_cache_breakpoint):
                pieces += _marked(open_texts)
                open_texts = []
            continue
        pieces += [PlainText(text) for text in open_texts]
        open_texts = []
        if isinstance(part, CachePart):
            pieces += map(leased_piece, find_cache(part.cache_id, "messages").objects)
        elif isinstance(part, FilePart):
            pieces += _marked([find_file(part.file.file_id)])
        elif isinstance(part, DocumentPart):
            pieces += [PlainText(f"{text}\n") for text in (part.title, part.context) if text]
            pieces += _marked([_document_text(part, find_file)])
        else:
            raise ApiError(
                400, param="messages",
                message=f"messages: a content part of type {part.type[:80]!r} is not known; text, document, cache and "
                "file are",
            )  # fmt: skip
    if isinstance(message.content, str):
        open_texts.append(message.content)
    pieces += _marked(open_texts) if is_marked else [PlainText(text) for text in open_texts]
    return Turn(message.role, tuple(pieces), _with_arguments(message.model_extra or {}))


def _with_arguments(more: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields of a message. A template takes a call's arguments as an object, not as JSON."""
    calls = more.get("tool_calls")
    if not isinstance(calls, list):
        return dict(more)
    read = copy.deepcopy(calls)
    for call in read:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with suppress(ValueError):
                function["arguments"] = parse_json(function["arguments"] or "{}")
    return {**more, "tool_calls": read}


def lease_seconds(messages: Iterable[ChatMessage], default: float | None) -> float | None:
    """For how long the objects of marked texts are leased: as the longest marker has it; None: no marker has a time.

    `default` is the time of markers that have none.
    """
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    marks = [getattr(part, "cache_control", None) for part in (*messages, *parts)]
    times = [default if mark.ttl is None else _TTL_S[mark.ttl] for mark in marks if mark is not None]
    return max(filter(None, times), default=None)


def _document_text(part: DocumentPart, find_file: FindFile) -> str:
    """The text of a document. Raises ApiError: it has none, is of another kind, or elsewhere."""
    text = part.text if part.text is not None or part.source is None else _source_text(part.source, find_file)
    if not text:
        raise ApiError(400, "messages: a part of type document needs its text", param="messages")
    return text


def _unread(problem: str) -> ApiError:
    return ApiError(400, f"messages: {problem}", param="messages")


def _source_text(source: DocumentSource, find_file: FindFile) -> str:
    if source.type == "text":
        return source.data or ""
    if source.type == "content":
        blocks = source.content if isinstance(source.content, list) else []
        if other := next((block.type for block in blocks if block.type != "text"), None):
            raise _unread(f"document blocks of type {other[:80]!r} are not supported; use text")
        return source.content if isinstance(source.content, str) else "".join(block.text or "" for block in blocks)
    if source.type == "file" and source.file_id is not None:
        return find_file(source.file_id)
    if source.type == "base64":
        return _decoded(source)
    raise _unread(f"document sources of type {source.type[:80]!r} are not supported; send the text")


def _decoded(source: DocumentSource) -> str:
    """The text of a document in base64: plain, or of a PDF, which is read in a process with bounds."""
    try:
        data = base64.b64decode(source.data or "", validate=True)
        if source.media_type == "text/plain":
            return data.decode("utf-8-sig")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise _unread(f"a document does not match its source ({error})") from error
    if source.media_type != "application/pdf":
        kind = str(source.media_type)[:80]
        raise _unread(f"documents of type {kind} are not supported; use text/plain or application/pdf")
    read = _files.read_bytes(data, ".pdf")
    if read.problem or read.reader != "PDF":
        raise _unread(f"a PDF {read.problem or 'is of another kind'}")
    return read.text


def documents_of(documents: Sequence[DocumentText]) -> tuple[TemplateDocument, ...]:
    """The documents beside a chat's messages; their borders are those of chunks."""
    return tuple(
        TemplateDocument(piece, dict(document.model_extra or {}))
        for document in documents
        for piece in _marked([document.text])
    )


def _is_break(value: object) -> bool:
    return value is not None and value is not False


def _marked(texts: Sequence[str]) -> list[Piece]:
    text = "".join(texts)
    return [] if not text else [MarkedText(text) if len(text) >= MIN_MARKED else ShortText(text)]


def prompts_of(body: CompletionRequest) -> list[tuple[Piece, ...]]:
    """The prompts of a completion: texts or token ids, one or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [(PlainText(prompt),)]
    if not prompt:
        raise ApiError(400, "prompt: is an empty list", param="prompt")
    if isinstance(prompt[0], int):
        return [(TokenizedText(tuple(token for token in prompt if isinstance(token, int))),)]
    return [(PlainText(part) if isinstance(part, str) else TokenizedText(tuple(part)),) for part in prompt]  # type: ignore[arg-type]


def cached_pieces(find_cache: FindCache, cache_ids: Iterable[str]) -> tuple[Piece, ...]:
    """The objects of caches that come before a prompt."""
    return tuple(leased_piece(entry) for cache_id in cache_ids for entry in find_cache(cache_id, "cache_ids").objects)
