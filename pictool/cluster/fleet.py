"""The backend of a server whose engines are replicas elsewhere: what its router needs, and nothing that computes.

Leases, files and keys of tenants are this process's alone, so that they are the same for all replicas. A request goes
to a replica with the keys of its objects. If the replica dies before it gave anything, another one is called.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from pictool.cluster.replica import KEY_DIGITS
from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import object_key
from pictool.core import Text as TextDocument
from pictool.errors import InputError
from pictool.linker.grid import label_of
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import api_name
from pictool.serve.backends.base import BackendSettings
from pictool.serve.errors import ApiError
from pictool.serve.prompts.learning import texts_of
from pictool.serve.prompts.policies import allowed_policy, require_allowed
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
)

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.remote.remote import Remote

_log = logging.getLogger("pictool.cluster")
_ATTEMPTS = 3  # replicas that a request may lose
_REMEMBERED = 100_000  # objects at the remote
_BEGINNING = 256  # characters of a prompt without objects, by which it finds the replica that had it


class ReplicaLost(Exception):
    """A replica died, or cannot be reached, while it had a call."""


class Calls(Protocol):
    """Calls of replicas."""

    def __call__(self, method: str, *arguments: Any, keys: Mapping[str, int]) -> AsyncGenerator[Any, None]:
        """What `Replica.call` gives, of the replica that is chosen by `keys`; ending it early cancels it there.

        Args:
            keys: the first digits of the keys of the request's objects, and their bytes.

        Raises:
            ReplicaLost: another replica may do it. ApiError: no replica has room.
        """


class FleetBackend(Backend):
    """Answers by replicas.

    Args:
        model: as replicas have it; its weights are not loaded here.
        remote: where all replicas find all objects.
    """

    def __init__(self, model: Model, remote: Remote, settings: BackendSettings, calls: Calls) -> None:
        self.model, self.own_name = settings.name or api_name(model.name), model.name
        self.created = int(time.time())
        self.context_length, self.policy = model.max_positions, settings.policy
        self.response_template = getattr(model.tokenizer, "response_template", None)
        self._base, self._remote, self._settings, self._calls = model, remote, settings, calls
        self._encoding = threading.Lock()  # only one thread at a time may encode with a tokenizer
        self._at_remote = set[str]()
        self._num_waiting = self._num_active = 0

    async def start(self) -> None:
        """Learn from a replica what the start-up check found; all have the same weights. Raises ApiError."""
        (found,) = [status async for status in self._call("status")]
        self.divergence, self.problem = found.divergence, found.problem
        if self.problem is not None:
            self.policy = make_policy(BASELINE)

    def status(self) -> BackendStatus:
        """Calls that have had no event yet are those that wait."""
        return BackendStatus(
            self._num_waiting, self._num_active, label_of(self.policy), self.divergence, self.problem
        )  # fmt: skip

    async def answer(self, work: AnswerRequest) -> AsyncGenerator[Event, None]:
        named = work.linking.policy
        policy = self.policy if named is None else allowed_policy(named, self._settings.policy, self._settings.allowed)
        pieces = work.prompt.pieces if policy.needs.objects else ()
        marked = [piece.text for piece in pieces if isinstance(piece, MarkedText)]
        leased = {piece.key: piece.num_tokens for piece in pieces if isinstance(piece, ObjectReference)}
        keys = await self._keys(leased, marked, work.tenant, self._settings.spec(policy))
        work = replace(work, linking=replace(work.linking, recognises=False))  # a replica knows its own tier only
        async with aclosing(
            self._call("answer", work, keys=keys or _word("".join(texts_of(work.prompt))[:_BEGINNING]))
        ) as events:
            async for event in events:
                yield event

    async def compile(self, text: str, tenant: Tenant, chunk_tokens: int | None = None) -> list[CompiledText]:
        spec = self._settings.spec(self.policy, chunk_tokens=chunk_tokens)
        keys = await self._keys({}, [text], tenant, spec)
        (done,) = [done async for done in self._call("compile", text, tenant, chunk_tokens, keys=keys)]
        self._at_remote |= {part.key for part in done}
        return list(done)

    async def count(self, prompt: ChatPrompt, tenant: Tenant) -> int:
        (count,) = [count async for count in self._call("count", prompt, tenant)]
        return int(count)

    def has(self, key: str) -> bool:
        if key not in self._at_remote and self._remote.whole_bytes(key) is not None:
            if len(self._at_remote) >= _REMEMBERED:
                self._at_remote.clear()
            self._at_remote.add(key)
        return key in self._at_remote

    async def execute(self, query: str, tenant: Tenant) -> list[str]:
        (texts,) = [texts async for texts in self._call("execute", query, tenant, keys=_word(query))]
        return list(texts)

    async def link(self, spec: Spec, tenant: Tenant, compares: bool) -> AsyncGenerator[dict[str, Any], None]:
        require_allowed(spec.policy, self._settings.policy, self._settings.allowed)
        texts = [part.text for part in spec.documents if isinstance(part, TextDocument)]
        named = {part: 0 for part in spec.documents if isinstance(part, str)}
        keys = await self._keys(named, texts, tenant, spec) or _word(spec.query)
        async with aclosing(self._call("link", spec, tenant, compares, keys=keys)) as events:
            async for event in events:
                yield event

    async def _call(
        self, method: str, *arguments: Any, keys: Mapping[str, int] = {}
    ) -> AsyncGenerator[Any, None]:  # fmt: skip
        """What a replica gives. Raises ApiError: it refuses the call, or was lost after it had begun to answer."""
        has_begun = False
        self._num_waiting += 1
        try:
            for attempt in range(_ATTEMPTS):
                try:
                    async with aclosing(self._calls(method, *arguments, keys=keys)) as events:
                        async for event in events:
                            if isinstance(event, ApiError):
                                raise event
                            self._num_waiting -= not has_begun
                            self._num_active += not has_begun
                            has_begun = True
                            yield event
                    return
                except ReplicaLost as error:
                    _log.warning("pic: a replica was lost (%s); attempt %d of %d", error, attempt + 1, _ATTEMPTS)
                    if has_begun:  # nothing is sent twice
                        break
            raise ApiError(503, "the replica that was answering was lost; try again", code="replica_lost")
        except ApiError as error:
            if error.code == "cache_object_missing":  # removed by force: which ones are there is asked again
                self._at_remote.clear()
            raise
        finally:
            self._num_active -= has_begun
            self._num_waiting -= not has_begun

    async def _keys(
        self, sizes: Mapping[str, int], texts: Sequence[str], tenant: Tenant, spec: Spec
    ) -> dict[str, int]:  # fmt: skip
        """The objects of a request, by the first digits of their keys: their bytes, so that the holders come first.

        Args:
            sizes: tokens of objects by key, as far as they are known.
            texts: that become objects as `spec` has it; one that cannot be compiled has none, and the replica says so.
        """
        model = copy(self._base)
        model.salt = tenant.salt

        def compiled() -> dict[str, int]:
            found, options = dict[str, int](), spec.objects_for(model)
            for text in texts:
                with self._encoding, suppress(InputError):
                    for chunk in make_chunks(model, text, "text", spec.chunk_tokens):
                        found[object_key(model, chunk, options)] = len(chunk)
            return found

        found = {**sizes, **(await asyncio.to_thread(compiled) if texts else {})}
        return {key[:KEY_DIGITS]: max(1, count) * model.token_bytes for key, count in found.items()}


def _word(text: str) -> dict[str, int]:
    """Stands for the objects of a request without: it has no bytes, so it decides between equals."""
    return {f"text {hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:KEY_DIGITS]}": 0}
