"""The backend on the torch engine: one process, one thread that computes, requests a step each in turn."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.compiler.chunking import make_chunk, make_chunks
from pictool.compiler.compile import CODEC, Compiled, compile_chunks
from pictool.core import Chunk, PromptText, TokenIds
from pictool.engines import engine_of
from pictool.engines.base import Answer, LinkResult, compare_answers
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError, NotFiniteError, ObjectError, StoreError
from pictool.linker.grid import label_of
from pictool.linker.link import Linked, keep_prefix, link, require_room
from pictool.linker.plan import LinkPlan, make_plan, plan_without_objects
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy
from pictool.linker.residency import ResidentObjects
from pictool.linker.spec import Spec
from pictool.recognition.index import ContentIndex, IndexThread
from pictool.recognition.matches import Match
from pictool.runtime.decode import Generated, Step, generate, generate_steps, generated_of
from pictool.runtime.grammar import compiled
from pictool.runtime.memory.pool import default_pool_bytes
from pictool.serve.admission import AdmissionControl
from pictool.serve.backends.query import ServedQuery
from pictool.serve.backends.torch.engine_thread import ClosedError, EngineTask, EngineThread, QueueFullError
from pictool.serve.backends.torch.served_engine import ServedEngine, with_chunks
from pictool.serve.channel import Channel, End, Send, compiled_event
from pictool.serve.errors import queue_full, server_ends
from pictool.serve.prompts.explained import explain
from pictool.serve.prompts.layout import PromptLayout, lay_out, pieces_of
from pictool.serve.prompts.learning import Learner, texts_of
from pictool.serve.prompts.leased import has_object, leased_object, with_objects
from pictool.serve.prompts.offered import offered_policy, require_offered
from pictool.serve.prompts.retrieving import RetrievedDocument, StoredTexts
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
    Reuse,
    StartEvent,
    TailEvent,
    TokenInfo,
    UnstoredText,
    VerificationEvent,
    WrittenPiece,
)

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.serve.schema import DocumentQuery
    from pictool.store.store import Store

FULL = make_policy(BASELINE)
_log = logging.getLogger("pictool.serve")


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
        codec: how KV is kept.
        name: what the API calls the model; None: its own name.
        learned_bytes: of objects that are compiled from texts which requests repeat, until the server ends; 0: none.
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
    name: str | None = None
    learned_bytes: int = 0
    pool_bytes: int | None = 0
    kept_bytes: int = 0
    num_tenants: int = 1
    separator: str | None = None


def _open_residents(model: Model, store: Store, settings: BackendSettings) -> ResidentObjects | None:
    """The KV that stays on the device, if the settings leave room for some. Raises as `TorchBackend`."""
    if settings.pool_bytes:
        engine_of(model).require("pool", "--pool")
    pool_bytes = settings.pool_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes(model) if "pool" in engine_of(model).supports else 0
    if settings.kept_bytes and not pool_bytes:
        raise InputError(f"--keep-prefixes: needs KV of {model.name} on the device, and there is none; see --pool")
    kept = store.within("prefixes", max_bytes=settings.kept_bytes) if settings.kept_bytes else None
    return ResidentObjects(model, pool_bytes, True, kept, store.memory) if pool_bytes else None


class TorchBackend(Backend):
    """Answers on `transformers` models in this process. A context manager, of which `close` is the end.

    Raises:
        InputError: a pool of too few bytes. ModelError: of a model whose keys cannot be moved.
    """

    def __init__(self, model: Model, store: Store, settings: BackendSettings) -> None:
        self._base, self._store, self._settings = model, store, settings
        model.on_note = lambda text: _log.warning("pic: %s", text)
        self._engines: dict[str, TorchEngine] = {}  # by salt
        self._residents = _open_residents(model, store, settings)
        self.model, self.created = settings.name or model.name, int(time.time())
        self.context_length = model.max_positions
        self.policy = settings.policy
        self.divergence: dict[str, float] = {}
        self.problem: str | None = None
        if settings.separator is not None:
            model.separator = settings.separator
        model.require_policy(settings.policy)
        settings.policy.prepare(model)
        self._tokenizer = model.tokenizer
        self.response_template = getattr(model.tokenizer, "response_template", None)
        self._cutting = copy(model)  # for texts that are cut in other threads: a tokenizer is used by one at a time
        self._cutting.tokenizer, self._cutting.name = deepcopy(model.tokenizer), self.model
        cut = model.cut_of(settings.policy.needs.cut)
        self.index = ContentIndex(store, model.target, settings.min_tokens, self._decode, model.bos_id, cut)
        self._indexing = IndexThread(self.index, settings.refresh_s, lambda problem: _log.warning("pic: %s", problem))
        self._indexing.start()
        self._indexing.wait()
        self._texts = StoredTexts(store, self.index, model, self.context_length)
        self._thread = EngineThread(settings.max_waiting, settings.max_active)
        self._cutting_places = AdmissionControl(settings.max_waiting, most=1)
        self._learner = Learner(settings.learned_bytes, self.index, settings.min_tokens)

    def __enter__(self) -> TorchBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def lives(self) -> bool:
        return self._thread.is_alive

    def close(self) -> None:
        self._thread.close()
        self._indexing.close()

    def status(self) -> BackendStatus:
        return BackendStatus(
            self._thread.num_waiting, self._thread.num_active, label_of(self.policy), self.divergence, self.problem,
            self._learner.num_bytes, self._learner.num_failed,
            None if self._residents is None else self._residents.counts,
        )  # fmt: skip

    # The backend's contract

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        if work.answer_format.schema is not None:
            work = replace(work, answer_format=await asyncio.to_thread(compiled, self._base, work.answer_format))
        async with aclosing(self._in_turn(work.tenant.name, partial(self._answer, work))) as events:
            async for event in events:
                yield event
        await self._learn(work)

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        chunks = await self._cut(text, tenant, chunk_tokens)

        def work(task: EngineTask, send: Send) -> None:
            options = Spec(policy=self.policy, codec=self._settings.codec).objects_for(self._base)
            for done in ServedEngine(self.engine_of(tenant), task).compile(chunks, options):
                send(CompiledText(done.key, len(done.chunk), done.is_new, done.chunk.continues))
            self._indexing.wake()

        return [done async for done in self._in_turn(tenant.name, work)]

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        def work(task: EngineTask, send: Send) -> None:
            model = self.engine_of(tenant).model
            pieces = pieces_of(model, prompt)
            send(len(lay_out(model, pieces, lambda piece: self._object(piece, model, FULL), None).tokens))

        (count,) = [count async for count in self._in_turn(tenant.name, work)]
        return int(count)

    def has(self, key: str) -> bool:
        return has_object(self._store, key, self._base.target)

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        """Run a query: each of its calls is a turn of its own, so that others come in between."""

        def work(task: EngineTask, send: Send) -> None:
            engine = ServedEngine(self.engine_of(tenant), task, self._settings.max_tokens)
            served_query = ServedQuery(
                query, engine, (self.model,), self.policy, self._settings.codec, side_by_side=False,
                checkpoint=partial(task.checkpoint, ends_turn=True),
            )  # fmt: skip
            send(served_query.run())
            self._indexing.wake()

        (texts,) = [texts async for texts in self._in_turn(tenant.name, work)]
        return list(texts)

    async def retrieve(
        self, wanted: DocumentQuery, tenant: Tenant, linking: Linking, texts: Sequence[str], max_new_tokens: int
    ) -> tuple[RetrievedDocument, ...]:
        sinks = self._policy_of(linking).needs.sinks
        return await asyncio.to_thread(self._texts.find, wanted, tenant.salt, sinks, texts, max_new_tokens)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        require_offered(spec.policy, self._settings.policy, self._settings.allowed)

        def work(task: EngineTask, send: Send) -> None:
            engine = ServedEngine(self.engine_of(tenant), task, self._settings.max_tokens)
            answer = engine.answer(
                with_chunks(engine.model, with_objects(spec, self._store, engine.model.salt), task), compare=compares,
                on_text=lambda text: send({"text": text}), on_compile=lambda done: send(compiled_event(done)),
            )  # fmt: skip
            report = answer.report() | {"model": self.model}
            report.pop("pool", None)  # its moves are of other tenants' objects, too
            send({"report": report, "origin": answer.origin()})
            self._indexing.wake()

        async with aclosing(self._in_turn(tenant.name, work)) as events:
            async for event in events:
                yield event

    async def _cut(self, text: str, tenant: Tenant, chunk_tokens: int | None) -> list[Chunk]:
        """The chunks of a text, in another thread than the engine's; one text at a time, also if a client goes away."""
        async with self._cutting_places.place(tenant.name):
            cutting = asyncio.ensure_future(asyncio.to_thread(make_chunks, self._cutting, text, "text", chunk_tokens))
            try:
                return await asyncio.shield(cutting)
            finally:
                await asyncio.wait({cutting})
                cutting.exception()  # read, or asyncio logs it where the client went away

    # Turns

    async def _in_turn(self, tenant: str, work: Callable[[EngineTask, Send], None]) -> AsyncGenerator[Any, None]:
        """What work on the engine's thread sends. A caller that goes no further ends it."""
        channel = Channel()
        task = EngineTask(tenant, lambda task: work(task, channel.send), lambda error: channel.send(End(error)))
        try:
            self._thread.submit(task)
            while not isinstance(event := await channel.queue.get(), End):
                yield event
            if event.error is not None:
                raise event.error
        except QueueFullError as error:
            raise queue_full() from error
        except ClosedError as error:
            raise server_ends() from error
        finally:
            self._thread.cancel(task)

    def engine_of(self, tenant: Tenant) -> TorchEngine:
        """The engine over a tenant's objects: one model and one store for all."""
        if tenant.salt not in self._engines:
            model = self._base.with_salt(tenant.salt)
            model.name = self.model  # as clients know it, in what they are told
            self._engines[tenant.salt] = engine_of(model)(model, self._store, residents=self._residents)
        return self._engines[tenant.salt]

    # One answer, on the engine's thread

    def _answer(self, work: AnswerRequest, task: EngineTask, send: Send) -> None:
        model, policy = self.engine_of(work.tenant).model, self._policy_of(work.linking)
        work.sampling.require_tokens(model.config.vocab_size)
        pieces, lacks, marked = pieces_of(model, work.prompt), None, list[CompiledText]()
        if work.answer_format.keeps_special:
            send(TailEvent(pieces[-1].text if isinstance(pieces[-1], PromptText) else ""))
        for index, piece in enumerate(pieces):
            if isinstance(piece, MarkedText) and policy.needs.objects:  # each may take as long as an answer
                try:
                    done = self._compile_marked(piece.text, model, policy)
                    is_new = done.is_new
                    marked.append(CompiledText(done.key, len(done.chunk), is_new))
                except StoreError as error:
                    _log.warning("pic: a marked text is computed exactly: %s", error)
                    is_new, lacks = True, _NOT_KEPT
                    pieces[index] = UnstoredText(make_chunk(model, piece.text, _MARKED).tokens)
                task.checkpoint(ends_turn=is_new)
        plan, prompt_layout = self._plan(work, pieces, model, policy)
        self._answer_plan(work, plan, replace(prompt_layout, marked=tuple(marked)), lacks, task, send)

    def _answer_plan(
        self, work: AnswerRequest, plan: LinkPlan, prompt_layout: PromptLayout, lacks: str | None, task: EngineTask,
        send: Send,
    ) -> None:  # fmt: skip
        """Link a prompt and answer it. `lacks`: why a marked text is computed exactly, if one is."""
        model, policy = self.engine_of(work.tenant).model, plan.policy
        linked, problem = self._link(model, plan, prompt_layout, prefixes=not work.linking.verifies)
        reuse = _reuse_of(linked, prompt_layout, plan, problem)
        reuse = replace(reuse, problem=reuse.problem or lacks, marked=prompt_layout.marked, notes=prompt_layout.notes)
        send(StartEvent(self._explained(reuse, work.linking, policy, linked, prompt_layout, problem is not None)))
        task.checkpoint()
        limit, image, first = self._num_tokens(work, plan), linked.image, list[Step]()
        is_plain = isinstance(work.prompt, ChatPrompt) and not model.tokenizer.chat_template  # "Answer:", then a blank
        for index in range(work.n):
            image.rewind()
            steps, has_begun, num_new = list[Step](), not is_plain, 0
            sampling = replace(work.sampling, seed=(work.sampling.seed + index) % (1 << 64))
            for step in generate_steps(model, image, limit, sampling, work.num_top or 0, work.answer_format):
                steps.append(step)
                is_shown = work.num_top is not None and step.token >= 0 and step.token not in model.eos_ids
                infos = (self._info(step),) if is_shown else ()
                text = step.text if has_begun else step.text.lstrip()
                has_begun = has_begun or bool(text)
                num_new += step.token >= 0
                if text or infos:
                    send(DeltaEvent(index, text, infos, num_new))
                    num_new = 0
                task.checkpoint()
            send(self._finish(index, steps, model))
            first = first or steps
        if work.linking.verifies:
            send(self._verified(model, work, plan, linked, generated_of(first), task))
        else:
            keep_prefix(model, linked, self._residents)

    def _explained(
        self, reuse: Reuse, linking: Linking, policy: Policy, linked: Linked, prompt_layout: PromptLayout, fails: bool
    ) -> Reuse:
        """With what became of each part of the prompt."""
        new, last = {part.key for part in reuse.marked if part.is_new}, len(prompt_layout.tokens) - 1
        computed = [] if linked.prefix is None else linked.prefix.spans
        reused = [*prompt_layout.unstored, *(PromptPart(start, end, "prefix") for start, end in computed)]
        for match, source in zip(prompt_layout.matches, prompt_layout.sources, strict=True):
            end = min(match.end, last)
            if match.start in linked.computed:
                continue
            rows = math.ceil(linked.rows[:, match.start : end].sum(1).mean())
            reused.append(PromptPart(match.start, end, source, match.key, rows, match.key in new))
        parts = explain(last + 1, reused, linking, policy, self._settings.min_tokens, fails)
        if linking.explains:
            parts = tuple(replace(part, text=self._beginning(prompt_layout.tokens, part)) for part in parts)
        return replace(reuse, parts=parts, explains=linking.explains)

    def _beginning(self, tokens: TokenIds, part: PromptPart) -> str:
        return self._decode(tokens[part.start : min(part.end, part.start + _SHOWN)].tolist())

    def _finish(self, index: int, steps: Sequence[Step], model: Model) -> FinishEvent:
        *_, token, last = steps
        end = self._decode([token.token]) if token.token in model.eos_ids else ""
        return FinishEvent(index, "stop" if last.is_complete else "length", len(steps) - 1, last.stop, end)

    def _num_tokens(self, work: AnswerRequest, plan: LinkPlan) -> int:
        """The most tokens of an answer."""
        room = self.context_length - plan.layout.num_tokens + 1
        limits = [room, work.max_tokens, self._settings.max_tokens]
        return max(1, min(limit for limit in limits if limit is not None))

    def _info(self, step: Step) -> TokenInfo:
        top = tuple((self._decode([token]), logprob) for token, logprob in step.top)
        return TokenInfo(self._decode([step.token]), step.logprob, top)

    def _verified(
        self, model: Model, work: AnswerRequest, plan: LinkPlan, linked: Linked, generated: Generated, task: EngineTask
    ) -> VerificationEvent:
        """Full recompute of the same prompt, and the same answer_format."""
        started = time.perf_counter()
        full = link(model, self._store, Spec.planned(plan_without_objects(FULL, plan.layout.tokens)))
        task.checkpoint()
        recomputed = generate(
            model,
            full.image,
            self._num_tokens(work, plan),
            work.sampling,
            lambda _: task.checkpoint(),
            work.answer_format,
        )
        seconds = time.perf_counter() - started
        own, exact = (
            Answer(text, _result(result), seconds, model, model.engine)
            for text, result in ((generated, linked), (recomputed, full))
        )
        compared = compare_answers(own, exact).report()
        return VerificationEvent({name: compared[name] for name in _VERIFIED})

    # Texts that requests repeat

    async def _learn(self, work: AnswerRequest) -> None:
        """Have the parts of a request compiled that an earlier one had, if nobody waits and the budget is not spent."""
        if not self._settings.learned_bytes:
            return
        parts = await asyncio.to_thread(self._learner.find, work.tenant.id, texts_of(work.prompt))
        if not parts or self._thread.num_waiting:
            return
        task = EngineTask(work.tenant.name, partial(self._compile_parts, work.tenant, parts), self._end_learning)
        with suppress(QueueFullError, ClosedError):
            self._thread.submit(task)

    def _compile_parts(self, tenant: Tenant, parts: Sequence[str], task: EngineTask) -> None:
        """Compile texts, a turn each."""
        model, policy = self.engine_of(tenant).model, self.policy
        options = Spec(policy=policy, codec=self._settings.codec).objects_for(model)
        for chunk in self._learner.chunks(model, policy, parts):
            (done,) = compile_chunks(model, self._store, [chunk], options, check=False)
            self._learner.count(done)
            task.checkpoint(ends_turn=True)
        self._indexing.wake()

    def _end_learning(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, QueueFullError | ClosedError):
            self._learner.fail(error)

    # Plans

    def _policy_of(self, linking: Linking) -> Policy:
        named, settings = linking.policy, self._settings
        return self.policy if named is None else offered_policy(named, settings.policy, settings.allowed)

    def _plan(
        self, work: AnswerRequest, pieces: Sequence[WrittenPiece], model: Model, policy: Policy
    ) -> tuple[LinkPlan, PromptLayout]:  # fmt: skip
        def recognise(tokens: TokenIds) -> list[Match]:
            found = self.index.find(tokens, policy.needs.sinks, model.salt)
            return [match for match in found if self._has_table(match)] if policy.needs.all_tables else found

        recognises = work.linking.recognises and policy.needs.objects
        prompt_layout = lay_out(
            model, pieces, lambda piece: self._object(piece, model, policy), recognise if recognises else None
        )  # fmt: skip
        require_room(model, len(prompt_layout.tokens))
        last = len(prompt_layout.tokens) - 1
        kept = [i for i, match in enumerate(prompt_layout.matches) if match.start < last]
        matches = tuple(prompt_layout.matches[i] for i in kept)
        sources = tuple(self._learner.source_of(matches[i].key, prompt_layout.sources[i]) for i in kept)
        prompt_layout = replace(prompt_layout, matches=matches, sources=sources)
        if not matches or not policy.needs.objects:
            return plan_without_objects(policy, prompt_layout.tokens, model.salt), replace(
                prompt_layout, matches=(), sources=()
            )
        head_key = self._head_key(model, prompt_layout.tokens[: matches[0].start])
        return make_plan(policy, prompt_layout.tokens, matches, head_key, model.salt), prompt_layout

    def _has_table(self, match: Match) -> bool:
        """Whether an object has a table of fixups; one that is lost or damaged has none."""
        with suppress(ObjectError, StoreError), self._store.peek(match.key) as file:
            return file.meta.fixups is not None
        return False

    def _object(self, piece: ObjectReference | MarkedText, model: Model, policy: Policy) -> tuple[str, TokenIds]:
        """The object of a piece; that of a marked text is compiled if need be. Under `full` its tokens are enough."""
        if isinstance(piece, MarkedText):
            return self._marked(piece.text, model, policy)
        return leased_object(self._store, piece.key, model, _log)

    def _marked(self, text: str, model: Model, policy: Policy) -> tuple[str, TokenIds]:
        if not policy.needs.objects:
            return "", np.asarray(make_chunk(model, text, _MARKED).tokens, dtype=np.int32)
        done = self._compile_marked(text, model, policy)
        return done.key, np.asarray(done.chunk.tokens, dtype=np.int32)

    def _compile_marked(self, text: str, model: Model, policy: Policy) -> Compiled:
        options = Spec(policy=policy, codec=self._settings.codec).objects_for(model)
        (done,) = compile_chunks(model, self._store, [make_chunk(model, text, _MARKED)], options, check=False)
        return done

    def _head_key(self, model: Model, head: TokenIds) -> str | None:
        """The object of a head, if it was compiled: it is where it was compiled, so it is exact."""
        key = model.key(head, 0, CODEC, 0)
        return key if len(head) and self._store.path(key).exists() and self._store.has(key) else None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def _link(
        self, model: Model, plan: LinkPlan, prompt_layout: PromptLayout, prefixes: bool
    ) -> tuple[Linked, str | None]:
        """Link a prompt. If an object turns out damaged, it is computed exactly, and the reason returned."""
        linked = partial(link, model, self._store, residents=self._residents, prefixes=prefixes)
        try:
            return linked(Spec.planned(plan)), None
        except (ObjectError, StoreError, NotFiniteError) as error:
            if not plan.object_spans:
                raise
            for span in plan.object_spans:
                assert span.key is not None
                self.index.mark_suspect(span.key)
            self._indexing.wake()
            _log.warning("pic: a request is computed exactly: %s", error)
        exact = plan_without_objects(FULL, prompt_layout.tokens, model.salt)
        return linked(Spec.planned(exact)), "an object of it cannot be used"


_SHOWN = 12  # tokens of a part that a response shows
_MARKED = "a marked part"  # in messages
_NOT_KEPT = "a marked text cannot be kept"  # the problem of its prompt
_VERIFIED = ("answer", "kl", "answer_kl", "same_answer", "same_first_token", "common_prefix")


def _result(linked: Linked) -> LinkResult:
    return LinkResult(
        linked.policy, linked.image.layout, linked.recomputed, linked.timing, linked.bytes_read, linked.image.logits,
        linked,
    )  # fmt: skip


def _reuse_of(linked: Linked, prompt_layout: PromptLayout, plan: LinkPlan, problem: str | None) -> Reuse:
    """What was done with a prompt, in whole tokens."""
    layout = linked.image.layout
    cached = math.floor(layout.num_context - linked.recomputed)
    prefix = 0 if linked.pool is None else linked.pool.prefix
    documents = [span for span in plan.spans[1:] if span.key is not None and span.start not in linked.computed]
    if problem is not None or not documents:
        return Reuse(label_of(linked.policy), exact=layout.num_tokens, cached=cached, prefix=prefix, problem=problem)
    rows = [linked.rows[:, span.start : span.end].sum(1).mean() for span in documents]
    total, recomputed = sum(span.end - span.start for span in documents), math.ceil(sum(rows))
    found = zip(prompt_layout.matches, prompt_layout.sources, strict=True)
    sources = "+".join(sorted({source for match, source in found if match.start not in linked.computed}))
    return Reuse(
        label_of(linked.policy), len(documents), layout.num_tokens - total, total - recomputed, recomputed, cached,
        sources, prefix=prefix,
    )  # fmt: skip
