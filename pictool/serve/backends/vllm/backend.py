"""The backend inside vLLM's own server: prompts are laid out here, and linked by the connector in vLLM's engine."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pictool.compiler.chunking import make_chunk, make_chunks
from pictool.compiler.compile import object_key
from pictool.core import Chunk, CompileOptions, PromptText, Sampling, TokenIds
from pictool.engines.vllm.client.online import OnlineEngine
from pictool.engines.vllm.client.serving import PromptRecord, RefusedError, RequestTap, Serving
from pictool.engines.vllm.request import MAX_OBJECTS
from pictool.errors import InputError, PicError
from pictool.fidelity.divergence import check_prompts
from pictool.fidelity.sample import read_sample
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.policies.fixup import without_table
from pictool.linker.spec import Spec
from pictool.runtime.chat.template import MarkerQuotes
from pictool.runtime.model import Model
from pictool.serve.admission import AdmissionControl, held
from pictool.serve.backends.query import ServedQuery
from pictool.serve.backends.vllm.options import PluginOptions
from pictool.serve.channel import Send, compiled_event, events_of
from pictool.serve.errors import ApiError
from pictool.serve.prompts.explained import explain
from pictool.serve.prompts.layout import Marks, PromptLayout, lay_out, pieces_of, takes_documents
from pictool.serve.prompts.learning import Learner, texts_of
from pictool.serve.prompts.leased import has_object, leased_object, with_objects
from pictool.serve.prompts.offered import offered_policy, require_offered
from pictool.serve.prompts.retrieving import RetrievedDocument, StoredTexts
from pictool.serve.schema import DocumentQuery
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    Backend,
    BackendStatus,
    ChatPrompt,
    CompiledText,
    DeltaEvent,
    Event,
    FinishEvent,
    Linking,
    MarkedText,
    ObjectReference,
    PromptPart,
    RawPrompt,
    Reuse,
    StartEvent,
    TailEvent,
    TokenInfo,
    VerificationEvent,
    WrittenPiece,
)
from pictool.store.entries import Entry
from pictool.store.eviction import remove_all
from pictool.store.recognition import ContentIndex, IndexThread

T = TypeVar("T")
_LINKING = 16  # requests of pic link that run at once
_QUERYING = 8  # span queries that run at once, a thread each
_FULL = make_policy(BASELINE)
_LINKED = ("linked", "cached")  # states of the connector's report
_WRITTEN = ("messages", "documents", "tools", "chat_template_kwargs")  # of a body, what its template copies
_log = logging.getLogger("vllm.pictool.serve")


class VllmBackend(Backend):
    """Answers inside vLLM's server. Until `start`, it only has a name.

    Attributes:
        admission: of requests to vLLM's engine, whichever route they came by.
    """

    def __init__(self, options: PluginOptions = PluginOptions(), num_tenants: int = 1) -> None:
        self._options, self._num_tenants = options, num_tenants
        self.admission = AdmissionControl(options.queue, options.active or 1)
        self.created, self.model, self.context_length = int(time.time()), "", 0
        self.policy = _FULL
        self.divergence: dict[str, float] = {}
        self.problem: str | None = None
        self._learner: Learner | None = None
        self._learning: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_LINKING, "pic-link")
        self._queries = AdmissionControl(options.queue, _QUERYING, num_tenants)
        self._query_threads = ThreadPoolExecutor(_QUERYING, "pic-query")
        self._encoding, self._opening = threading.Lock(), threading.Lock()

    async def start(self, serving: Serving, recognises: bool = True) -> None:
        """Take over a server whose engine runs.

        Args:
            recognises: whether requests may have documents recognised; then the connector begins to read the store.
        """
        self.serving, self._loop = serving, asyncio.get_running_loop()
        self.model, self.context_length = serving.names[0], serving.max_model_len
        self.policy, self._store = serving.settings.policy, serving.open_store()
        _ = serving.target, serving.model.eos_ids
        if self._options.separator is not None:
            serving.model.separator = self._options.separator
        self.response_template = getattr(serving.model.tokenizer, "response_template", None)
        most = self._options.active or serving.max_num_seqs
        self.admission = AdmissionControl(self._options.queue, most, self._num_tenants)
        self._decoder = deepcopy(serving.model.tokenizer)  # of the event loop alone
        if recognises:
            await self._recognise_nothing()
        if self._options.learn:
            await asyncio.to_thread(self._start_learner)

    def status(self) -> BackendStatus:
        learner = self._learner
        learned = (0, 0) if learner is None else (learner.num_bytes, learner.num_failed)
        waiting = self.admission.num_waiting + self._queries.num_waiting
        return BackendStatus(
            waiting, self.admission.num_active, label_of(self.policy), self.divergence, self.problem, *learned
        )  # fmt: skip

    async def lives(self) -> bool:
        return await self.serving.check_health()

    def close(self) -> None:
        """End its threads. The engine is its server's."""
        for threads in (self._threads, self._query_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    # The backend's contract

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        try:
            async with self.admission.place(work.tenant.name, work.n):
                prompt_layout, params = await self.prompt(work.tenant, work.prompt, work.linking)
                tap, engine = RequestTap(), self.engine_of(work.tenant)
                async with aclosing(self._events(work, prompt_layout, params, tap, engine)) as events:
                    async for event in events:
                        yield event
        except (PicError, ApiError):
            raise
        except Exception as error:
            refused = RefusedError.of(error)
            if refused is None:
                raise
            code = "context_length_exceeded" if "context length" in refused.message else None
            raise ApiError(refused.status, refused.message, code=code) from error
        if work.linking.recognises:
            await self.learn(work.tenant, texts_of(work.prompt))

    async def _events(
        self, work: AnswerRequest, prompt_layout: PromptLayout, params: object, tap: RequestTap, engine: OnlineEngine
    ) -> AsyncGenerator[Event, None]:
        limit = self._num_tokens(work, len(prompt_layout.tokens))
        if work.answer_format.keeps_special:
            yield TailEvent(prompt_layout.tail)
        same = range(work.n) if work.sampling.temperature == 0 else None  # answers that are one, which vLLM gives once
        outputs = self.serving.generate(
            engine, prompt_layout.tokens.tolist(), work.sampling, limit, 1 if same else work.n, {"pic": params}, tap,
            work.num_top, work.answer_format,
        )  # fmt: skip
        is_plain = isinstance(work.prompt, ChatPrompt) and not self.serving.template  # "Answer:", then a blank
        started, begun, num_new = False, set[int](), Counter[int]()
        try:
            async for output in outputs:
                for part in output.outputs:
                    text = part.text.lstrip() if is_plain and part.index not in begun else part.text
                    num_new[part.index] += len(part.token_ids)
                    if text:
                        begun.add(part.index)
                    infos = () if work.num_top is None else self._infos(part, work.num_top)
                    if text or infos:
                        for index in same or (part.index,):
                            yield DeltaEvent(index, text, infos, num_new[part.index])
                        num_new[part.index] = 0
                    if part.finish_reason not in (None, "stop", "length"):
                        raise ApiError(503, "the server ended the answer")
                    if part.finish_reason is not None:
                        record = tap.prompts[0]
                        if not started:  # the connector reports at the end
                            started = True
                            yield StartEvent(self.reuse(work.linking, prompt_layout, record))
                        for index in same or (part.index,):
                            yield self._finish(index, part, record.tokens[part.index])
            if work.linking.verifies:
                yield VerificationEvent(await self.serving.verify(tap.prompts[0]))
        finally:
            await outputs.aclose()

    def _num_tokens(self, work: AnswerRequest, num_prompt: int) -> int:
        """How many tokens an answer may have. Raises InputError: the prompt leaves no room."""
        room = self.context_length - num_prompt
        if room < 1:
            raise InputError(f"the prompt has {num_prompt} tokens, and the server {self.context_length} positions")
        return room if work.max_tokens is None else min(room, work.max_tokens)

    def _finish(self, index: int, part: Any, tokens: Sequence[int]) -> FinishEvent:
        """The end of an answer. vLLM's text has no end token."""
        stop = part.stop_reason if isinstance(part.stop_reason, str) else None
        is_ended = part.finish_reason == "stop" and stop is None and len(tokens) > 0
        return FinishEvent(index, part.finish_reason, len(tokens), stop, self._decode(tokens[-1]) if is_ended else "")

    def _infos(self, part: Any, num_top: int) -> tuple[TokenInfo, ...]:
        """The tokens of an output's part but end tokens, with their log-probabilities."""
        infos = []
        for token, entries in zip(part.token_ids, part.logprobs or (), strict=True):
            if token in self.serving.model.eos_ids:
                continue
            likely = sorted(entries.items(), key=lambda entry: entry[1].rank)[:num_top]
            top = tuple((self._decode(other), float(entry.logprob)) for other, entry in likely)
            infos.append(TokenInfo(self._decode(token), float(entries[token].logprob), top))
        return tuple(infos)

    def _decode(self, token: int) -> str:
        return str(self._decoder.decode([token]))

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        engine = self.engine_of(tenant)
        options = CompileOptions(Spec(policy=self.policy).objects.sinks)
        async with self.admission.place(tenant.name):
            chunks = await self._in_thread(lambda: make_chunks(engine.model, text, "text", chunk_tokens))
            done = await asyncio.to_thread(engine.compile, chunks, options)
        return [CompiledText(part.key, len(part.chunk), part.is_new, part.chunk.continues) for part in done]

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        prompt_layout, _ = await self.prompt(tenant, prompt, Linking(BASELINE, False))
        return len(prompt_layout.tokens)

    def has(self, key: str) -> bool:
        return has_object(self._store, key, self.serving.target)

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        """Run a query in a thread of its own. It holds no place; each of its calls takes one, and so do its objects.

        However many of its calls are ready, one of them waits for a place at a time.
        """
        policy, waiting = self.policy, asyncio.Lock()

        @asynccontextmanager
        async def place() -> AsyncGenerator[None, None]:
            async with waiting:
                held_place = await self.admission.take(tenant.name, has_begun=True)
            with held(held_place):
                yield

        async with self._queries.place(tenant.name):
            engine = await self._in_thread(lambda: self._apart(tenant, place=place))

            def work(send: Send) -> None:
                send(ServedQuery(query, engine, self.serving.names, policy, Spec().codec).run())

            async with aclosing(events_of(self._query_threads, work, engine.stop)) as events:
                (texts,) = [texts async for texts in events]
        return list(texts)

    async def retrieve(
        self, wanted: DocumentQuery, tenant: Tenant, linking: Linking, texts: Sequence[str], max_new_tokens: int
    ) -> tuple[RetrievedDocument, ...]:
        sinks = self.policy_of(linking).needs.sinks

        def find() -> tuple[RetrievedDocument, ...]:
            with self._opening:
                stored = self._texts
            return stored.find(wanted, tenant.salt, sinks, texts, max_new_tokens)

        return await asyncio.to_thread(find)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        settings = self.serving.settings
        require_offered(spec.policy, settings.policy, settings.policies)
        engine = await self._in_thread(lambda: self._apart(tenant, fresh=True))

        def work(send: Send) -> None:
            answer = engine.answer(
                with_objects(spec, self._store, tenant.salt), compare=compares,
                on_text=lambda text: send({"text": text}), on_compile=lambda done: send(compiled_event(done)),
            )  # fmt: skip
            send({"report": answer.report() | {"model": self.model}, "origin": answer.origin()})

        async with (
            self.admission.place(tenant.name),
            aclosing(events_of(self._threads, work, engine.stop)) as events,
        ):
            async for event in events:
                yield event

    def engine_of(
        self, tenant: Tenant, *, later: bool = False, fresh: bool = False,
        place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> OnlineEngine:  # fmt: skip
        """The engine over a tenant's objects.

        Args:
            later: an engine for objects that no request waits for. fresh: one that takes nothing from vLLM's own cache.
            place: what each of its requests is sent within.
        """
        model = copy(self.serving.model)
        model.salt = tenant.salt
        return OnlineEngine(model, self._store, self.serving.client, self._loop, later=later, fresh=fresh, place=place)

    def _apart(self, tenant: Tenant, **more: Any) -> OnlineEngine:
        """The same with a tokenizer of its own: only one thread at a time may encode with a tokenizer."""
        engine = self.engine_of(tenant, **more)
        engine.model.tokenizer = deepcopy(engine.model.tokenizer)
        return engine

    # Prompts

    def policy_of(self, linking: Linking) -> Policy:
        """The policy of a request. Raises ApiError."""
        settings = self.serving.settings
        if linking.policy is None:
            return self.policy
        policy = offered_policy(linking.policy, settings.policy, settings.policies)
        if policy.needs.chain_block:
            raise ApiError(400, f"policy: {policy.name}: vLLM has a prefix cache of its own", param="pic.policy")
        policy.require_second_model(self.serving.model)
        return policy

    async def prompt(
        self, tenant: Tenant, prompt: ChatPrompt | RawPrompt, linking: Linking, body: Mapping[str, Any] | None = None
    ) -> tuple[PromptLayout, object]:
        """Lay out a prompt: its tokens and objects, and what the connector is asked for.

        Args:
            body: the request's own, whose other fields vLLM's template may read.
        """
        policy = self.policy_of(linking)
        engine = self.engine_of(tenant)
        pieces = await self._pieces(engine.model, prompt, body or {})
        marked, new = await self._compile_marked(engine, pieces, policy)
        prompt_layout = await self._in_thread(
            lambda: lay_out(engine.model, pieces, lambda piece: self._object(piece, engine.model, marked), None)
        )
        tail = pieces[-1].text if isinstance(pieces[-1], PromptText) else ""
        made = tuple(CompiledText(key, len(tokens), key in new) for key, tokens in marked.values() if key)
        prompt_layout = replace(prompt_layout, tail=tail, marked=made)
        if len(prompt_layout.matches) > MAX_OBJECTS:
            raise ApiError(
                400, f"messages: {len(prompt_layout.matches)} objects; {MAX_OBJECTS} at most", param="messages"
            )
        if policy.needs.all_tables:
            await self._in_thread(lambda: self._require_tables(prompt_layout))
        return prompt_layout, self.params(policy, linking, prompt_layout)

    def _require_tables(self, prompt_layout: PromptLayout) -> None:
        """Refuse a named object without a table of fixups: vLLM makes none."""
        for match in prompt_layout.matches:
            with self._store.peek(match.key) as file:
                if file.meta.fixups is None:
                    raise without_table(file.text(), match.start)

    def params(self, policy: Policy, linking: Linking, prompt_layout: PromptLayout | None = None) -> object:
        """The connector's field `pic` of a prompt."""
        if not policy.needs.objects:
            return False
        wanted: dict[str, object] = {"policy": {"algo": policy.name, **policy.params}}
        last = 0 if prompt_layout is None else len(prompt_layout.tokens) - 1
        named = [match for match in (prompt_layout.matches if prompt_layout is not None else ()) if match.start < last]
        if not named and not linking.recognises:
            return False
        if named:
            wanted["chunks"] = [{"key": match.key, "start": match.start} for match in named]
        if linking.recognises:
            wanted["recognise"] = True
        return wanted

    def reuse(self, linking: Linking, prompt_layout: PromptLayout | None, record: PromptRecord) -> Reuse:
        """What was done with a prompt."""
        policy, report, num_prompt = self.policy_of(linking), record.report, record.num_prompt
        notes = () if prompt_layout is None else prompt_layout.notes
        label = label_of(policy)
        if report is None or report["state"] not in _LINKED:
            problem = None if report is None else report["problem"]
            label = label if problem is None else BASELINE
            parts = explain(
                num_prompt, (), linking, policy, self.serving.settings.min_tokens, problem=problem is not None
            )
            return Reuse(
                label, exact=num_prompt, cached=record.num_cached, problem=problem, parts=parts,
                explains=linking.explains, notes=notes,
            )  # fmt: skip
        parts = self._parts(report, prompt_layout, num_prompt, linking, policy)
        sources = {part.reason for part in parts if part.key}
        total, recomputed = report["document_tokens"], math.ceil(report["document_rows"])
        return Reuse(
            label, report["chunks"], num_prompt - total, total - recomputed, recomputed, record.num_cached,
            "+".join(sorted(sources)), marked=() if prompt_layout is None else prompt_layout.marked,
            parts=parts, explains=linking.explains, notes=notes,
        )  # fmt: skip

    def _parts(
        self, report: Mapping[str, Any], prompt_layout: PromptLayout | None, num_prompt: int, linking: Linking,
        policy: Policy,
    ) -> tuple[PromptPart, ...]:  # fmt: skip
        """What became of each part of a prompt, by the connector's report."""
        found = [] if prompt_layout is None else zip(prompt_layout.matches, prompt_layout.sources, strict=True)
        sources = {match.start: source for match, source in found}
        linked = [
            PromptPart(start, end, sources.get(start) or self._source_of(key), key, rows)
            for start, end, key, rows in report["documents"]
        ]
        return explain(num_prompt, linked, linking, policy, self.serving.settings.min_tokens)

    def _source_of(self, key: str) -> str:
        return "recognised" if self._learner is None else self._learner.source_of(key)

    async def _pieces(
        self, model: Model, prompt: ChatPrompt | RawPrompt, body: Mapping[str, Any]
    ) -> list[WrittenPiece]:
        """The pieces of a prompt. Chats are laid out by vLLM's template, or plainly if it has none."""
        if isinstance(prompt, RawPrompt) or not self.serving.template:
            return pieces_of(model, prompt)
        chat = prompt if takes_documents(self.serving.template) else prompt.without_documents()
        marks, quotes = Marks(), MarkerQuotes(model)
        rendered = dict(body) | {"messages": marks.messages(chat), "model": self.model}
        rendered |= {"documents": marks.documents(chat)} if chat.documents else {"documents": None}
        if chat.tools and "tools" not in body:  # what the template makes of them; vLLM parses no calls here
            rendered |= {"tools": list(chat.tools), "tool_choice": "none"}
        rendered |= {name: quotes.quote(rendered[name]) for name in _WRITTEN if name in rendered}
        return marks.split(quotes.read(await self.serving.render(rendered)), model.name)

    async def _compile_marked(
        self, engine: OnlineEngine, pieces: Sequence[WrittenPiece], policy: Policy
    ) -> tuple[dict[str, tuple[str, TokenIds]], set[str]]:
        """The objects of marked texts, by text: compiled where the store lacks them; no key where that fails. And
        those that were compiled.
        """
        texts = list(dict.fromkeys(piece.text for piece in pieces if isinstance(piece, MarkedText)))

        def chunks() -> list[Chunk]:
            return [make_chunk(engine.model, text, "a marked part") for text in texts]

        made = await self._in_thread(chunks)
        tokens = [np.asarray(chunk.tokens, dtype=np.int32) for chunk in made]
        if not made or not policy.needs.objects:
            return {text: ("", ids) for text, ids in zip(texts, tokens, strict=True)}, set()
        options = CompileOptions(Spec(policy=policy).objects.sinks)
        keys = [object_key(engine.model, chunk, options) for chunk in made]
        missing = [chunk for chunk, key in zip(made, keys, strict=True) if chunk.tokens and not self._store.has(key)]
        new = {object_key(engine.model, chunk, options) for chunk in missing}
        try:
            await asyncio.to_thread(engine.compile, missing, options)
        except PicError as error:  # a full store or disk
            _log.warning("pic: marked texts are computed exactly: %s", error)
            keys = [key if self._store.has(key) else "" for key in keys]
        return dict(zip(texts, zip(keys, tokens, strict=True), strict=True)), new

    def _object(
        self, piece: ObjectReference | MarkedText, model: Model, marked: Mapping[str, tuple[str, TokenIds]]
    ) -> tuple[str, TokenIds]:
        if isinstance(piece, MarkedText):
            return marked[piece.text]
        return leased_object(self._store, piece.key, model, _log)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run what encodes in a thread: one at a time, since a tokenizer is used by one."""

        def run() -> T:
            with self._encoding:
                return work()

        return await asyncio.to_thread(run)

    # Texts that requests repeat

    async def learn(self, tenant: Tenant, texts: Iterable[str]) -> None:
        """After an answer: have the parts of its request compiled that an earlier one had, if nobody waits."""
        if self._learner is None:
            return
        parts = await asyncio.to_thread(self._learner.find, tenant.id, texts)
        is_busy = self.admission.num_waiting or (self._learning is not None and not self._learning.done())
        if parts and not is_busy:
            self._learning = asyncio.create_task(self._compile_parts(self._learner, tenant, parts))

    async def _compile_parts(self, learner: Learner, tenant: Tenant, parts: Sequence[str]) -> None:
        """Compile texts, one object at a time, while no request waits for admission."""
        engine, policy = self.engine_of(tenant, later=True), self.policy
        options = CompileOptions(Spec(policy=policy).objects.sinks)
        chunks = learner.chunks(engine.model, policy, parts)
        try:
            while (chunk := await self._in_thread(lambda: next(chunks, None))) is not None:
                if self.admission.num_waiting:
                    return
                (done,) = await asyncio.to_thread(engine.compile, [chunk], options)
                learner.count(done)
        except (PicError, OSError) as error:
            learner.fail(error)
        finally:
            self._indexing.wake()

    def _start_learner(self) -> None:
        """What the store has is not learned."""
        longest = self.context_length - Spec(policy=self.policy).objects.sinks - 2
        self._learner = Learner(self._options.learn, self._index, self.serving.settings.min_tokens, longest)

    @cached_property
    def _index(self) -> ContentIndex:
        """An index of the store beside the connector's, which is in another process. The store is read first."""
        settings, model = self.serving.settings, self.serving.model

        def decode(tokens: Sequence[int]) -> str:
            return str(model.tokenizer.decode(list(tokens)))

        index = ContentIndex(self._store, self.serving.target, settings.min_tokens, decode, model.bos_id)
        self._indexing = IndexThread(index, settings.refresh_s, lambda problem: _log.warning("pic: %s", problem))
        self._indexing.start()
        self._indexing.wait(settings.start_s)
        return index

    @cached_property
    def _texts(self) -> StoredTexts:
        return StoredTexts(self._store, self._index, self.serving.model, self.context_length)

    # The start

    async def check(self, limit: float, refuses: bool) -> None:
        """Link a few prompts with the loaded weights, and answer exactly if they are far from full recompute.

        Raises:
            InputError: that is so, and `refuses`.
        """
        policy, label = self.policy, label_of(self.policy)
        if not policy.needs.objects:
            return
        kl = await asyncio.to_thread(self.measure, policy)
        self.divergence = {label: kl}
        if kl <= limit:
            return
        problem = f"{label}: linked answers of {self.model} are {kl:.3g} nats from full recompute, more than {limit:g}"
        if refuses:
            raise InputError(f"{problem}; try another policy, or a larger check_limit")
        self.policy, self.problem = _FULL, problem
        _log.warning("pic: %s; requests that name no policy are answered exactly", problem)

    def measure(self, policy: Policy, tuned: Path | None = None) -> float:
        """The mean divergence of the check's prompts. Their objects have a salt of their own, and are removed.

        Args:
            tuned: the store whose prompts of `pic tune` are linked, if it has some; None: its own.
        """
        engine, root = self._apart(Tenant("check", secrets.token_hex(16))), self._store.root
        model = engine.model
        specs = check_prompts(model, policy, self.context_length, read_sample(tuned or root))
        try:
            return sum(engine.divergence(spec) for spec in specs) / len(specs)
        finally:
            found = [Entry.of(path) for path in engine.compiled]
            if entries := [entry for entry in found if entry is not None]:
                remove_all(root, entries)

    async def _recognise_nothing(self) -> None:
        """Send a prompt in which documents are recognised, so that the connector begins to read the store."""
        engine = self.engine_of(Tenant("start"))
        ids = list(engine.model.encode("The start."))[:4]
        params = {"pic": {"recognise": True}}
        async for _ in self.serving.generate(engine, ids, Sampling(), 1, 1, params, RequestTap()):
            pass
