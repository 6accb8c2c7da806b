"""The backend that fronts servers elsewhere: prompts are laid out here, and linked by the connector in their vLLM.

It has the model's tokenizer and configuration, and none of its weights. It shares the store with its servers.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pictool.compiler.chunking import MOST_BEFORE, make_chunk
from pictool.compiler.compile import Compiled, object_key
from pictool.core import Chunk, PromptText, TokenIds
from pictool.engines.base import Engine
from pictool.engines.vllm.request import FIELD, MAX_OBJECTS
from pictool.errors import InputError, PicError
from pictool.fidelity.divergence import Divergence, measure_divergence
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE
from pictool.linker.policies.base import Policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model
from pictool.serve.admission import AdmissionControl, held
from pictool.serve.backends.base import FULL, BackendSettings, EngineBackend, log
from pictool.serve.backends.upstream.engine import UpstreamEngine, completion_params
from pictool.serve.backends.upstream.replicas import Delta, Replicas, StreamEnd
from pictool.serve.channel import Send, events_of
from pictool.serve.check import judge
from pictool.serve.errors import ApiError
from pictool.serve.prompts.layout import PromptLayout, pieces_of
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

if TYPE_CHECKING:
    from pictool.store.store import Store

T = TypeVar("T")
_LINKED = ("linked", "cached")  # states of the connector's report
_DRIVEN = 16  # engines that run at once: requests of pic link, span queries, and texts to compile
_NO_REPORT = "its server has no report of it; pass each engine of a server as its own --upstream"


class UpstreamBackend(EngineBackend):
    """Answers by other servers.

    Args:
        model: as the servers have it; its weights are not loaded here.
        store: where the servers write what they compile.
        key: what requests to them carry as their bearer; None: nothing.
        lives: whether the process of a server that is this router's own runs.

    Raises:
        ModelError: a model that the policy does not support.
    """

    batches = True

    def __init__(
        self, model: Model, store: Store, settings: BackendSettings, urls: Sequence[str], key: str | None = None,
        lives: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        super().__init__(model, store, settings)
        self._replicas, self._lives = Replicas(urls, key), lives
        self.admission = AdmissionControl(settings.max_waiting, settings.max_active, settings.num_tenants)
        self._driving = AdmissionControl(settings.max_waiting, _DRIVEN, settings.num_tenants)
        self._threads = ThreadPoolExecutor(_DRIVEN, "pic-driver")
        self._encoding = threading.Lock()
        self._learning: asyncio.Task[None] | None = None
        self._decoder = deepcopy(model.tokenizer)  # of the event loop alone

    async def start(self, limit: float | None, refuses: bool = False) -> None:
        """Reach the servers, and link a few prompts on one: far from full recompute, and all answers are exact.

        Args:
            limit: share of blind reuse's KL that is not far; None: nothing is checked. refuses: a server that is far
                from it ends the start.

        Raises:
            InputError: no server of this model, or one that `refuses`.
        """
        await self._replicas.start()
        length = min(self._replicas.context_length, self._base.max_positions)
        longest = length - 2 - MOST_BEFORE
        await asyncio.to_thread(self.begin, self._replicas.model, length, longest)
        self._base.name = self.model  # as clients know it, in what they are told
        if limit is not None and self.policy.needs.objects:
            judge(self, await self._measure(), limit, refuses, lambda text: log.warning("pic: %s", text))

    async def disconnect(self) -> None:
        """Close the connections of the event loop that runs, which ends."""
        await self._replicas.disconnect()

    def status(self) -> BackendStatus:
        return self._status(self.admission.num_waiting + self._driving.num_waiting, self.admission.num_active)

    async def lives(self) -> bool:
        return self._lives()

    async def is_ready(self) -> bool:
        return await self._replicas.live()

    def close(self) -> None:
        self._indexing.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # The backend's contract

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        policy = self._policy_of(work.linking)
        work.sampling.require_tokens(self._base.config.vocab_size)
        async with self.admission.place(work.tenant.name, work.n):
            prompt_layout = await self._prompt(work.tenant, work.prompt, work.linking, policy)
            async with aclosing(self._events(work, prompt_layout, policy)) as events:
                async for event in events:
                    yield event
        self._learn(work)

    async def _events(
        self, work: AnswerRequest, prompt_layout: PromptLayout, policy: Policy
    ) -> AsyncGenerator[Event, None]:
        if work.answer_format.keeps_special:
            yield TailEvent(prompt_layout.tail)
        same = range(work.n) if work.sampling.temperature == 0 else None  # one answer, which is asked for once
        is_plain = self._is_plain(work)
        texts, tokens = defaultdict[int, str](str), defaultdict[int, list[int]](list)
        num_new, ends = Counter[int](), list[FinishEvent]()
        params = self._params(policy, prompt_layout)
        stream = self._stream(work, prompt_layout, params, 1 if same else work.n)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, StreamEnd):
                    reuse = self._reuse(work.linking, prompt_layout, policy, event)
                    params = params if reuse.chunks else False
                    yield StartEvent(reuse)
                    continue
                index = event.index
                text = event.text if texts[index] or not is_plain else event.text.lstrip()
                texts[index] += text
                tokens[index] += event.tokens
                num_new[index] += len(event.tokens)
                infos = () if work.num_top is None else self._infos(event, work.num_top)
                if text or infos:
                    for each in same or (index,):
                        yield DeltaEvent(each, text, infos, num_new[index])
                    num_new[index] = 0
                if event.finish_reason is not None:
                    ends += [self._finish(each, event, tokens[index]) for each in same or (index,)]
        for end in ends:
            yield end
        if work.linking.verifies:
            yield VerificationEvent(await self._verify(work, prompt_layout, params, texts[0], tokens[0]))

    def _stream(
        self, work: AnswerRequest, prompt_layout: PromptLayout, params: object, n: int
    ) -> AsyncGenerator[Delta | StreamEnd, None]:
        room = self.context_length - len(prompt_layout.tokens)
        completion = completion_params(
            self._base, work.sampling, self._most_tokens(work, room), {FIELD: params},
            work.num_top, work.answer_format, n,
        )  # fmt: skip
        return self._replicas.complete(
            prompt_layout.tokens.tolist(), completion, work.tenant.salt, self._sizes(prompt_layout)
        )

    def _sizes(self, prompt_layout: PromptLayout) -> dict[str, int]:
        """The bytes of a prompt's objects."""
        return {match.key: self._base.token_bytes * len(match.tokens) for match in prompt_layout.matches}

    def _finish(self, index: int, delta: Delta, tokens: Sequence[int]) -> FinishEvent:
        """The end of an answer. Raises ApiError: its server ended it."""
        if delta.finish_reason not in ("stop", "length"):
            raise ApiError(503, "the server broke off the answer; try again", code="upstream_lost")
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        is_ended = delta.finish_reason == "stop" and stop is None and len(tokens) > 0
        end = self._text_of(tokens[-1:]) if is_ended else ""
        return FinishEvent(index, delta.finish_reason, len(tokens), stop, end)

    def _infos(self, delta: Delta, num_top: int) -> tuple[TokenInfo, ...]:
        """The tokens of an answer but end tokens, with their log-probabilities."""
        infos = []
        for token, row in zip(delta.tokens, delta.logprobs, strict=True):
            if token in self._base.eos_ids:
                continue
            likely = sorted(row, key=lambda other: -row[other])[:num_top]
            top = tuple((self._text_of([each]), row[each]) for each in likely)
            infos.append(TokenInfo(self._text_of([token]), row[token], top))
        return tuple(infos)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return str(self._decoder.decode(list(tokens)))

    async def _verify(
        self, work: AnswerRequest, prompt_layout: PromptLayout, params: object, text: str, tokens: Sequence[int]
    ) -> dict[str, Any]:
        """The first answer, linked by `params`, against full recompute with the same sampling; `kl` is `coarse_kl`."""
        full = [event async for event in self._stream(work, prompt_layout, False, 1) if isinstance(event, Delta)]
        kl, is_same = await asyncio.to_thread(
            self._engine_of(work.tenant).first_token, prompt_layout.tokens.tolist(), {FIELD: params} if params else None
        )
        exact = "".join(delta.text for delta in full).strip(), [token for delta in full for token in delta.tokens]
        same = [a == b for a, b in zip(tokens, exact[1], strict=False)]
        return {
            "answer": exact[0], "kl": kl, "answer_kl": None, "same_answer": exact[0] == text.strip(),
            "same_first_token": is_same, "common_prefix": [*same, False].index(False),
        }  # fmt: skip

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        return len((await self._prompt(tenant, prompt, Linking(recognises=False), FULL)).tokens)

    def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        return super().link(replace(spec, is_fresh=True), tenant, compares)

    async def _driven(self, tenant: Tenant, work: Callable[[Engine, Send], None]) -> AsyncGenerator[Any, None]:
        """What work in a thread of its own sends. It holds no place; each of the engine's requests takes one.

        However many of them are ready, one waits for a place at a time.
        """
        waiting = asyncio.Lock()

        @asynccontextmanager
        async def place() -> AsyncGenerator[None, None]:
            async with waiting:
                held_place = await self.admission.take(tenant.name, has_begun=True)
            with held(held_place):
                yield

        async with self._driving.place(tenant.name):
            engine = await self._apart(self._engine_of(tenant, place=place))
            async with aclosing(events_of(self._threads, partial(work, engine), engine.stop)) as events:
                async for event in events:
                    yield event

    # Engines

    def _engine_of(
        self, tenant: Tenant, *, later: bool = False,
        place: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext,
    ) -> UpstreamEngine:  # fmt: skip
        """The engine over a tenant's objects; for the arguments see `UpstreamEngine`."""
        model, loop = copy(self._base), asyncio.get_running_loop()
        model.salt = tenant.salt
        return UpstreamEngine(model, self._store, self._replicas, loop, later=later, place=place)

    async def _apart(self, engine: UpstreamEngine) -> UpstreamEngine:
        """Give an engine a tokenizer of its own: only one thread at a time may encode with a tokenizer."""
        engine.model.tokenizer = await self._in_thread(lambda: deepcopy(engine.model.tokenizer))
        return engine

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run what encodes in a thread: one at a time, since a tokenizer is used by one."""

        def run() -> T:
            with self._encoding:
                return work()

        return await asyncio.to_thread(run)

    # Prompts

    def _policy_of(self, linking: Linking) -> Policy:
        """The policy of a request. Raises ApiError."""
        policy = super()._policy_of(linking).without_attention
        if policy.needs.chain_block:
            raise ApiError(400, f"policy: {policy.name}: vLLM has its own prefix cache", param="pic.policy")
        if policy.needs.attention:
            raise ApiError(400, f"policy: {policy.name}: vLLM does not expose attention", param="pic.policy")
        policy.require_second_model(self._base)
        return policy

    async def _prompt(
        self, tenant: Tenant, prompt: ChatPrompt | RawPrompt, linking: Linking, policy: Policy
    ) -> PromptLayout:
        """Lay out a prompt: its tokens and objects. Raises ApiError, and InputError: it leaves no room to answer."""
        engine = self._engine_of(tenant)
        pieces = await self._in_thread(lambda: pieces_of(engine.model, prompt))
        marked, new = await self._compile_marked(engine, pieces, policy)

        def open_object(piece: ObjectReference | MarkedText) -> tuple[str, TokenIds]:
            if isinstance(piece, MarkedText):
                return marked[piece.text]
            return leased_object(self._store, piece.key, engine.model, log)

        found = await self._in_thread(lambda: self._lay_out(engine.model, prompt, pieces, open_object, linking, policy))
        if len(found.matches) > MAX_OBJECTS:
            raise ApiError(
                400, f"messages: {len(found.matches)} objects, but at most {MAX_OBJECTS} are allowed", param="messages"
            )
        last = pieces[-1]
        return replace(
            found, tail=last.text if isinstance(last, PromptText) else "",
            marked=tuple(CompiledText(key, len(tokens), key in new) for key, tokens in marked.values() if key),
        )  # fmt: skip

    def _require_room(self, model: Model, num_tokens: int) -> None:
        if num_tokens >= self.context_length:
            raise InputError(f"the prompt has {num_tokens} tokens, but the server has {self.context_length} positions")

    async def _compile_marked(
        self, engine: UpstreamEngine, pieces: Sequence[WrittenPiece], policy: Policy
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
        options = self._options(policy)
        keys = [object_key(engine.model, chunk, options) for chunk in made]
        missing = [chunk for chunk, key in zip(made, keys, strict=True) if chunk.tokens and not self._store.has(key)]
        new = {object_key(engine.model, chunk, options) for chunk in missing}
        try:
            await asyncio.to_thread(engine.compile, missing, options)
        except PicError as error:  # a full store or disk
            log.warning("pic: marked texts are computed exactly: %s", error)
            keys = [key if self._store.has(key) else "" for key in keys]
        return dict(zip(texts, zip(keys, tokens, strict=True), strict=True)), new

    def _params(self, policy: Policy, prompt_layout: PromptLayout) -> object:
        """The connector's field `pic` of a prompt. An object starts where its first token would be."""
        if not prompt_layout.matches:
            return False
        chunks = [{"key": match.key, "start": max(0, match.start - match.offset)} for match in prompt_layout.matches]
        return {"policy": {"algo": policy.name, **policy.params}, "chunks": chunks}

    def _reuse(self, linking: Linking, prompt_layout: PromptLayout, policy: Policy, end: StreamEnd) -> Reuse:
        """What was done with a prompt, by the connector's report."""
        report, num_prompt = end.report, len(prompt_layout.tokens)
        cached, more = end.num_cached or 0, dict[str, Any](explains=linking.explains, notes=prompt_layout.notes)
        if report is None or report["state"] not in _LINKED:
            problem = None if report is None else report.get("problem") or _NO_REPORT
            parts = self._explained(linking, prompt_layout, policy, prompt_layout.unstored, problem is not None)
            label = label_of(policy) if problem is None else BASELINE
            return Reuse(label, exact=num_prompt, cached=cached, problem=problem, parts=parts, **more)
        sources = dict(zip((match.start for match in prompt_layout.matches), prompt_layout.sources, strict=True))
        new = {part.key for part in prompt_layout.marked if part.is_new}
        linked = [
            PromptPart(start, stop, sources.get(start, "recognised"), key, rows, key in new)
            for start, stop, key, rows in report["documents"]
        ]
        parts = self._explained(linking, prompt_layout, policy, linked, fails=False)
        total, recomputed = report["document_tokens"], math.ceil(report["document_rows"])
        return Reuse(
            label_of(policy), report["chunks"], num_prompt - total, total - recomputed, recomputed, cached,
            "+".join(sorted(set(sources.values()))), marked=prompt_layout.marked, parts=parts, **more,
        )  # fmt: skip

    def _begin_learning(self, tenant: Tenant, parts: Mapping[str, bool]) -> None:
        async def learn() -> None:
            try:
                engine = await self._apart(self._engine_of(tenant, later=True))
                await asyncio.to_thread(self._compile_parts, engine, parts)
            finally:
                self._is_learning = False

        self._learning = asyncio.create_task(learn())

    # The start

    async def _measure(self) -> Divergence:
        """The policy on the check's prompts. Their objects have a salt of their own, and are removed.

        Raises:
            InputError: they cannot be linked.
        """
        engine, made = await self._apart(self._engine_of(Tenant("check", secrets.token_hex(16)))), list[Compiled]()

        def run() -> Divergence:
            policies, after = [self._settings.policy], self._settings.after
            return measure_divergence(engine, policies, after, self.context_length, on_compile=made.append)[0]

        try:
            return await asyncio.to_thread(run)
        except ApiError as error:
            raise InputError(f"the start-up check cannot run: {error}; turn it off with --check off") from error
        finally:
            found = [Entry.of(part.path) for part in made]
            if entries := [entry for entry in found if entry is not None]:
                await asyncio.to_thread(remove_all, self._store.root, entries)
