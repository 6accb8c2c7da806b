"""The spec of a request: everything that it asks for, as one frozen value that is built once, where it enters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.compile import CODEC, head_codec
from pictool.compiler.contexts import PREVIOUS
from pictool.core import Chunk, CompileOptions, Contexts, Message, PromptText, Sampling, Text
from pictool.errors import InputError
from pictool.linker.grid import named_policy
from pictool.linker.policies import DEFAULT, make_policy, object_kinds
from pictool.linker.policies.base import Policy
from pictool.reading import whole
from pictool.runtime.chat.template import Frame, frame_messages, make_frame

if TYPE_CHECKING:
    from pictool.linker.plan import LinkPlan
    from pictool.runtime.model import Model

Document = str | Path | Chunk | Text
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Spec:
    """One question over documents, how to link them, and how to answer.

    Fields:
        query: the question; with `messages`, unused.
        documents: text files, object files (.kvo), keys, chunks, or texts in memory (`Text`), in prompt order.
        policy: which rows to recompute: a policy, or a specification such as `legolink-16`.
        head: the system message, or the text before the documents of a model without a chat template.
        query_template: the text after the documents; `{query}` stands for the query.
        max_new_tokens, sampling: of the answer.
        chunk_tokens: cut text files into chunks of at most this many tokens.
        codec: how to store the KV of documents that are compiled. The head's is always stored losslessly.
        messages: a chat instead of a query; the documents come before the text of its last user message.
        is_raw: head and query are the prompt's texts, written by your own template: markers in them are
            control tokens, and BOS comes first if the tokenizer adds it to texts.
        written: head and tail as a template wrote them, instead of head and query.
        separator: the text between documents and before the query, except what is already there; None: the model's
            (`Model.separator`). An empty one joins them directly, as does a raw prompt without one.
        plan: a prompt whose token ids and objects are already laid out, instead of a query and documents; its policy
            is the spec's.
        is_fresh: reuse nothing that earlier prompts computed, and leave nothing for later ones.
        after: the context of documents that are compiled for this request (`compiler/contexts.py`).
    """

    query: str = ""
    documents: Sequence[Document] = ()
    policy: Policy = field(default_factory=lambda: make_policy(DEFAULT))
    head: str | None = None
    query_template: str | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    sampling: Sampling = Sampling()
    chunk_tokens: int | None = None
    codec: str = CODEC
    messages: tuple[Message, ...] = ()
    is_raw: bool = False
    written: Frame | None = None
    plan: LinkPlan | None = None
    separator: str | None = None
    is_fresh: bool = False
    after: str | Contexts = PREVIOUS

    def __post_init__(self) -> None:
        if isinstance(self.documents, str | Path | Chunk | Text):  # one document, not its letters
            object.__setattr__(self, "documents", (self.documents,))
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", named_policy(self.policy))
        for name in ("max_new_tokens", "chunk_tokens"):
            try:
                if (value := getattr(self, name)) is not None:
                    object.__setattr__(self, name, whole(value))
            except ValueError as error:
                raise InputError(f"{name}: {error}") from error

    @classmethod
    def raw(
        cls, documents: Sequence[Document], tail: str | PromptText, policy: Policy, head: str | PromptText = ""
    ) -> Spec:
        """A prompt of these very texts: head + documents + tail; those of a `Frame` are as its template wrote them."""
        if isinstance(head, str) and isinstance(tail, str):
            return cls(tail, documents, policy, head, is_raw=True)
        head, tail = (text if isinstance(text, PromptText) else PromptText(text) for text in (head, tail))
        return cls(documents=documents, policy=policy, written=Frame(head, tail))

    @classmethod
    def planned(cls, plan: LinkPlan, max_new_tokens: int = MAX_NEW_TOKENS, sampling: Sampling = Sampling()) -> Spec:
        """A prompt that is laid out already."""
        return cls(policy=plan.policy, max_new_tokens=max_new_tokens, sampling=sampling, plan=plan)

    def separator_for(self, model: Model) -> str:
        """What is between its documents, less what is there already (`separator_between`)."""
        if self.separator is not None:
            return self.separator
        return "" if self.is_raw or self.written is not None else model.separator

    def frame(self, model: Model) -> Frame:
        """The prompt's head and tail.

        Raises:
            InputError: an empty query, a template without `{query}`, or messages without a user's.
            ModelError: a chat template that does not keep the documents in one place.
        """
        if self.written is not None:
            return self.written
        if self.is_raw:  # without a head and documents, the tail begins it
            begins = bool(self.head or self.documents)
            return Frame(PromptText(self.head or "", begins=begins), PromptText(self.query, begins=not begins))
        if self.messages:
            return frame_messages(model, self.messages, self.head, self.query_template)
        return make_frame(model, self.query, self.head, self.query_template, self.separator_for(model))

    @property
    def objects(self) -> CompileOptions:
        """How its documents are compiled, where the store lacks them."""
        (kind,) = object_kinds([self.policy], self.codec, after=self.after) or [CompileOptions(self.codec)]
        return kind

    def objects_for(self, model: Model) -> CompileOptions:
        """`objects`; of a hybrid with the policy's cut."""
        return self.objects if model.geometry.states is None else replace(self.objects, cut=self.policy.needs.cut)

    def head_object_for(self, model: Model) -> CompileOptions:
        """How its head is compiled; of a hybrid with the cut 0, since nothing comes before it."""
        return CompileOptions(codec=head_codec(self.codec), cut=None if model.geometry.states is None else 0)
