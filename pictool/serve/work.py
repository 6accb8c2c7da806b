"""The contract between the router and the backend that it is mounted in: what a request asks for, and what it gives.

The router knows HTTP, tenants, leases and the forms of several APIs. A backend knows one engine. The router builds a
`AnswerRequest` from a request; the backend answers with events. No module of the router imports an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pictool.core import AnswerFormat, PromptText, Sampling
from pictool.serve.errors import ApiError
from pictool.serve.tenants import Tenant

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy
    from pictool.linker.prefixes import PoolCounts
    from pictool.linker.spec import Spec
    from pictool.serve.prompts.retrieving import RetrievedDocument
    from pictool.serve.schema import DocumentQuery

# What a prompt is made of


@dataclass(frozen=True)
class PlainText:
    """Text as it is; stored documents in it may be recognised."""

    text: str

    def __add__(self, other: PlainText) -> PlainText:
        return PlainText(self.text + other.text)


@dataclass(frozen=True)
class ShortText(PlainText):
    """The text of a document that is too short for an object."""


@dataclass(frozen=True)
class TokenizedText:
    """Text as token ids."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class UnstoredText(TokenizedText):
    """A marked text for which the store has no room."""


@dataclass(frozen=True)
class ObjectReference:
    """An object of the tenant that the request names by a lease, and its tokens as far as they are known.

    One that `continues` is of the same text as the object before it.
    """

    key: str
    num_tokens: int = field(default=0, compare=False)
    continues: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class RetrievedObject(ObjectReference):
    """An object of the tenant that was found by a query."""


@dataclass(frozen=True)
class MarkedText:
    """A text whose borders the client marked: it is compiled, and linked."""

    text: str


@dataclass(frozen=True)
class Break:
    """Between a document and what precedes or follows it: the model's separator, less what is there already."""


_DOCUMENTS = (ObjectReference, MarkedText, ShortText, UnstoredText)
Piece = PlainText | TokenizedText | ObjectReference | MarkedText | Break
WrittenPiece = PromptText | TokenizedText | ObjectReference | MarkedText | Break  # of a prompt that its template wrote


def separated(pieces: Iterable[Piece], always: bool = False) -> list[Piece]:
    """The pieces of a message with a break between each document and its neighbours.

    Args:
        always: texts that are no documents are apart from one another, too.
    """
    result: list[Piece] = []
    for piece in pieces:
        if piece == PlainText(""):
            continue
        is_apart = always or any(isinstance(each, _DOCUMENTS) for each in (piece, *result[-1:]))
        if result and is_apart and not (isinstance(piece, ObjectReference) and piece.continues):
            result.append(Break())
        result.append(piece)
    return result


@dataclass(frozen=True)
class Turn:
    """A message of a chat. `more` are fields that only its template reads (name, tool_calls, …)."""

    role: str
    pieces: tuple[Piece, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


def _plain(piece: Piece) -> Piece:
    return PlainText(piece.text) if isinstance(piece, MarkedText) else piece


@dataclass(frozen=True)
class TemplateDocument:
    """A document beside a chat's messages, for templates that print some. `more` has its other fields (title, …)."""

    piece: Piece
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A chat to be laid out by the model's template."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[TemplateDocument, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all its messages and documents."""
        return (*(piece for turn in self.turns for piece in turn.pieces), *(part.piece for part in self.documents))

    def without_documents(self) -> ChatPrompt:
        """The same chat with its documents before the text of its last user, for a template that prints none."""
        last = max((i for i, turn in enumerate(self.turns) if turn.role == "user"), default=None)
        if last is None or not self.documents:
            return replace(self, documents=())
        turns, before = list(self.turns), tuple(document.piece for document in self.documents)
        turns[last] = replace(turns[last], pieces=(*before, *turns[last].pieces))
        return ChatPrompt(tuple(turns), self.tools)

    def without_marks(self) -> ChatPrompt:
        """The same chat with the marked texts of tools and of the model as text: a template may write them as JSON."""
        turns = [
            turn
            if turn.role in ("system", "developer", "user")
            else replace(turn, pieces=tuple(map(_plain, turn.pieces)))
            for turn in self.turns
        ]
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True)
class RawPrompt:
    """A prompt whose template is the client's: markers in its plain texts are control tokens."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Linking:
    """How a prompt is linked.

    Fields:
        policy: a specification as legolink-16; None: the server's.
        recognises: whether stored documents in its texts are linked.
        verifies: whether full recompute is run beside it.
        explains: whether the response says what became of each part of the prompt.
    """

    policy: str | None = None
    recognises: bool = True
    verifies: bool = False
    explains: bool = False


@dataclass(frozen=True)
class AnswerRequest:
    """A request for answers. `sampling.seed` is that of the first of the `n` answers; the others have the next ones.

    `num_top` is how many likely tokens are reported for each token; None: no log-probabilities are.
    `ttl_s` is for how many seconds the objects of marked texts are leased; None: they are not. `retrieved` are the
    documents of the prompt that were found by a query.
    """

    tenant: Tenant
    prompt: ChatPrompt | RawPrompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    n: int = 1
    num_top: int | None = None
    linking: Linking = Linking()
    answer_format: AnswerFormat = AnswerFormat()
    ttl_s: float | None = None
    retrieved: tuple[RetrievedDocument, ...] = ()


# What comes back


@dataclass(frozen=True)
class CompiledText:
    """An object that a backend compiled, or had. One that `continues` is of the same text as the one before it."""

    key: str
    num_tokens: int
    is_new: bool = field(default=False, compare=False, repr=False)
    continues: bool = field(default=False, compare=False, repr=False)


REASONS = {  # why parts of a prompt are computed
    "policy": "the policy reuses no documents",
    "not_searched": "the request turned recognition off and named no stored document",
    "no_object": "no stored document of this tenant is in this text; compile it, upload it, or start with --learn 2G",
    "too_short": "too few tokens to be recognised, or merged with their surroundings by the tokenizer",
    "not_stored": "the store has no room for this marked text",
    "problem": "an object of the prompt cannot be used, so all of the prompt is computed",
}


@dataclass(frozen=True)
class PromptPart:
    """What became of the tokens [start, end) of a prompt.

    Fields:
        reason: how their object was found (cache, marker, recognised, moved); "prefix": an earlier request
            computed them; else why they were computed (`REASONS`).
        key: of their object; empty: they were computed.
        recomputed: of an object's tokens, computed again: the mean over layers, rounded up; None: not known.
        is_new: their object was compiled for this request.
        text: how they begin.
    """

    start: int
    end: int
    reason: str
    key: str = ""
    recomputed: int | None = 0
    is_new: bool = field(default=False, compare=False, repr=False)
    text: str = ""

    @property
    def state(self) -> str:
        return "linked" if self.key else "prefix" if self.reason == "prefix" else "computed"

    def report(self) -> dict[str, Any]:
        found = {"start": self.start, "end": self.end, "state": self.state, "reason": self.reason, "text": self.text}
        linked: dict[str, Any] = {"key": self.key[:12], "recomputed_tokens": self.recomputed, "compiled": self.is_new}
        return found | (linked if self.key else {})


@dataclass(frozen=True)
class Reuse:
    """What was done with a prompt. `exact`, `linked` and `recomputed` are tokens, and all of them.

    Fields:
        chunks: documents that were linked.
        exact: tokens whose KV is that of full recompute as far as their own rows go: computed, or reused in place.
        linked: tokens whose KV came from documents. recomputed: of documents, computed again.
        cached: tokens that were not computed.
        source: how the documents were found: "cache", "marker", "recognised", "moved", joined by "+"; "none".
        problem: why a prompt was computed that should have been linked.
        marked: the objects of its marked texts.
        notes: what is in its texts that the client may not expect.
        prefix: of the exact tokens, those that an earlier request computed after the same tokens.
        parts: what became of which tokens, without gaps; empty if that is not known. `explains`: the client asked.
        retrieved: documents that were found by the request's query.
    """

    policy: str
    chunks: int = 0
    exact: int = 0
    linked: int = 0
    recomputed: int = 0
    cached: int = 0
    source: str = "none"
    problem: str | None = None
    marked: tuple[CompiledText, ...] = field(default=(), compare=False)
    prefix: int = 0
    parts: tuple[PromptPart, ...] = field(default=(), compare=False)
    explains: bool = False
    retrieved: tuple[RetrievedDocument, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_compiled(self) -> int:
        """Tokens of texts that were compiled for it."""
        return sum(part.num_tokens for part in self.marked if part.is_new)

    @property
    def moved(self) -> int:
        """Of the linked tokens, those of texts that earlier requests had (`--learn`)."""
        return sum(part.end - part.start - (part.recomputed or 0) for part in self.parts if part.reason == "moved")

    @property
    def num_tokens(self) -> int:
        return self.exact + self.linked + self.recomputed

    def report(self) -> dict[str, Any]:
        """The field `pic` of a response; `reason` is why the longest part was computed, if it was."""
        more: dict[str, Any] = {} if self.problem is None else {"problem": self.problem}
        longest = max(self.parts, key=lambda part: part.end - part.start, default=None)
        if longest is not None and longest.state == "computed":
            more |= {"reason": longest.reason, "hint": REASONS[longest.reason]}
        if self.notes:
            more["notes"] = list(self.notes)
        if self.retrieved:
            more["retrieved"] = [document.report() for document in self.retrieved]
        if self.explains:
            more["parts"] = [part.report() for part in self.parts]
        return {
            "policy": self.policy, "chunks": self.chunks, "exact_tokens": self.exact, "linked_tokens": self.linked,
            "recomputed_tokens": self.recomputed, "prefix_tokens": self.prefix, "moved_tokens": self.moved,
            "source": self.source,
        } | more  # fmt: skip


@dataclass(frozen=True)
class TokenInfo:
    """A token of an answer: its text, its bytes as far as they are known, its log-probability, and likely others."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class TailEvent:
    """The end of a prompt's text, after its last object: a parser of its answers needs it. The first event, if any."""

    text: str


@dataclass(frozen=True)
class StartEvent:
    """The prompt is laid out and linked; the answers come next."""

    reuse: Reuse


@dataclass(frozen=True)
class DeltaEvent:
    """More of answer `index`, with what is reported of its tokens; `num_tokens` have come since the one before."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()
    num_tokens: int = field(default=1, compare=False)


@dataclass(frozen=True)
class FinishEvent:
    """The end of answer `index`: "stop" or "length", and how many tokens it has.

    `stop` is the stop string that ended it, `end` the text of the end token that did; `num_reasoning` tokens of it are
    reasoning, as far as its text was parsed.
    """

    index: int
    reason: str
    num_tokens: int
    stop: str | None = None
    end: str = ""
    num_reasoning: int = 0


@dataclass(frozen=True)
class ReasoningEvent:
    """More of what the model wrote before answer `index`. Parsed from its text; no backend sends it."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEvent:
    """The call `number` of a tool in answer `index`, whole; `arguments` is an object in JSON. Parsed likewise."""

    index: int
    number: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class VerificationEvent:
    """The first answer against full recompute of the same prompt."""

    report: Mapping[str, Any]


Event = TailEvent | StartEvent | DeltaEvent | ReasoningEvent | CallEvent | FinishEvent | VerificationEvent


@dataclass(frozen=True)
class BackendStatus:
    """How a backend is.

    Fields:
        divergence: KL(full ‖ linked) in nats an answer by policy, of the start-up check.
        learned_bytes: of objects that were compiled from texts which requests repeat. learning_failures: such texts
            that could not be compiled, or not written.
        pool: what a pool on the device did; None: there is none.
    """

    waiting: int
    active: int
    policy: str
    divergence: Mapping[str, float] = field(default_factory=dict)
    problem: str | None = None
    learned_bytes: int = 0
    learning_failures: int = 0
    pool: PoolCounts | None = None


class Backend(ABC):
    """One engine with one model. `model` is the model's name in the API, `created` when it was started.

    `own_name` is what the model is called where it runs, as the path of its folder: requests may use it, too.

    `response_template` is how the model writes calls and reasoning (`transformers`' chat_parsing); None: unknown.
    """

    response_template: Mapping[str, Any] | None = None
    model: str
    own_name: str = ""
    created: int
    context_length: int
    policy: Policy  # of requests that name none
    divergence: Mapping[str, float] = MappingProxyType({})  # of the start-up check (`BackendStatus`)
    problem: str | None = None  # why requests that name no policy are answered exactly

    @abstractmethod
    def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        """Answer a request. `StartEvent` precedes every `FinishEvent`; it is the first event if reuse is already known.

        A caller that goes no further gives its place back.

        Raises:
            ApiError: the queue is full. PicError: a prompt that cannot be answered.
        """

    @abstractmethod
    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        """Compile a text to one object, or to pieces of at most `chunk_tokens` tokens. Raises as `answer` does."""

    @abstractmethod
    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        """The tokens of a prompt, as its answer would have them. Raises as `answer` does."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether an object is in the store, as far as known of this model."""

    @abstractmethod
    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        """Run a span query; the texts of its answer. Raises as `answer` does."""

    def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a request of `pic link`; the events of /v1/link. Raises as `answer` does.

        Args:
            spec: its documents are texts, or keys.
            compares: whether it is answered under full recompute too.
        """
        raise ApiError(501, "this server's engine does not support /v1/link; use pic link")

    async def retrieve(
        self, query: DocumentQuery, tenant: Tenant, linking: Linking, texts: Sequence[str], max_new_tokens: int
    ) -> tuple[RetrievedDocument, ...]:
        """The stored documents of a tenant for a query, the best first: those that fit beside texts and an answer.

        Raises:
            ApiError: no such folder. InputError: no document has a word of the query.
        """
        raise ApiError(501, "documents: this server cannot retrieve by query; send the texts", param="documents")

    @abstractmethod
    def status(self) -> BackendStatus:
        """How it is now."""

    async def lives(self) -> bool:
        """Whether its engine can answer; what it was asked before is lost if not, and its server ends."""
        return True

    async def is_ready(self) -> bool:
        """Whether a request would be answered now."""
        return await self.lives()

    def close(self) -> None:  # noqa: B027 (a backend may hold nothing)
        """End what runs."""
