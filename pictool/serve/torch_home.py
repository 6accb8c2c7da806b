"""The home on the torch engine: one process, one thread that computes, requests a step each in turn."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pictool.compiler.chunking import make_chunk, make_chunks, require_within
from pictool.compiler.compile import CODEC, Compiled, compile_chunks
from pictool.core import Text as TextDocument
from pictool.core import TokenIds
from pictool.engines.base import Answer, LinkResult, compare_answers
from pictool.engines.torch import TorchEngine
from pictool.errors import NotFiniteError, ObjectError, StoreError
from pictool.linker.ahead import compile_in_steps
from pictool.linker.grid import label_of
from pictool.linker.link import Linked, link, require_room
from pictool.linker.plan import LinkPlan, make_plan, plan_without_objects
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.policies.base import Policy, Stage
from pictool.linker.residency import ResidentObjects
from pictool.linker.resolve import OnCompile
from pictool.linker.spec import Document, Spec
from pictool.runtime.decode import Generated, Step, generate_steps, generated_of
from pictool.serve.admission import Places
from pictool.serve.channel import Channel, End, compiled_event
from pictool.serve.errors import ApiError, queue_full
from pictool.serve.layout import LaidOut, lay_out, pieces_of
from pictool.serve.learning import Learner, texts_of
from pictool.serve.leased import leased_object, with_objects
from pictool.serve.offered import offered_policy, require_offered
from pictool.serve.query import ServedQuery
from pictool.serve.tenants import Tenant
from pictool.serve.turns import ClosedError, QueueFullError, Task, Turns
from pictool.serve.work import (
    Chat,
    CompiledText,
    Delta,
    Event,
    Finished,
    Home,
    Linking,
    Marked,
    Piece,
    Reuse,
    Started,
    Status,
    Stored,
    TokenInfo,
    Verified,
    Work,
)
from pictool.store.matches import Match
from pictool.store.recognition import ContentIndex, IndexThread

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store

_log = logging.getLogger("pictool.serve")


@dataclass(frozen=True)
class HomeSettings:
    """How a home works.

    Fields:
        policy: of requests that name none. allowed: names of the policies that they may name beside it; None: all.
        max_waiting: requests that wait at most. max_active: that take turns.
        max_tokens: of one answer at most; None: what the model has positions for.
        min_tokens: least tokens of a document that is recognised, or compiled for a marker.
        refresh_s: seconds between readings of the store for new objects.
        codec: how KV is kept.
        name: what the API calls the model; None: its own name.
        learned_bytes: of objects that are compiled from texts which requests repeat, until the server ends; 0: none.
        pool_bytes: of KV of objects that stays on the device from request to request; 0: none.
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
    pool_bytes: int = 0


T = TypeVar("T")
GiveWay = Callable[[], None]


class Gone(Exception):
    """The client of a request went away."""


class TorchHome(Home):
    """Answers on `transformers` models in this process. A context manager, of which `close` is the end.

    Raises:
        InputError: a pool of too few bytes. ModelError: of a model whose keys cannot be moved.
    """

    def __init__(self, model: Model, store: Store, settings: HomeSettings) -> None:
        self._base, self._store, self._settings = model, store, settings
        self._engines: dict[str, TorchEngine] = {}  # by salt
        self._residents = ResidentObjects(model, settings.pool_bytes) if settings.pool_bytes else None
        self.model, self.created = settings.name or model.name, int(time.time())
        self.context_length = model.max_positions
        self.policy = settings.policy
        self.divergence: dict[str, float] = {}
        self.problem: str | None = None
        settings.policy.prepare(model)
        self._tokenizer = model.tokenizer
        self._cutting = copy(model)  # for texts that are cut in other threads: a tokenizer is used by one at a time
        self._cutting.tokenizer = deepcopy(model.tokenizer)
        self.index = ContentIndex(store, model.target, settings.min_tokens, self._decode, model.bos_id)
        self._indexing = IndexThread(self.index, settings.refresh_s, lambda problem: _log.warning("pic: %s", problem))
        self._indexing.start()
        self._indexing.wait()
        self._turns = Turns(settings.max_waiting, settings.max_active)
        self._reading = Places(settings.max_waiting, most=1)
        self._learner = Learner(settings.learned_bytes, self.index, settings.min_tokens)

    def __enter__(self) -> TorchHome:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._turns.close()
        self._indexing.close()

    def status(self) -> Status:
        return Status(
            self._turns.num_waiting, self._turns.num_active, label_of(self.policy), self.divergence, self.problem,
            self._learner.num_bytes, self._learner.num_failed,
            None if self._residents is None else self._residents.counts,
        )  # fmt: skip

    # The home's contract

    async def answer(self, work: Work) -> AsyncGenerator[Event, None]:
        events = self._in_turn(work.tenant.name, lambda task, send: self._answer(work, task, send))
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
        self._learn(work)

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        chunks = await self._apart(tenant, lambda _: make_chunks(self._cutting, text, "text", chunk_tokens))

        def steps(task: Task, send: Callable[[object], None]) -> Iterator[bool]:
            model = self.engine_of(tenant).model
            options = Spec(policy=self.policy, codec=self._settings.codec).objects
            for chunk in chunks:
                (done,) = compile_chunks(model, self._store, [chunk], options)
                send(CompiledText(done.key, len(chunk)))
                yield done.is_new
            self._indexing.wake()

        return [done async for done in self._in_turn(tenant.name, steps)]

    def has(self, key: str) -> bool:
        return self._store.path(key).exists()

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        """Run a query: each of its calls is a turn of its own, so that others come in between."""
        engine, most = self.engine_of(tenant), self._settings.max_tokens or 1 << 31
        read = partial(ServedQuery, query, engine, self.policy, self._settings.codec)
        asked = await self._apart(tenant, read)

        def steps(task: Task, send: Callable[[object], None]) -> Iterator[bool | None]:
            def answer(spec: Spec) -> Generator[bool | None, None, Answer]:
                if len(spec.documents) > 1:
                    yield from _compile_ahead(engine, spec)
                capped = replace(spec, max_new_tokens=min(spec.max_new_tokens, most))
                return (yield from engine.answer_steps(capped, stage=_until_gone(task)))

            send((yield from asked.steps(answer)))
            self._indexing.wake()

        (texts,) = [texts async for texts in self._in_turn(tenant.name, steps)]
        return list(texts)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        require_offered(spec.policy, self._settings.policy, self._settings.allowed)
        engine = self.engine_of(tenant)

        def steps(task: Task, send: Callable[[object], None]) -> Iterator[bool | None]:
            def on_compile(done: Compiled) -> None:
                send(compiled_event(done))

            model, stage = engine.model, _until_gone(task)
            asked = yield from _with_chunks(model, with_objects(spec, self._store, model.salt))
            yield from _compile_ahead(engine, asked, on_compile)
            asked = replace(asked, max_new_tokens=min(spec.max_new_tokens, self._settings.max_tokens or 1 << 31))
            answer = yield from engine.answer_steps(
                asked, on_text=lambda text: send({"text": text}), on_compile=on_compile, stage=stage
            )
            if compares:
                full = yield from engine.answer_steps(replace(asked, policy=_FULL), stage=stage)
                answer = replace(answer, compare=compare_answers(answer, full))
            report = answer.report() | {"model": self.model}
            report.pop("pool", None)  # its moves are of other tenants' objects, too
            send({"report": report, "origin": answer.origin()})
            self._indexing.wake()

        events = self._in_turn(tenant.name, steps)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    # Turns

    async def _apart(self, tenant: Tenant, work: Callable[[GiveWay], T]) -> T:
        """Do a request's work in another thread than the engine's, one request at a time.

        What it is given to call lets the requests that run have their steps. It keeps its place until its thread has
        ended, also where the client went away: that ends it with the next such call.
        """
        is_over = False

        def give_way() -> None:
            if is_over:
                raise Gone
            self._turns.give_way()

        async with self._reading.place(tenant.name):
            doing = asyncio.ensure_future(asyncio.to_thread(work, give_way))
            try:
                return await asyncio.shield(doing)
            finally:
                is_over = True
                await asyncio.wait({doing})
                doing.exception()  # nobody else hears of it if the client went away

    async def _in_turn(
        self, tenant: str, steps: Callable[[Task, Callable[[object], None]], Iterator[bool | None]]
    ) -> AsyncGenerator[Any, None]:
        """What steps on the engine's thread send. A caller that goes no further ends them."""
        channel = Channel()
        task = Task(tenant, lambda task: steps(task, channel.send), lambda error: channel.send(End(error)))
        try:
            self._turns.submit(task)
            while not isinstance(event := await channel.queue.get(), End):
                yield event
            if event.error is not None:
                raise event.error
        except QueueFullError as error:
            raise queue_full() from error
        except ClosedError as error:
            raise ApiError(503, "the server ends; try again", code="server_ends") from error
        finally:
            self._turns.cancel(task)

    def engine_of(self, tenant: Tenant) -> TorchEngine:
        """The engine over a tenant's objects: one model and one store for all."""
        if tenant.salt not in self._engines:
            model = self._base.with_salt(tenant.salt)
            self._engines[tenant.salt] = TorchEngine(model, self._store, residents=self._residents)
        return self._engines[tenant.salt]

    # Steps of one answer, on the engine's thread

    def _answer(self, work: Work, task: Task, send: Callable[[object], None]) -> Iterator[bool | None]:
        model, policy = self.engine_of(work.tenant).model, self._policy_of(work.linking)
        pieces = pieces_of(model, work.prompt)
        for piece in pieces:
            if isinstance(piece, Marked) and policy.needs.objects:  # each may take as long as an answer
                yield self._compile_marked(piece.text, model, policy).is_new
        plan, laid = self._plan(work, pieces, model, policy)
        linked, problem = self._link(model, plan, laid, task)
        send(Started(_reuse_of(linked, laid, plan, problem)))
        yield False
        limit = self._num_tokens(work, plan)
        image, first = linked.image, list[Step]()
        is_plain = isinstance(work.prompt, Chat) and not model.tokenizer.chat_template  # "Answer:", then a blank
        for index in range(work.n):
            image.rewind()
            seed = (work.sampling.seed + index) % (1 << 64)
            steps, has_begun = list[Step](), not is_plain
            for step in generate_steps(model, image, limit, replace(work.sampling, seed=seed), work.num_top or 0):
                steps.append(step)
                is_shown = work.num_top is not None and step.token >= 0 and step.token not in model.eos_ids
                infos = (self._info(step),) if is_shown else ()
                text = step.text if has_begun else step.text.lstrip()
                has_begun = has_begun or bool(text)
                if text or infos:
                    send(Delta(index, text, infos))
                yield False
            send(Finished(index, "stop" if steps[-1].is_complete else "length", len(steps) - 1))
            first = first or steps
        if work.linking.verifies:
            yield from self._verify(model, work, plan, linked, generated_of(first), send)

    def _num_tokens(self, work: Work, plan: LinkPlan) -> int:
        """The most tokens of an answer."""
        room = self.context_length - plan.layout.num_tokens + 1
        limits = [room, work.max_tokens, self._settings.max_tokens]
        return max(1, min(limit for limit in limits if limit is not None))

    def _info(self, step: Step) -> TokenInfo:
        top = tuple((self._decode([token]), logprob) for token, logprob in step.top)
        return TokenInfo(self._decode([step.token]), step.logprob, top)

    def _verify(
        self, model: Model, work: Work, plan: LinkPlan, linked: Linked, generated: Generated,
        send: Callable[[object], None],
    ) -> Iterator[None]:  # fmt: skip
        """Full recompute of the same prompt, and the same decoding."""
        started = time.perf_counter()
        full = link(model, self._store, Spec.planned(plan_without_objects(_FULL, plan.layout.tokens)))
        yield
        steps = []
        for step in generate_steps(model, full.image, self._num_tokens(work, plan), work.sampling):
            steps.append(step)
            yield
        seconds = time.perf_counter() - started
        own, exact = (
            Answer(text, _result(result), seconds, model, TorchEngine.name)
            for text, result in ((generated, linked), (generated_of(steps), full))
        )
        compared = compare_answers(own, exact).report()
        send(Verified({name: compared[name] for name in _VERIFIED}))

    # Texts that requests repeat

    def _learn(self, work: Work) -> None:
        """Have the parts of a request compiled that an earlier one had, if nobody waits and the budget is not spent."""
        parts = self._learner.find(work.tenant.id, texts_of(work.prompt))
        if not parts or self._turns.num_waiting:
            return
        task = Task(work.tenant.name, lambda task: self._compile_parts(work.tenant, parts), self._end_learning)
        with suppress(QueueFullError, ClosedError):
            self._turns.submit(task)

    def _compile_parts(self, tenant: Tenant, parts: Sequence[str]) -> Iterator[bool]:
        """Compile texts, a turn each."""
        model, policy = self.engine_of(tenant).model, self.policy
        options = Spec(policy=policy, codec=self._settings.codec).objects
        for chunk in self._learner.chunks(model, policy, parts):
            (done,) = compile_chunks(model, self._store, [chunk], options, check=False)
            self._learner.count(done)
            yield True
        self._indexing.wake()

    def _end_learning(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, QueueFullError | ClosedError):
            self._learner.fail(error)

    # Plans

    def _policy_of(self, linking: Linking) -> Policy:
        named, settings = linking.policy, self._settings
        return self.policy if named is None else offered_policy(named, settings.policy, settings.allowed)

    def _plan(
        self, work: Work, pieces: Sequence[Piece], model: Model, policy: Policy
    ) -> tuple[LinkPlan, LaidOut]:  # fmt: skip
        def recognise(tokens: TokenIds) -> list[Match]:
            return self.index.find(tokens, policy.needs.sinks, model.salt)

        recognises = work.linking.recognises and policy.needs.objects
        laid = lay_out(
            model, pieces, lambda piece: self._object(piece, model, policy), recognise if recognises else None
        )  # fmt: skip
        require_room(model, len(laid.tokens))
        last = len(laid.tokens) - 1
        kept = [i for i, match in enumerate(laid.matches) if match.start < last]
        matches = tuple(laid.matches[i] for i in kept)
        laid = LaidOut(laid.tokens, matches, tuple(laid.sources[i] for i in kept))
        if not matches or not policy.needs.objects:
            return plan_without_objects(policy, laid.tokens, model.salt), replace(laid, matches=(), sources=())
        head_key = self._head_key(model, laid.tokens[: matches[0].start])
        return make_plan(policy, laid.tokens, matches, head_key, model.salt), laid

    def _object(self, piece: Stored | Marked, model: Model, policy: Policy) -> tuple[str, TokenIds]:
        """The object of a piece; that of a marked text is compiled if need be. Under `full` its tokens are enough."""
        if isinstance(piece, Marked):
            return self._marked(piece.text, model, policy)
        return leased_object(self._store, piece.key, model, _log)

    def _marked(self, text: str, model: Model, policy: Policy) -> tuple[str, TokenIds]:
        if not policy.needs.objects:
            return "", np.asarray(make_chunk(model, text, _MARKED).tokens, dtype=np.int32)
        done = self._compile_marked(text, model, policy)
        return done.key, np.asarray(done.chunk.tokens, dtype=np.int32)

    def _compile_marked(self, text: str, model: Model, policy: Policy) -> Compiled:
        options = Spec(policy=policy, codec=self._settings.codec).objects
        (done,) = compile_chunks(model, self._store, [make_chunk(model, text, _MARKED)], options, check=False)
        return done

    def _head_key(self, model: Model, head: TokenIds) -> str | None:
        """The object of a head, if it was compiled: it is where it was compiled, so it is exact."""
        key = model.key(head, 0, CODEC)
        return key if len(head) and self._store.path(key).exists() and self._store.has(key) else None

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def _link(self, model: Model, plan: LinkPlan, laid: LaidOut, task: Task) -> tuple[Linked, str | None]:
        """Link a prompt. If an object turns out damaged, it is computed exactly, and the reason returned."""
        stage = _until_gone(task)
        try:
            return link(model, self._store, Spec.planned(plan), stage=stage, residents=self._residents), None
        except (ObjectError, StoreError, NotFiniteError) as error:
            if not plan.object_spans:
                raise
            for span in plan.object_spans:
                assert span.key is not None
                self.index.doubt(span.key)
            self._indexing.wake()
            _log.warning("pic: a request is computed exactly: %s", error)
        exact = plan_without_objects(_FULL, laid.tokens, model.salt)
        return link(model, self._store, Spec.planned(exact), stage=stage), "an object of it cannot be used"


def _until_gone(task: Task) -> Stage:
    """Ends a link whose client went away, at its next stage."""

    def stage(_: str) -> AbstractContextManager[None]:
        if task.is_cancelled:
            raise Gone
        return nullcontext()

    return stage


def _compile_ahead(engine: TorchEngine, spec: Spec, on_compile: OnCompile | None = None) -> Iterator[bool]:
    """Compile what the link of a spec would compile, a turn each forward."""
    return (True for _ in compile_in_steps(engine.model, engine.store, spec, on_compile))


def _with_chunks(model: Model, spec: Spec) -> Generator[None, None, Spec]:
    """A spec whose texts are chunks; each is cut and tokenized in a step."""
    documents: list[Document] = []
    for document in spec.documents:
        if isinstance(document, TextDocument):
            require_within(model, document.text, document.source)
            documents += make_chunks(model, document.text, document.source, spec.chunk_tokens)
            yield
        else:
            documents.append(document)
    return replace(spec, documents=documents)


_FULL = make_policy(BASELINE)
_MARKED = "a marked part"  # in messages
_VERIFIED = ("answer", "kl", "same_answer", "same_first_token", "common_prefix")


def _result(linked: Linked) -> LinkResult:
    return LinkResult(
        linked.policy, linked.image.layout, linked.recomputed, linked.timing, linked.bytes_read, linked.image.logits
    )  # fmt: skip


def _reuse_of(linked: Linked, laid: LaidOut, plan: LinkPlan, problem: str | None) -> Reuse:
    """What was done with a prompt, in whole tokens."""
    layout = linked.image.layout
    cached = math.floor(layout.num_context - linked.recomputed)
    if problem is not None or not laid.matches:
        return Reuse(label_of(linked.policy), exact=layout.num_tokens, cached=cached, problem=problem)
    documents = [span for span in plan.spans[1:] if span.key is not None]
    rows = [linked.rows[:, span.start : span.end].sum(1).mean() for span in documents]
    total, recomputed = sum(span.end - span.start for span in documents), math.ceil(sum(rows))
    sources = "+".join(sorted(set(laid.sources)))
    return Reuse(
        label_of(linked.policy), len(documents), layout.num_tokens - total, total - recomputed, recomputed, cached,
        sources,
    )  # fmt: skip
