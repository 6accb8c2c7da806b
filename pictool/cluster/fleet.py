"""The backend of a server whose engines are replicas elsewhere: what its router needs, and nothing that computes.

Leases, files and keys of tenants are this process's alone, so that they are the same for all replicas. A request goes
to a replica with the keys of the objects that it wants. If the replica dies, another one answers: an answer is
determined by its request, so what was sent of it already is compared and left out (`sent`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pictool.cluster.replica import ErrorReply, ReplicaLost
from pictool.cluster.sent import EventMismatch, SentEvents
from pictool.compiler.chunking import make_chunks
from pictool.core import Text as TextDocument
from pictool.errors import InputError
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError, server_ends
from pictool.serve.prompts.learning import texts_of
from pictool.serve.prompts.offered import offered_policy, require_offered
from pictool.serve.tenants import Tenant
from pictool.serve.work import (
    AnswerRequest,
    Backend,
    BackendStatus,
    ChatPrompt,
    CompiledText,
    Event,
    MarkedText,
    ObjectReference,
    Piece,
    RawPrompt,
)

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy
    from pictool.runtime.model import Model
    from pictool.store.remote.remote import Remote

_log = logging.getLogger("pictool.cluster")
_ATTEMPTS = 3  # replicas that a request may lose
_REMEMBERED = 100_000  # objects at the remote; keys of texts
_BEGINNING = 256  # characters of a prompt without objects, by which it finds the replica that had it


class Calls(Protocol):
    """Calls of replicas."""

    def __call__(self, method: str, *arguments: Any, keys: tuple[str, ...], **named: Any) -> AsyncGenerator[Any, None]:
        """What a method of the replica sends that is chosen by `keys`; ending it early cancels it there.

        Raises:
            ReplicaLost: try again. ApiError: no replica has room.
        """


class FleetBackend(Backend):
    """Answers by replicas.

    Args:
        model: as replicas have it; its weights are not loaded here.
        remote: where all replicas find all objects.
    """

    def __init__(self, model: Model, remote: Remote, settings: BackendSettings, calls: Calls) -> None:
        self.model, self.created = settings.name or model.name, int(time.time())
        self.context_length = model.max_positions
        self.policy = settings.policy
        self.response_template = getattr(model.tokenizer, "response_template", None)
        self.divergence: dict[str, float] = {}
        self.problem: str | None = None
        self._settings, self._remote, self._calls = settings, remote, calls
        self._wants = PromptKeys(model, settings.codec)
        self._at_remote: OrderedDict[str, None] = OrderedDict()
        self._num_waiting = self._num_active = 0
        self._endings = set[asyncio.Future[None]]()  # of the calls that run: what each is told the end by
        self._is_closed = False

    def close(self) -> None:
        """End the calls that run, each with an error that says so. May be called from any thread, and twice."""
        self._is_closed = True
        for ending in self._endings.copy():
            ending.get_loop().call_soon_threadsafe(_tell, ending)
        self._wants.close()

    def status(self) -> BackendStatus:
        """Calls that have had no event yet are those that wait."""
        return BackendStatus(
            self._num_waiting, self._num_active, label_of(self.policy), self.divergence, self.problem
        )  # fmt: skip

    async def read_length(self) -> None:
        """Learn from a replica how long a prompt may be. Raises ApiError."""
        (self.context_length,) = [found async for found in self._call("positions", keys=())]

    async def check(self, limit: float) -> float:
        """The figure of the start-up check, on a replica; above the limit, requests that name no policy are exact.

        Raises:
            ApiError: it cannot run.
        """
        (kl,) = [found async for found in self._call("check", keys=())]
        self.divergence = {label_of(self._settings.policy): kl}
        if kl > limit:
            self.policy = make_policy(BASELINE)
            self.problem = (
                f"{label_of(self._settings.policy)}: linked answers of {self.model} are {kl:.3g} nats from full "
                f"recompute, more than {limit:g}"
            )
        return float(kl)

    # The backend's contract

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        named = work.linking.policy
        policy = self.policy if named is None else offered_policy(named, self._settings.policy, self._settings.allowed)
        keys = await self._wants.of_work(work, policy)
        work = replace(work, linking=replace(work.linking, recognises=False))  # a replica knows its own tier only
        async with aclosing(self._call("answer", work, keys=keys, exact=self._is_exact)) as events:
            async for event in events:
                yield event

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        keys = await self._wants.of_texts([text], tenant, self.policy, chunk_tokens)
        call = self._call("compile", text, tenant, chunk_tokens, keys=keys, exact=self._is_exact)
        done: list[CompiledText] = [part async for part in call]
        for part in done:
            _remember(self._at_remote, part.key, None)
        return done

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        (count,) = [found async for found in self._call("count", prompt, tenant, keys=())]
        return int(count)

    def has(self, key: str) -> bool:
        if key in self._at_remote:
            return True
        if self._remote.whole_bytes(key) is None:
            return False
        _remember(self._at_remote, key, None)
        return True

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        call = self._call("execute", query, tenant, keys=(_word(query),), exact=self._is_exact)
        (texts,) = [texts async for texts in call]
        return list(texts)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        require_offered(spec.policy, self._settings.policy, self._settings.allowed)
        texts = [part.text for part in spec.documents if isinstance(part, TextDocument)]
        keys = tuple(part for part in spec.documents if isinstance(part, str))
        keys += await self._wants.of_texts(texts, tenant, spec.policy, spec.chunk_tokens, spec)
        keys = keys or (_word(spec.query),)
        async with aclosing(self._call("link", spec, tenant, compares, keys=keys, exact=self._is_exact)) as events:
            async for event in events:
                yield event

    # Calls

    @property
    def _is_exact(self) -> bool:
        return self.problem is not None

    async def _call(
        self, method: str, *arguments: Any, keys: tuple[str, ...], **named: Any
    ) -> AsyncGenerator[Any, None]:
        """What a replica sends. If it dies, another one begins again, and goes on where it was."""
        sent = SentEvents()
        self._num_waiting += 1
        try:
            with self._told_of_the_end() as ending:
                for attempt in range(_ATTEMPTS):
                    calls = self._calls(method, *arguments, keys=keys, **named)
                    try:
                        async with (
                            aclosing(_until(ending, calls)) as going,
                            aclosing(self._after(sent, going)) as events,
                        ):
                            async for event in events:
                                yield event
                        return
                    except ReplicaLost as error:
                        _log.warning("pic: a replica was lost (%s); attempt %d of %d", error, attempt + 1, _ATTEMPTS)
            raise _unavailable()
        finally:
            self._num_active -= bool(sent)
            self._num_waiting -= not sent

    @contextmanager
    def _told_of_the_end(self) -> Iterator[asyncio.Future[None]]:
        """What is done once the backend is closed, while a call runs. Raises ApiError: it is closed."""
        ending = asyncio.get_running_loop().create_future()
        self._endings.add(ending)
        try:
            if self._is_closed:
                raise server_ends()
            yield ending
        finally:
            self._endings.discard(ending)

    async def _after(self, sent: SentEvents, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The events after those that were `sent`, which must be the same again; they are added to them."""
        sent.begin_again()
        async for event in events:
            if isinstance(event, ErrorReply):
                self._forget_lost(event)
                raise event.error
            is_first = not sent
            try:
                rest = sent.rest(event)
            except EventMismatch as error:
                raise _unavailable() from error
            self._num_waiting -= is_first
            self._num_active += is_first
            if rest is not None:
                yield rest

    def _forget_lost(self, refused: ErrorReply) -> None:
        """An object that a lease names was removed by force: which ones are there is asked again."""
        if refused.code == "cache_object_missing":
            self._at_remote.clear()


async def _until(ending: asyncio.Future[None], events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Events until there is no other, or the end comes first. Raises ApiError: it did."""
    nothing = object()
    async with aclosing(events):
        while True:
            coming: asyncio.Future[Any] = asyncio.ensure_future(anext(events, nothing))
            try:
                await asyncio.wait({coming, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    raise server_ends()
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            if coming.result() is nothing:
                return
            yield coming.result()


def _tell(ending: asyncio.Future[None]) -> None:
    if not ending.done():
        ending.set_result(None)


def _unavailable() -> ApiError:
    return ApiError(503, "the replica that answered was lost; try again", code="replica_lost")


class PromptKeys:
    """Computes the keys of the objects in a request, in prompt order, in a thread with a tokenizer of its own."""

    def __init__(self, model: Model, codec: str) -> None:
        self._model, self._codec = model, codec
        self._thread = ThreadPoolExecutor(1, "pic-keys")
        self._known: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def close(self) -> None:
        self._thread.shutdown()

    async def of_work(self, work: AnswerRequest, policy: Policy) -> tuple[str, ...]:
        """Of a request; without objects, a word that stands for the beginning of its prompt."""
        pieces = [piece for piece in _pieces(work.prompt) if isinstance(piece, ObjectReference | MarkedText)]
        if not pieces or not policy.needs.objects:
            return (_word("".join(texts_of(work.prompt))[:_BEGINNING]),)
        marked = [piece.text for piece in pieces if isinstance(piece, MarkedText)]
        found = iter(await self._of_each(marked, work.tenant, Spec(policy=policy, codec=self._codec)))
        return tuple(
            key for piece in pieces for key in ((piece.key,) if isinstance(piece, ObjectReference) else next(found))
        )  # fmt: skip

    async def of_texts(
        self, texts: Sequence[str], tenant: Tenant, policy: Policy, chunk_tokens: int | None = None,
        spec: Spec | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Of texts that are compiled as `spec` has it."""
        asked = replace(spec or Spec(policy=policy, codec=self._codec), documents=(), chunk_tokens=chunk_tokens)
        return tuple(key for keys in await self._of_each(texts, tenant, asked) for key in keys)

    async def _of_each(self, texts: Sequence[str], tenant: Tenant, spec: Spec) -> list[tuple[str, ...]]:
        if not texts:
            return []
        loop = asyncio.get_running_loop()
        try:
            found = loop.run_in_executor(self._thread, lambda: [self._keys(text, tenant, spec) for text in texts])
        except RuntimeError as error:  # it was closed
            raise server_ends() from error
        return await found

    def _keys(self, text: str, tenant: Tenant, spec: Spec) -> tuple[str, ...]:
        """Of a text; none of one that cannot be compiled, which the replica says."""
        options = spec.objects_for(self._model)
        named = f"{tenant.id} {options} {spec.chunk_tokens} {text}".encode(errors="surrogatepass")
        digest = hashlib.sha256(named).digest()
        if digest not in self._known:
            model = self._model
            try:
                chunks = make_chunks(model, text, "text", spec.chunk_tokens)
            except InputError:
                return ()
            keys = tuple(
                model.target.key(
                    chunk.tokens, options.sinks, options.codec, tenant.salt, model.bos_id, model.cut_of(options.cut)
                )
                for chunk in chunks
            )  # fmt: skip
            _remember(self._known, digest, keys)
        return self._known[digest]


def _pieces(prompt: ChatPrompt | RawPrompt) -> Iterable[Piece]:
    if isinstance(prompt, RawPrompt):
        return prompt.pieces
    return [piece for turn in prompt.turns for piece in turn.pieces] + [part.piece for part in prompt.documents]


def _word(text: str) -> str:
    """A stand-in key for a text that is not an object."""
    return f"text {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:16]}"


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    while len(known) > _REMEMBERED:
        known.popitem(last=False)
