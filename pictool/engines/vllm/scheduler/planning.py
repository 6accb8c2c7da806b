"""The plans of a server's requests: the objects in their prompts, and the rows that the policy selects."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace

from pictool.compiler.compile import CODEC
from pictool.compiler.contexts import own_contexts
from pictool.core import Chunk, PromptText, RowMask, TokenIds
from pictool.engines.vllm.client.setup import ConnectorSettings
from pictool.engines.vllm.request import (
    CompileParams,
    LinkParams,
    ObjectRef,
    PlanningDeadline,
    RequestError,
    UnusableObjectError,
)
from pictool.engines.vllm.scheduler.matching import adapted, adapter_files, full_key, open_object
from pictool.engines.vllm.worker.threads import BackgroundThrottle
from pictool.errors import InputError, PicError
from pictool.linker.plan import LinkPlan, Span, make_plan
from pictool.linker.policies.base import Policy, Prompt, Selection
from pictool.recognition.index import ContentIndex, IndexThread
from pictool.recognition.matches import Match, NamedObject, locate
from pictool.recognition.search import MAX_EDGE
from pictool.runtime.model import Model
from pictool.store.objects.format import ObjectFile
from pictool.store.store import Store

_FIRST_READ_S = 0.1  # how long the first request that has documents recognised waits for the store to be read
_CHARACTERS_PER_TOKEN = 256  # of a text, at most
_log = logging.getLogger("vllm.pictool")


class Planner:
    """Plans the requests of a server: one store, and one model whose weights are not loaded. Thread-safe.

    Attributes:
        target: what the objects are made for.
        throttle: to the engine, whose steps planning is not to hold.
    """

    def __init__(self, settings: ConnectorSettings, store: Store, model: Model) -> None:
        self._settings, self._store, self._model = settings, store, model
        self.target = model.target
        self._adapter: tuple[str, object] | None = None  # its directory, and how its files were
        self.throttle = BackgroundThrottle()
        self._models = threading.Lock()  # a second model, and a tokenizer that encodes, are used by one thread
        settings.policy.prepare(model)
        self._index = ContentIndex(store, self.target, settings.min_tokens, self._decode)
        self._indexing = IndexThread(self._index, settings.refresh_s, lambda problem: _log.warning("pic: %s", problem))
        if settings.recognise:  # the server starts with all that is in the store
            self._indexing.start()
            if not self._indexing.wait(settings.start_s):
                _log.warning(
                    "pic: the store %s was not read within %g s; the server starts, and recognises documents in "
                    "prompts once it is",
                    store.root, settings.start_s,
                )  # fmt: skip

    def under(self, directory: str) -> Planner:
        """A planner for requests of a LoRA adapter, which find the objects that were made under it.

        Raises:
            InputError: the adapter is no local directory.
        """
        model, files = copy(self._model), adapter_files(directory)
        vars(model)["target"] = adapted(self.target, directory)  # a cached property
        planner = Planner(replace(self._settings, recognise=False), self._store, model)
        planner.throttle, planner._adapter = self.throttle, (directory, files)
        planner.require_unchanged()
        return planner

    def require_unchanged(self) -> None:
        """Refuse requests of an adapter whose files are others now: vLLM may have loaded either.

        Raises:
            InputError: says so.
        """
        if self._adapter is not None and adapter_files(self._adapter[0]) != self._adapter[1]:
            raise InputError(
                f"the adapter {self._adapter[0]} has changed since it was first used; load it from a new directory"
            )

    def close(self) -> None:
        """Stop reading the store for new objects."""
        self._indexing.close()

    def plan(
        self, request: LinkParams, tokens: TokenIds, salt: str = "", deadline: PlanningDeadline | None = None
    ) -> LinkPlan | None:
        """Plan a request with the objects of its salt; None if it leaves them to be recognised and there are none.

        Raises:
            PicError: an object that is missing, damaged or foreign, or whose tokens are not where the request says; or
                the deadline, by default `plan_s` from now on, is over.
        """
        deadline = deadline or PlanningDeadline.after(self._settings.plan_s)
        self._require_allowed(request.policy)
        try:
            request.policy.check_layers(self._model.geometry.layers)
        except InputError as error:
            raise RequestError(f"policy: {error}") from error
        if request.objects is None:
            matches = self._recognise(request, tokens, salt, deadline)
            if not matches or matches[0].start >= len(tokens) - 1:
                return None
        else:
            matches = self._match(request.objects, tokens, salt, deadline)
        try:
            return make_plan(request.policy, tokens, matches, self._head_key(tokens[: matches[0].start], salt), salt)
        except InputError as error:
            raise RequestError(f"kv_transfer_params: {error}") from error

    def select(self, plan: LinkPlan) -> RowMask | None:
        """The rows [N] to compute, those without an object among them; None if the policy narrows them layer by layer.

        Raises:
            PicError: a policy that cannot select, as without its second model.
        """
        if plan.policy.check_layers(self._model.geometry.layers):
            return None
        return self.first_selection(plan).rows | plan.required

    def first_selection(self, plan: LinkPlan) -> Selection:
        """What the policy selects before layer 0; for the errors see `select`."""
        with self._models if plan.policy.needs.runs_model else nullcontext():
            plan.policy.prepare(self._model)
            return plan.policy.select(self._prompt(plan))

    def mark_suspect(self, plan: LinkPlan) -> None:
        """After a plan failed: its objects are recognised no more until they have been read and found whole."""
        for span in plan.object_spans:
            assert span.key is not None
            self._index.mark_suspect(span.key)
        self._indexing.wake()

    def wake(self) -> None:
        """Look for new objects soon."""
        self._indexing.wake()

    def require_compilable(self, prompt: Sequence[int], request: CompileParams, is_proven: bool) -> None:
        """Refuse a compile request whose prompt is not a context, a chunk and one token more.

        Only a router, which is proven, compiles after any text: others link what that made of the chunk.

        Raises:
            RequestError: says what does not fit.
        """
        if len(request.text) > _CHARACTERS_PER_TOKEN * len(prompt):  # encoding it would take long for nothing
            raise RequestError(f"compile: the text is too long to be in a prompt of {len(prompt)} tokens")
        with self._models:
            readings = {self._model.encode(text) for text in (request.text, PromptText(request.text))}  # a head's
        if () in readings:
            raise RequestError("compile: the text has no tokens; nothing to compile")
        if tuple(prompt[request.before : -1]) not in readings:
            raise RequestError(f"compile: the prompt must be {request.before} tokens, those of the text and one more")
        before, chunk = tuple(prompt[: request.before]), Chunk(request.text, tuple(prompt[request.before : -1]), "")
        with self._models:
            if before and not is_proven and before not in own_contexts(self._model, chunk):
                raise RequestError(f"compile: the first {request.before} tokens are not one of pictool's contexts")

    def _require_allowed(self, policy: Policy) -> None:
        """A client chooses among the server's policies, and has no directory or name of a hub loaded as a model."""
        name, default, allowed = policy.second_model, self._settings.policy, self._settings.policies
        if allowed is not None and policy.name not in {default.name, *allowed}:
            raise RequestError(
                f"policy: {policy.name!r} is not allowed here; allowed are {', '.join((default.name, *allowed))}"
            )
        if name and not self._settings.any_model and name != default.second_model:
            raise RequestError(
                f"policy: {policy.needs.model_field}={name!r} is not the model that this server was started with "
                '(kv_connector_extra_config "policy", or "any_model")'
            )

    def _match(
        self, objects: Sequence[ObjectRef], tokens: TokenIds, salt: str, deadline: PlanningDeadline
    ) -> list[Match]:
        """The objects that a request names, in the prompt."""
        opened: dict[str, TokenIds] = {}  # by the name in the request
        keys: dict[str, str] = {}
        listed: dict[str, list[str]] = {}
        num_tokens = 0  # of all objects, less those that may be missing at their edges
        for ref in objects:
            deadline.check()
            self.throttle.pause()
            if ref.key not in keys:
                keys[ref.key] = full_key(self._store, ref.key, salt, listed)
                with open_object(self._store, self.target, keys[ref.key], salt) as file:
                    self._require_known_context(file, ref.key)
                    opened[ref.key] = file.tokens()
                    self._store.mark_used(file)
            num_tokens += max(1, len(opened[ref.key]) - 2 * MAX_EDGE)
            if num_tokens > len(tokens):
                raise RequestError(f"the requested objects have more tokens than the prompt ({len(tokens)})")
        named = [NamedObject(keys[ref.key], opened[ref.key], ref.start) for ref in objects]
        try:
            return locate(named, tokens, self._decode)
        except InputError as error:
            raise RequestError(str(error)) from error

    def _require_known_context(self, file: ObjectFile, name: str) -> None:
        try:
            file.meta.require_known_context(name[:12])
        except PicError as error:
            raise UnusableObjectError(file.meta.key, error) from error

    def _recognise(self, request: LinkParams, tokens: TokenIds, salt: str, deadline: PlanningDeadline) -> list[Match]:
        """Stored documents in the prompt whose objects can be opened; the others are computed."""
        if not self._indexing.is_started:
            self._indexing.start()
            self._indexing.wait(_FIRST_READ_S)
        matches = self._index.find(tokens, salt, request.codec)
        usable: dict[str, bool] = {}
        for key in dict.fromkeys(match.key for match in matches):
            deadline.check()
            self.throttle.pause()
            usable[key] = self._is_usable(key, salt)
        return [match for match in matches if usable[match.key]]

    def _is_usable(self, key: str, salt: str) -> bool:
        """Whether a recognised object can be linked; if so, it is now used. A damaged one is not recognised again."""
        try:
            with open_object(self._store, self.target, key, salt) as file:
                self._store.mark_used(file)
        except PicError as error:
            _log.warning("pic: %s; its tokens are computed", error)
            self._index.mark_suspect(key)
            return False
        return True

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._model.tokenizer.decode(tokens))

    def _head_key(self, head: TokenIds, salt: str) -> str | None:
        """The object of a head, if it was compiled: it is at the position it was compiled at, so it is exact."""
        key = self.target.key(head, CODEC, salt)
        return key if len(head) and self._store.has(key) else None

    def _prompt(self, plan: LinkPlan) -> Prompt:
        """The prompt as the policy sees it. Texts are for policies that run a model: decoding them takes long."""
        layout, needs = plan.layout, plan.policy.needs
        spans = [*plan.spans, Span(*layout.tail, None)]
        texts = tuple(self._text(plan, span) if needs.runs_model else "" for span in spans)
        return Prompt(self._model, layout, texts)

    def _text(self, plan: LinkPlan, span: Span) -> str | PromptText:
        """The text of the object, if all of it is in the span; else what the span's tokens decode to."""
        ids = plan.layout.tokens[span.start : span.end].tolist()
        if span.key is not None:
            with open_object(self._store, self.target, span.key, plan.salt) as file:
                if file.meta.num_tokens == span.end - span.start:
                    return self._model.encoder.as_tokenized(file.text(), ids)
        return self._model.encoder.as_tokenized(self._decode(ids), ids)
