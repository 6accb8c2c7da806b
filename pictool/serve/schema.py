"""The bodies of requests, as pydantic models. Fields that other servers know and this one does not are ignored."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from pictool.serve.errors import ApiError

MAX_N = 16
MAX_STOPS, MAX_STOP_BYTES = 16, 4096  # stop strings of a request, and their bytes in all
MAX_BIASES = 1024  # of logit_bias
MAX_TTL_S = 366 * 86400


def _require_short(stop: str | list[str]) -> str | list[str]:
    """Refuse stop strings that are long: of each, what an answer ends with is held back and compared."""
    num_bytes = sum(len(text.encode()) for text in ([stop] if isinstance(stop, str) else stop))
    if num_bytes > MAX_STOP_BYTES:
        raise ValueError(f"has {num_bytes} bytes of stop strings, but at most {MAX_STOP_BYTES} are allowed")
    return stop


# Lists are bounded, and validated up to their first mistake: each would be listed, with what else it might have been.
_First = Field(fail_fast=True)
MAX_PARTS = 10_000  # messages of a chat, and parts of one
MAX_TOOLS = 1024
Token = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Texts = Annotated[list[str], _First]
Stops = Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(_require_short)]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
Ids = Annotated[list[str], Field(max_length=1024, fail_fast=True)]
_SEED = Field(default=None, ge=-(1 << 63), le=(1 << 64) - 1)


class StrictModel(BaseModel):
    """The base of everything in a request that has fields. Strict: no type is converted into another."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=(), strict=True)


class PromptModel(StrictModel):
    """The base of requests with a prompt. The fields `refused` would change an answer, and are not supported."""

    refused: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        for name in cls.refused if isinstance(value, dict) else ():
            if value.get(name):
                raise ApiError(400, f"{name}: is not supported; omit it", param=name)
        return value


class CacheControl(StrictModel):
    """A marker. With a `ttl`, the objects of the marked texts are leased for as long."""

    type: str = "ephemeral"
    ttl: Literal["5m", "1h"] | None = None


class TextPart(StrictModel):
    """A text. With a marker, all texts of the message up to here, since the last marker, are one chunk."""

    type: Literal["text", "input_text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Any = None


class CachePart(StrictModel):
    """The objects of a cache, in this place."""

    type: Literal["cache"]
    cache_id: str


class FileId(StrictModel):
    file_id: str


class FilePart(StrictModel):
    """The text of an uploaded file, in this place; it is compiled."""

    type: Literal["file"]
    file: FileId


class SourceBlock(StrictModel):
    """A block of a document that is made of blocks."""

    type: str
    text: str | None = None


class DocumentSource(StrictModel):
    """The text of a document, as Anthropic's API has it: `data`, `content`, or that of an uploaded file."""

    type: str = "text"
    media_type: str | None = None
    data: str | None = None
    content: str | Annotated[list[SourceBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    file_id: str | None = None


class DocumentPart(StrictModel):
    """A document, in this place; it is compiled. Its title and its context are texts before it."""

    type: Literal["document"]
    text: str | None = None
    source: DocumentSource | None = None
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class OtherPart(StrictModel):
    """A part that is refused by its name: image_url, input_audio, …"""

    type: str


def _kind_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return _KINDS.get(kind, "other") if isinstance(kind, str) else "other"


_KINDS = {"text": "text", "input_text": "text", "cache": "cache", "file": "file", "document": "document"}
Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[CachePart, Tag("cache")]
    | Annotated[FilePart, Tag("file")]
    | Annotated[DocumentPart, Tag("document")]
    | Annotated[OtherPart, Tag("other")],
    Discriminator(_kind_of),
]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class ChatMessage(StrictModel):
    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: Any = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)]


class DocumentText(StrictModel):
    """A document beside the messages, as vLLM's API has it. A template may print its other fields."""

    model_config = ConfigDict(extra="allow")

    text: str


Documents = Annotated[list[DocumentText], Field(max_length=1024, fail_fast=True)]


class DocumentQuery(StrictModel):
    """Documents that the tenant has compiled: the `k` that concern a query most, of a folder that `pic sync` keeps."""

    model_config = ConfigDict(extra="forbid")

    query: str = Field(min_length=1, max_length=1 << 16)
    k: int = Field(default=8, ge=1, le=1024)
    folder: str | None = Field(default=None, max_length=4096)


class PicOptions(StrictModel):
    """How a request is linked."""

    model_config = ConfigDict(extra="forbid")

    policy: str | None = None
    recognise: bool = True
    verify: bool = False
    explain: bool = False


class AnswerOptions(StrictModel):
    """What requests for answers have in common, on every route of chats."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    pic: bool | PicOptions | None = None
    verify: bool | None = None


class StreamOptions(StrictModel):
    include_usage: bool = False


class GenerationRequest(PromptModel, AnswerOptions):
    """What OpenAI's chat completions and completions have in common."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = _SEED
    stop: Annotated[str, AfterValidator(_require_short)] | Stops | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Any] | None = None
    cache_ids: Ids | None = None


class ChatRequest(GenerationRequest):
    messages: Messages
    documents: Documents | DocumentQuery | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    refused = ("echo", "suffix")

    prompt: str | Texts | Annotated[list[Token], _First] | Annotated[list[Annotated[list[Token], _First]], _First]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    best_of: int | None = None


Ttl = Annotated[float, Field(gt=0, le=MAX_TTL_S)] | Annotated[str, Field(pattern=r"^[0-9]{1,9}(\.[0-9]{1,9})?s$")]


class CacheChange(StrictModel):
    """Another end of a cache."""

    model_config = ConfigDict(extra="forbid")

    ttl: Ttl | None = None
    expires_at: float | None = Field(default=None, ge=0, le=1e11)


class CacheRequest(CacheChange):
    """A cache of a text, of messages, or of an uploaded file."""

    model: str
    text: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    file_id: str | None = None
    display_name: str | None = Field(default=None, max_length=512)
    renew: bool = False
    chunk_tokens: int | None = Field(default=None, ge=16, le=1 << 20)


class LinkDocument(StrictModel):
    """A document: a text, and what to call it, or the key of an object (as in git, abbreviated)."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    source: str = Field(default="text", max_length=4096)
    key: Annotated[str, Field(pattern="^[0-9a-f]{4,64}$")] | None = None


class LinkRequest(StrictModel):
    """What `pic link` asks. `policy` is a mapping with algo and the policy's fields."""

    model_config = ConfigDict(extra="forbid")

    query: str
    documents: Annotated[list[LinkDocument], Field(max_length=4096, fail_fast=True)] = Field(default_factory=list)
    policy: dict[str, Any]
    head: str | None = None
    query_template: str | None = None
    separator: str | None = None
    max_new_tokens: int = Field(default=64, ge=1, le=1 << 31)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0, le=(1 << 64) - 1)
    stop: Stops = Field(default_factory=list)
    after: str = "previous"
    chunk_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    codec: str = "none"
    compare: bool = False


class ErrorDetail(StrictModel):
    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorBody(StrictModel):
    error: ErrorDetail
