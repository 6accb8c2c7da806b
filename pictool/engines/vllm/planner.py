"""From what a request wants to a plan and its rows: opens objects, recognises chunks, asks the policy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from pictool.compiler.compile import CODEC
from pictool.core import RowMask, TokenIds
from pictool.engines.vllm.objects import open_object, whole_key
from pictool.engines.vllm.plan import Found, LinkPlan, Span, locate, make_plan
from pictool.engines.vllm.recognise import Index
from pictool.engines.vllm.settings import Settings
from pictool.engines.vllm.wanted import Compile, Wanted
from pictool.errors import InputError, PicError
from pictool.linker.policies.base import Policy, Prompt, Table
from pictool.runtime.model import Model
from pictool.store.store import Store

_log = logging.getLogger("vllm.pictool")


class Planner:
    """Plans requests over one store for one model, whose weights it does not load."""

    def __init__(self, settings: Settings, store: Store, model: Model) -> None:
        self.settings, self._store, self._model = settings, store, model
        self._target = model.target
        settings.policy.prepare(model)
        self._index = Index(store, self._target, settings.min_tokens)
        self._closing = threading.Event()
        self._indexing = threading.Lock()
        self._is_indexing = False
        if settings.recognise:
            self._start_indexing()

    def close(self) -> None:
        self._closing.set()

    def plan(self, wanted: Wanted, tokens: TokenIds, salt: str = "") -> LinkPlan | None:
        """Where the objects of this salt stand, and which; None if chunks are to be recognised and there are none.

        Raises:
            PicError: an object that is missing, damaged or foreign, or does not stand where it should.
        """
        self._require_allowed(wanted.policy)
        find = self._find if wanted.places is None else self._placed
        found = find(wanted, tokens, salt)
        if wanted.places is None and (not found or found[0].start >= len(tokens) - 1):
            return None
        return make_plan(wanted.policy, tokens, found, self._head_key(tokens[: found[0].start], salt), salt)

    def select(self, plan: LinkPlan) -> RowMask | None:
        """The rows [N] to compute, those without an object among them; None if the policy narrows them on the way.

        Raises:
            PicError: a policy that cannot choose, as without its speculative model.
        """
        if plan.policy.check_layers(self._model.geometry.layers):
            return None
        plan.policy.prepare(self._model)
        rows = plan.policy.select(self._prompt(plan)).rows
        return rows | plan.required

    def forget(self, plan: LinkPlan) -> None:
        """An object of this plan turned out to be of no use: let it not be recognised again."""
        for span in plan.parts:
            assert span.key is not None
            try:
                with open_object(self._store, self._target, span.key, plan.salt) as file:
                    file.verify()
            except PicError:
                self._index.forget(span.key)

    def require_compilable(self, prompt: Sequence[int], what: Compile) -> None:
        """Refuse a compile request whose prompt is not sinks, a chunk and one token more.

        Raises:
            InputError: says what does not fit.
        """
        bos = self._model.bos_id
        if what.sinks and (bos is None or any(token != bos for token in prompt[: what.sinks])):
            raise InputError(f"compile: the prompt does not begin with {what.sinks} BOS tokens")
        if tuple(prompt[what.sinks : -1]) != self._model.encode(what.text):
            raise InputError("compile: the prompt is not sinks, the text's tokens and one token more")

    def _require_allowed(self, policy: Policy) -> None:
        """A client must not have any directory, or name of a hub, loaded as a model."""
        named = policy.params.get("spec_model", "")
        if named and named != self.settings.policy.params.get("spec_model") and not self.settings.any_model:
            raise InputError(
                f"policy: spec_model={named!r} is not the one that this server was started with "
                '(kv_connector_extra_config "policy", or "any_model")'
            )

    def _placed(self, wanted: Wanted, tokens: TokenIds, salt: str) -> list[Found]:
        found: list[Found] = []
        assert wanted.places is not None
        for place in wanted.places:
            key = whole_key(self._store, place.key)
            with open_object(self._store, self._target, key, salt) as file:
                own = file.tokens()
                self._store.mark_used(file)
            at = found[-1].end if found else 0
            found.append(locate(key, own, tokens, at) if place.start is None else Found(key, place.start, own))
        return found

    def _find(self, wanted: Wanted, tokens: TokenIds, salt: str) -> list[Found]:
        """Recognised chunks whose objects can be opened; the others are computed."""
        self._start_indexing()
        found = []
        for one in self._index.find(tokens, wanted.policy.sinks, salt):
            try:
                with open_object(self._store, self._target, one.key, salt) as file:
                    self._store.mark_used(file)
            except PicError as error:
                _log.warning("pic: %s; its tokens are computed", error)
                self._index.forget(one.key)
            else:
                found.append(one)
        return found

    def _head_key(self, head: TokenIds, salt: str) -> str | None:
        """The object of a head, if it was compiled: it stands where it was compiled, so it is exact."""
        key = self._target.key(head, 0, CODEC, salt)
        return key if len(head) and self._store.has(key) else None

    def _prompt(self, plan: LinkPlan) -> Prompt:
        """With texts for policies whose model reads them; decoding takes longer than the others take to choose."""
        layout = plan.layout
        spans = [*plan.spans, Span(*layout.tail, None)]
        texts = tuple(self._text(plan, span) if plan.policy.is_slow else "" for span in spans)
        tables = tuple(self._table(plan, span) for span in plan.spans[1:]) if plan.policy.uses_tables else ()
        return Prompt(self._model, layout, texts, tables)

    def _table(self, plan: LinkPlan, span: Span) -> Table | None:
        """The table of a span's object, as far as the span goes. Tokens without an object are computed anyway: 0."""
        if span.key is None:
            return np.zeros(span.end - span.start, dtype=np.float16)
        with open_object(self._store, self._target, span.key, plan.salt) as file:
            table = file.fixups()
        return None if table is None else table[: span.end - span.start]

    def _text(self, plan: LinkPlan, span: Span) -> str:
        """The text of the object that gives a whole span; else what its tokens decode to."""
        if span.key is not None:
            with open_object(self._store, self._target, span.key, plan.salt) as file:
                if file.meta.num_tokens == span.end - span.start:
                    return file.text()
        return str(self._model.tokenizer.decode(plan.layout.tokens[span.start : span.end].tolist()))

    def _start_indexing(self) -> None:
        """Read the store once now; a thread then looks for new objects."""
        with self._indexing:
            if self._is_indexing:
                return
            self._is_indexing = True
            self._index.refresh()
            threading.Thread(target=self._index_forever, name="pic-index", daemon=True).start()

    def _index_forever(self) -> None:
        while not self._closing.wait(self.settings.refresh_s):
            self._index.refresh()
