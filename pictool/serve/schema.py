"""The bodies of requests, as pydantic models. Fields that other servers know and this one does not are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_N = 16
MAX_STOPS = 16
MAX_TTL_S = 366 * 86400


def _require_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, which JSON can say and no encoding can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not Unicode text at character {error.start}") from error
    return text


Unicode = Annotated[str, AfterValidator(_require_unicode)]
_SEED = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


class CacheControl(Body):
    type: str = "ephemeral"
    ttl: str | None = None


class TextPart(Body):
    """A text. With a marker, all texts of the message up to here, since the last marker, are one chunk."""

    type: Literal["text", "input_text"]
    text: Unicode
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Any = None


class CachePart(Body):
    """The objects of a cache, in this place."""

    type: Literal["cache"]
    cache_id: str


class FileId(Body):
    file_id: str


class FilePart(Body):
    """The text of an uploaded file, in this place; it is compiled."""

    type: Literal["file"]
    file: FileId


class Source(Body):
    """The text of a document, as Anthropic's API has it."""

    type: Literal["text"] = "text"
    data: Unicode


class DocumentPart(Body):
    """A document, in this place; it is compiled."""

    type: Literal["document"]
    text: Unicode | None = None
    source: Source | None = None


class OtherPart(Body):
    """A part that is refused by its name: image_url, input_audio, …"""

    type: str


Part = TextPart | CachePart | FilePart | DocumentPart | OtherPart


class Message(Body):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Unicode | list[Part] | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Any = None


class DocumentText(Body):
    """A document beside the messages, as vLLM's API has it. A template may print its other fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    text: Unicode


class PicOptions(Body):
    """How a request is linked."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    policy: str | None = None
    recognise: bool = True
    verify: bool = False


class StreamOptions(Body):
    include_usage: bool = False


class Generation(Body):
    """What requests for answers have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = _SEED
    stop: Unicode | Annotated[list[Unicode], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    pic: bool | PicOptions | None = None
    verify: bool | None = None
    cache_ids: Annotated[list[str], Field(max_length=1024)] | None = None


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1)]
    documents: Annotated[list[DocumentText], Field(max_length=1024)] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(Generation):
    prompt: (
        Unicode
        | list[Unicode]
        | list[Annotated[int, Field(ge=0, le=(1 << 31) - 1)]]
        | list[list[Annotated[int, Field(ge=0, le=(1 << 31) - 1)]]]
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)] | Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?s$")]


class CacheRequest(Body):
    """A cache of a text, of messages, or of an uploaded file."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: str
    text: Unicode | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=1024)] | None = None
    file_id: str | None = None
    ttl: Ttl | None = None
    expires_at: float | None = Field(default=None, ge=0, le=1e11)
    display_name: Unicode | None = Field(default=None, max_length=512)
    renew: bool = False
    chunk_tokens: int | None = Field(default=None, ge=16, le=1 << 20)


class CacheChange(Body):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    ttl: Ttl | None = None
    expires_at: float | None = Field(default=None, ge=0, le=1e11)


class LinkDocument(Body):
    """A document: a text, and what to call it, or the key of an object (as in git, abbreviated)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    text: Unicode | None = None
    source: Annotated[Unicode, Field(max_length=4096)] = "text"
    key: Annotated[str, Field(pattern="^[0-9a-f]{4,64}$")] | None = None


class LinkRequest(Body):
    """What `pic link` asks. `policy` is a mapping with algo and the policy's fields."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    query: Unicode
    documents: Annotated[list[LinkDocument], Field(max_length=4096)] = Field(default_factory=list)
    policy: dict[str, Any]
    head: Unicode | None = None
    query_template: Unicode | None = None
    max_new_tokens: int = Field(default=64, ge=1, le=1 << 31)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0, le=(1 << 64) - 1)
    stop: Annotated[list[Unicode], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    sinks: int | None = Field(default=None, ge=0, le=1024)
    chunk_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    codec: str = "none"
    compare: bool = False


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(Body):
    error: ErrorDetail
