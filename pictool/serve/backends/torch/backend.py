"""The backend on the torch engine: one process, one thread that computes, requests a step each in turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pictool.compiler.chunking import make_chunk
from pictool.compiler.compile import CODEC, compile_chunks, object_key
from pictool.core import PromptText, TokenIds
from pictool.engines import engine_of
from pictool.engines.base import Answer, Engine, compare_answers
from pictool.engines.torch import TorchEngine, link_result
from pictool.errors import InputError, NotFiniteError, ObjectError, StoreError
from pictool.linker.grid import label_of
from pictool.linker.link import Linked, link
from pictool.linker.plan import LinkPlan, make_plan, plan_without_objects
from pictool.linker.policies.base import Policy
from pictool.linker.pooled import keep_prefix
from pictool.linker.prefixes import Prefixes
from pictool.linker.resolve import require_room
from pictool.linker.spec import Spec
from pictool.runtime import turns
from pictool.runtime.chat.grammar import compiled
from pictool.runtime.decode import Generated, Step, generate, generate_steps, generated_of
from pictool.serve.backends.base import FULL, BackendSettings, EngineBackend, log
from pictool.serve.backends.torch.engine_thread import ClosedError, EngineTask, EngineThread, QueueFullError
from pictool.serve.channel import Channel, End, Send
from pictool.serve.errors import queue_full, server_ends
from pictool.serve.prompts.layout import PromptLayout, lay_out, pieces_of
from pictool.serve.prompts.leased import leased_object
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    BackendStatus,
    ChatPrompt,
    CompiledText,
    DeltaEvent,
    Event,
    FinishEvent,
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
    from pictool.store.store import Store


def _open_residents(model: Model, store: Store, settings: BackendSettings) -> Prefixes | None:
    """The KV that stays, if the settings leave room for some. Raises as `TorchBackend`."""
    engine_type = engine_of(model)
    kept = store.within("prefixes", max_bytes=settings.kept_bytes) if settings.kept_bytes else None
    residents = engine_type.open_pool(model, store, settings.pool_bytes, True, kept)
    if kept is not None and residents is None:
        raise InputError(f"--keep-prefixes: needs KV of {model.name} that stays; see --pool")
    return residents


class TorchBackend(EngineBackend):
    """Answers by the engine of this process: transformers models, and GGUF files. A context manager.

    Raises:
        InputError: a pool of too few bytes. ModelError: of a model whose keys cannot be moved.
    """

    batches = False

    def __init__(self, model: Model, store: Store, settings: BackendSettings) -> None:
        super().__init__(model, store, settings)
        model.on_note = lambda text: log.warning("pic: %s", text)
        self._engines: dict[str, TorchEngine] = {}  # by salt
        self._residents = _open_residents(model, store, settings)
        settings.policy.prepare(model)
        self.begin(model.name, model.max_positions)
        self._thread = EngineThread(settings.max_waiting, settings.max_active)

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
        counts = None if self._residents is None else self._residents.counts
        return self._status(self._thread.num_waiting, self._thread.num_active, counts)

    # The backend's contract

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        if work.answer_format.schema is not None:
            work = replace(work, answer_format=await asyncio.to_thread(compiled, self._base, work.answer_format))
        async with aclosing(self._driven(work.tenant, partial(self._answer, work))) as events:
            async for event in events:
                yield event
        self._learn(work)

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        def work(engine: Engine, send: Send) -> None:
            model = engine.model
            pieces = pieces_of(model, prompt)
            send(len(lay_out(model, pieces, lambda piece: self._object(piece, model, FULL), None).tokens))

        (count,) = [count async for count in self._driven(tenant, work)]
        return int(count)

    # Turns

    async def _driven(self, tenant: Tenant, work: Callable[[Engine, Send], None]) -> AsyncGenerator[Any, None]:
        """What work on the engine's thread sends. A caller that goes no further ends it."""
        channel, engine = Channel(), self.engine_of(tenant)
        task = EngineTask(tenant.name, lambda _: work(engine, channel.send), lambda error: channel.send(End(error)))
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
            engine = engine_of(model)(model, self._store, residents=self._residents)
            engine.max_tokens = self._settings.max_tokens
            self._engines[tenant.salt] = engine
        return self._engines[tenant.salt]

    # One answer, on the engine's thread

    def _answer(self, work: AnswerRequest, engine: Engine, send: Send) -> None:
        model, policy = engine.model, self._policy_of(work.linking)
        work.sampling.require_tokens(model.config.vocab_size)
        pieces, lacks, marked = pieces_of(model, work.prompt), None, list[CompiledText]()
        if work.answer_format.keeps_special:
            send(TailEvent(pieces[-1].text if isinstance(pieces[-1], PromptText) else ""))
        for index, piece in enumerate(pieces):
            if isinstance(piece, MarkedText) and policy.needs.objects:  # each may take as long as an answer
                chunk = make_chunk(model, piece.text, _MARKED)
                try:
                    (done,) = compile_chunks(model, self._store, [chunk], self._options(policy), check=False)
                    marked.append(CompiledText(done.key, len(chunk), done.is_new))
                except StoreError as error:
                    log.warning("pic: a marked text is computed exactly: %s", error)
                    lacks, pieces[index] = _NOT_KEPT, UnstoredText(chunk.tokens)
                turns.checkpoint()
        plan, prompt_layout = self._plan(work, pieces, model, policy)
        self._answer_plan(work, model, plan, replace(prompt_layout, marked=tuple(marked)), lacks, send)

    def _answer_plan(
        self, work: AnswerRequest, model: Model, plan: LinkPlan, prompt_layout: PromptLayout, lacks: str | None,
        send: Send,
    ) -> None:  # fmt: skip
        """Link a prompt and answer it. `lacks`: why a marked text is computed exactly, if one is."""
        policy = plan.policy
        linked, problem = self._link(model, plan, prompt_layout, is_fresh=work.linking.verifies)
        reused = _reused_parts(linked, prompt_layout)
        parts = self._explained(work.linking, prompt_layout, policy, reused, problem is not None)
        reuse = _reuse_of(linked, prompt_layout, plan, problem)
        reuse = replace(
            reuse, problem=problem or lacks, parts=parts, marked=prompt_layout.marked, notes=prompt_layout.notes,
            explains=work.linking.explains,
        )  # fmt: skip
        send(StartEvent(reuse))
        limit, image, first = self._num_tokens(work, plan), linked.image, list[Step]()
        is_plain = self._is_plain(work)
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
            send(self._finish(index, steps, model))
            first = first or steps
        if work.linking.verifies:
            send(self._verified(model, work, plan, linked, generated_of(first)))
        else:
            keep_prefix(model, linked.image, self._residents)

    def _finish(self, index: int, steps: Sequence[Step], model: Model) -> FinishEvent:
        *_, token, last = steps
        end = self._text_of([token.token]) if token.token in model.eos_ids else ""
        return FinishEvent(index, "stop" if last.is_complete else "length", len(steps) - 1, last.stop, end)

    def _num_tokens(self, work: AnswerRequest, plan: LinkPlan) -> int:
        """The most tokens of an answer: one needs no position."""
        return max(1, self._most_tokens(work, self.context_length - plan.layout.num_tokens + 1))

    def _info(self, step: Step) -> TokenInfo:
        top = tuple((self._text_of([token]), logprob) for token, logprob in step.top)
        return TokenInfo(self._text_of([step.token]), step.logprob, top)

    def _verified(
        self, model: Model, work: AnswerRequest, plan: LinkPlan, linked: Linked, generated: Generated
    ) -> VerificationEvent:
        """Full recompute of the same prompt, and the same answer_format."""
        started = time.perf_counter()
        full = link(model, self._store, Spec.planned(plan_without_objects(FULL, plan.layout.tokens)))
        recomputed = generate(
            model, full.image, self._num_tokens(work, plan), work.sampling, answer_format=work.answer_format
        )
        seconds = time.perf_counter() - started
        own, exact = (
            Answer(text, link_result(result), seconds, model, model.engine)
            for text, result in ((generated, linked), (recomputed, full))
        )
        compared = compare_answers(own, exact).report()
        return VerificationEvent({name: compared[name] for name in _VERIFIED})

    # Texts that requests may repeat

    def _begin_learning(self, tenant: Tenant, parts: Mapping[str, bool]) -> None:
        engine = self.engine_of(tenant)

        def end(_: BaseException | None) -> None:
            self._is_learning = False

        task = EngineTask(tenant.name, lambda _: self._compile_parts(engine, parts), end, is_idle=True)
        try:
            self._thread.submit(task)
        except (QueueFullError, ClosedError) as error:
            end(error)

    # Plans

    def _plan(
        self, work: AnswerRequest, pieces: Sequence[WrittenPiece], model: Model, policy: Policy
    ) -> tuple[LinkPlan, PromptLayout]:  # fmt: skip
        found = self._lay_out(
            model, work.prompt, pieces, lambda piece: self._object(piece, model, policy), work.linking, policy
        )
        if not found.matches:
            return plan_without_objects(policy, found.tokens, model.salt), found
        head_key = self._head_key(model, found.tokens[: found.matches[0].start])
        return make_plan(policy, found.tokens, found.matches, head_key, model.salt), found

    def _require_room(self, model: Model, num_tokens: int) -> None:
        require_room(model, num_tokens)

    def _object(self, piece: ObjectReference | MarkedText, model: Model, policy: Policy) -> tuple[str, TokenIds]:
        """The object of a piece, that of a marked text too, which has been compiled; under `full` its tokens alone."""
        if not isinstance(piece, MarkedText):
            return leased_object(self._store, piece.key, model, log)
        chunk = make_chunk(model, piece.text, _MARKED)
        key = object_key(model, chunk, self._options(policy)) if policy.needs.objects else ""
        return key, np.asarray(chunk.tokens, dtype=np.int32)

    def _head_key(self, model: Model, head: TokenIds) -> str | None:
        """The object of a head, if it was compiled: it is where it was compiled, so it is exact."""
        key = model.key(head, CODEC, 0)
        return key if len(head) and self._store.path(key).exists() and self._store.has(key) else None

    def _link(
        self, model: Model, plan: LinkPlan, prompt_layout: PromptLayout, is_fresh: bool
    ) -> tuple[Linked, str | None]:
        """Link a prompt. If an object turns out damaged, it is computed exactly, and the reason returned."""

        def linked(plan: LinkPlan) -> Linked:
            spec = replace(Spec.planned(plan), is_fresh=is_fresh)
            return link(model, self._store, spec, residents=self._residents)

        try:
            return linked(plan), None
        except (ObjectError, StoreError, NotFiniteError) as error:
            if not plan.object_spans:
                raise
            for span in plan.object_spans:
                assert span.key is not None
                self.index.mark_suspect(span.key)
            self._indexing.wake()
            log.warning("pic: a request is computed exactly: %s", error)
        exact = plan_without_objects(FULL, prompt_layout.tokens, model.salt)
        return linked(exact), "an object of it cannot be used"


_MARKED = "a marked part"  # in messages
_NOT_KEPT = "a marked text cannot be kept"  # the problem of its prompt
_VERIFIED = ("answer", "kl", "answer_kl", "same_answer", "same_first_token", "common_prefix")


def _reused_parts(linked: Linked, prompt_layout: PromptLayout) -> list[PromptPart]:
    """What earlier requests computed, the objects that were linked, and marked texts without one."""
    new = {part.key for part in prompt_layout.marked if part.is_new}
    computed = [] if linked.prefix is None else linked.prefix.spans
    reused = [*prompt_layout.unstored, *(PromptPart(start, end, "prefix") for start, end in computed)]
    for match, source in zip(prompt_layout.matches, prompt_layout.sources, strict=True):
        if match.start not in linked.computed:
            end = min(match.end, len(prompt_layout.tokens) - 1)
            rows = math.ceil(linked.rows[:, match.start : end].sum(1).mean())
            reused.append(PromptPart(match.start, end, source, match.key, rows, match.key in new))
    return reused


def _reuse_of(linked: Linked, prompt_layout: PromptLayout, plan: LinkPlan, problem: str | None) -> Reuse:
    """What was done with a prompt, in whole tokens."""
    layout = linked.image.layout
    cached = math.floor(layout.num_tokens - linked.rows.sum(1).mean())
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
