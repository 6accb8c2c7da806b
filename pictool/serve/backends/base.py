"""What a backend of one model and one store is, whatever engine answers: its settings, index, policies and reports."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import CODEC, object_key
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, CompileOptions, TokenIds
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.recognition.index import ContentIndex, IndexThread
from pictool.recognition.matches import Match
from pictool.runtime.model import api_name
from pictool.serve.admission import AdmissionControl
from pictool.serve.backends.query import ServedQuery
from pictool.serve.channel import Send, compiled_event
from pictool.serve.prompts.explained import explain
from pictool.serve.prompts.layout import Open, PromptLayout, lay_out, tools_text
from pictool.serve.prompts.learning import MAX_LEARNED, Learner, texts_of
from pictool.serve.prompts.leased import has_object, with_objects
from pictool.serve.prompts.policies import allowed_policy, require_allowed
from pictool.serve.prompts.retrieving import RetrievedDocument, StoredTexts
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    Backend,
    BackendStatus,
    ChatPrompt,
    CompiledText,
    Linking,
    PromptPart,
    RawPrompt,
    WrittenPiece,
)
from pictool.spans.running import RunOptions

if TYPE_CHECKING:
    from pictool.engines.base import Engine
    from pictool.linker.prefixes import PoolCounts
    from pictool.runtime.model import Model
    from pictool.serve.schema import DocumentQuery
    from pictool.store.store import Store

FULL = make_policy(BASELINE)
_SHOWN = 12  # tokens of a part that a response shows
log = logging.getLogger("pictool.serve")


@dataclass(frozen=True)
class BackendSettings:
    """How a backend works.

    Fields:
        policy: of requests that name none. allowed: names of the policies that they may name beside it; None: all.
        max_waiting: requests that wait at most. max_active: that take turns, beside one of each tenant that has none.
        num_tenants: for whom a backend that batches keeps places.
        max_tokens: of one answer at most; None: what the model has positions for.
        min_tokens: least tokens of a document that is recognised, or compiled for a marker.
        refresh_s: seconds between readings of the store for new objects.
        codec, after: how documents are compiled.
        name: what the API calls the model; None: its own name.
        learned_bytes: of objects that are compiled from texts which requests may repeat, at most; 0: none.
        pool_bytes: of KV that stays on the device from request to request; 0: none; None: see `default_pool_bytes`.
        kept_bytes: of exact prefixes that are kept on disk, in a directory of the store; 0: none.
        separator: what prompts have between documents; None: what the model has.
    """

    policy: Policy
    allowed: frozenset[str] | None = None
    max_waiting: int = 256
    max_active: int = 8
    max_tokens: int | None = None
    min_tokens: int = 16
    refresh_s: float = 10.0
    codec: str = CODEC
    after: str = PREVIOUS
    name: str | None = None
    learned_bytes: int = 0
    pool_bytes: int | None = 0
    kept_bytes: int = 0
    num_tenants: int = 1
    separator: str | None = None

    def spec(self, policy: Policy, **more: Any) -> Spec:
        """A spec of documents that are compiled as here."""
        return Spec(policy=policy, codec=self.codec, after=self.after, **more)


class EngineBackend(Backend):
    """One model over one store. It drives an `Engine` of each tenant; who inherits says when that has its turn, and how
    the tokens of an answer come.

    Attributes:
        index: the documents of the store that are recognised.
        divergence, problem: of the start-up check.
        batches: calls of a query that are ready at once reach the engine together.

    Raises:
        InputError, ModelError: the model does not support the policy.
    """

    batches: ClassVar[bool]

    def __init__(self, model: Model, store: Store, settings: BackendSettings) -> None:
        model.require_policy(settings.policy)
        if settings.separator is not None:
            model.separator = settings.separator
        self._base, self._store, self._settings = model, store, settings
        self.created, self.policy = int(time.time()), settings.policy
        self.response_template = getattr(model.tokenizer, "response_template", None)
        self._finding, self._is_learning = set[asyncio.Task[None]](), False  # parts of requests; compiling some
        self.divergence: dict[str, float] = {}
        self.problem: str | None = None
        cut = model.cut_of(settings.policy.needs.cut)
        self.index = ContentIndex(store, model.target, settings.min_tokens, self._indexed_text, cut)
        self._indexing = IndexThread(self.index, settings.refresh_s, lambda problem: log.warning("pic: %s", problem))

    def begin(self, name: str, context_length: int, max_learned: int = MAX_LEARNED) -> None:
        """Read the store, now that the engine's own name of the model and the longest sequence are known."""
        self.model, self.own_name, self.context_length = self._settings.name or api_name(name), name, context_length
        self._indexing.start()
        with self._base.on_wait("reading the store"):
            self._indexing.wait()
        self._texts = StoredTexts(self._store, self.index, self._base, context_length)
        settings = self._settings
        self._learner = Learner(self._store, settings.learned_bytes, self.index, settings.min_tokens, max_learned)
        self._cutting = copy(self._base)  # for texts that are cut in a thread: a tokenizer is used by one at a time
        self._cutting.tokenizer, self._cutting.name = deepcopy(self._base.tokenizer), self.model
        self._cutting_places = AdmissionControl(self._settings.max_waiting, most=1)

    def has(self, key: str) -> bool:
        return has_object(self._store, key, self._base.target)

    async def retrieve(
        self, query: DocumentQuery, tenant: Tenant, linking: Linking, texts: Sequence[str], max_new_tokens: int
    ) -> tuple[RetrievedDocument, ...]:
        return await asyncio.to_thread(self._texts.find, query, tenant.salt, texts, max_new_tokens)

    def _status(self, waiting: int, active: int, pool: PoolCounts | None = None) -> BackendStatus:
        return BackendStatus(
            waiting, active, label_of(self.policy), self.divergence, self.problem, self._learner.num_bytes,
            self._learner.num_failed, pool,
        )  # fmt: skip

    # What an engine does for a request

    @abstractmethod
    def _driven(self, tenant: Tenant, work: Callable[[Engine, Send], None]) -> AsyncGenerator[Any, None]:
        """What work with the engine over a tenant's objects sends. A caller that goes no further ends it.

        Raises:
            ApiError: there is no place for it. Exception: what the work raises.
        """

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        chunks = await self._cut(text, tenant, chunk_tokens)

        def work(engine: Engine, send: Send) -> None:
            for done in engine.compile(chunks, self._options(self.policy)):
                send(CompiledText(done.key, len(done.chunk), done.is_new, done.chunk.continues))
            self._indexing.wake()

        return [done async for done in self._driven(tenant, work)]

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        def work(engine: Engine, send: Send) -> None:
            served = ServedQuery(
                query, engine, (self.model, self.own_name), RunOptions(
                    self.policy, codec=self._settings.codec, after=self._settings.after, keeps_outputs=False,
                    side_by_side=self.batches,
                )
            )  # fmt: skip
            send(served.run())
            self._indexing.wake()

        (texts,) = [texts async for texts in self._driven(tenant, work)]
        return list(texts)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        require_allowed(spec.policy, self._settings.policy, self._settings.allowed)

        def work(engine: Engine, send: Send) -> None:
            answer = engine.answer(
                with_objects(spec, self._store, tenant.salt), compare=compares,
                on_text=lambda text: send({"text": text}), on_compile=lambda done: send(compiled_event(done)),
            )  # fmt: skip
            report: dict[str, Any] = answer.report() | {"model": self.model}
            report.pop("pool", None)  # its moves are of other tenants' objects, too
            send({"report": report, "origin": answer.origin()})
            self._indexing.wake()

        async with aclosing(self._driven(tenant, work)) as events:
            async for event in events:
                yield event

    def _options(self, policy: Policy) -> CompileOptions:
        """How the objects of a policy are compiled."""
        return self._settings.spec(policy).objects_for(self._base)

    async def _cut(self, text: str, tenant: Tenant, chunk_tokens: int | None) -> list[Chunk]:
        """The chunks of a text, cut in a thread; one text at a time, also if a client goes away."""
        async with self._cutting_places.place(tenant.name):
            cutting = asyncio.ensure_future(asyncio.to_thread(make_chunks, self._cutting, text, "text", chunk_tokens))
            try:
                return await asyncio.shield(cutting)
            finally:
                await asyncio.wait({cutting})
                cutting.exception()  # read, or asyncio logs it where the client went away

    # Texts that requests may repeat

    def _learn(self, work: AnswerRequest) -> None:
        """After an answer, which does not wait for it: have parts of its request compiled, if nobody waits and none are
        compiled now.
        """

        async def learn() -> None:
            parts = await asyncio.to_thread(self._learner.find, work.tenant.id, texts_of(work.prompt))
            if parts and not self.status().waiting and not self._is_learning:
                self._is_learning = True
                self._begin_learning(work.tenant, parts)

        if self._settings.learned_bytes and work.linking.recognises:
            task = asyncio.create_task(learn())
            self._finding.add(task)
            task.add_done_callback(self._finding.discard)

    @abstractmethod
    def _begin_learning(self, tenant: Tenant, parts: Mapping[str, bool]) -> None:
        """Run `_compile_parts` while no request runs."""

    def _compile_parts(self, engine: Engine, parts: Mapping[str, bool]) -> None:
        """Compile texts that are new or not, one object at a time, while no request waits."""
        options = self._options(self.policy)
        try:
            for text, is_new in parts.items():
                for chunk in self._learner.chunks(engine.model, self.policy, text):
                    if self.status().waiting:
                        return
                    if not self._store.path(object_key(engine.model, chunk, options)).exists():
                        (done,) = engine.compile([chunk], options)
                        self._learner.count(done, is_new)
        except Exception as error:
            self._learner.fail(error)
        finally:
            self._indexing.wake()

    # Prompts

    def _policy_of(self, linking: Linking) -> Policy:
        """The policy of a request. Raises ApiError."""
        named, settings = linking.policy, self._settings
        return self.policy if named is None else allowed_policy(named, settings.policy, settings.allowed)

    def _lay_out(
        self, model: Model, prompt: ChatPrompt | RawPrompt, pieces: Sequence[WrittenPiece], open_object: Open,
        linking: Linking, policy: Policy,
    ) -> PromptLayout:  # fmt: skip
        """Tokenize a prompt, and find the objects in it that its policy links: the last token is always computed, and
        nothing is linked in the text of a chat's tools (docs/studies/answers.md).

        Raises:
            InputError: it leaves no room to answer.
        """

        def recognise(tokens: TokenIds) -> list[Match]:
            return self.index.find(tokens, model.salt)

        found = lay_out(
            model, pieces, open_object, recognise if linking.recognises and policy.needs.objects else None
        )  # fmt: skip
        num_prompt = len(found.tokens)
        self._require_room(model, num_prompt)

        def is_document(match: Match) -> bool:
            """Not the head of another prompt: only templates write control tokens."""
            return match.start > 0 or model.encoder.find_control(match.tokens.tolist()) is None

        tools = tools_text(model, prompt) if "recognised" in found.sources else ""

        def is_of_tools(i: int) -> bool:
            text = str(model.tokenizer.decode(found.matches[i].tokens.tolist())) if tools else ""
            return bool(text) and found.sources[i] == "recognised" and text.strip() in tools

        kept = [
            i for i, match in enumerate(found.matches)
            if match.start < num_prompt - 1 and policy.needs.objects and is_document(match) and not is_of_tools(i)
        ]  # fmt: skip
        sources = tuple(self._learner.source_of(found.matches[i].key, found.sources[i]) for i in kept)
        return replace(found, matches=tuple(found.matches[i] for i in kept), sources=sources)

    @abstractmethod
    def _require_room(self, model: Model, num_tokens: int) -> None:
        """Refuse a prompt that is too long. Raises InputError."""

    def _is_plain(self, work: AnswerRequest) -> bool:
        """Whether an answer begins with a blank, which follows "Answer:" where a model has no template."""
        return isinstance(work.prompt, ChatPrompt) and not self._base.tokenizer.chat_template

    def _most_tokens(self, work: AnswerRequest, room: int) -> int:
        """The most tokens of an answer, in a context with room for so many."""
        limits = [room, work.max_tokens, self._settings.max_tokens]
        return min(limit for limit in limits if limit is not None)

    def _explained(
        self, linking: Linking, prompt_layout: PromptLayout, policy: Policy, reused: Iterable[PromptPart], fails: bool
    ) -> tuple[PromptPart, ...]:
        """What became of each part of a prompt, with its text if the client asked for it."""
        ids = prompt_layout.tokens
        parts = explain(len(ids), reused, linking, policy, self._settings.min_tokens, problem=fails)
        if not linking.explains:
            return parts
        return tuple(
            replace(part, text=self._text_of(ids[part.start : part.end][:_SHOWN].tolist())) for part in parts
        )  # fmt: skip

    def _text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids, for an answer."""
        return self._indexed_text(tokens)

    def _indexed_text(self, tokens: Sequence[int]) -> str:
        return str(self._base.tokenizer.decode(list(tokens)))
