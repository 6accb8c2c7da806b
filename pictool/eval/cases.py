"""Cases prepared for a model: one spec each, grouped by the documents that they share, and known to fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pictool.compiler.chunking import last_tokens, make_chunks
from pictool.compiler.compile import CODEC
from pictool.core import Chunk, Sampling
from pictool.errors import InputError, PicError
from pictool.eval.datasets.base import Case
from pictool.linker.policies import BASELINE, make_policy
from pictool.linker.resolve import Part, separated
from pictool.linker.spec import Spec
from pictool.runtime.chat.template import Frame
from pictool.runtime.support import rope_switch
from pictool.store.codecs import require_codec

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class SpecOptions:
    """What the specs of all cases have in common; None: as the case says. `pic.yaml` is not read for evaluations.

    Fields:
        chunk_tokens: documents are cut into chunks of at most so many tokens.
        codec: how the KV of documents is kept.
        stop: texts that end an answer, for a model that writes on after it; empty: as the case says.
    """

    chunk_tokens: int | None = None
    head: str | None = None
    query_template: str | None = None
    separator: str | None = None
    max_new_tokens: int | None = None
    codec: str = CODEC
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Sampling(stop=self.stop)
        if self.query_template is not None and "{query}" not in self.query_template:
            raise InputError(f"query template {self.query_template!r}: must contain {{query}}")
        require_codec(self.codec)
        for name in ("chunk_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")


@dataclass(frozen=True)
class PreparedCase:
    """A case with its spec, under the policy `full`, and the prompt's texts and length.

    Fields:
        num_context: tokens of head and documents. num_tokens: of the whole prompt.
    """

    case: Case
    spec: Spec
    frame: Frame
    num_context: int
    num_tokens: int

    @property
    def id(self) -> str:
        return self.case.id


@dataclass(frozen=True)
class CaseGroup:
    """Cases over the same chunks."""

    chunks: tuple[Chunk, ...]
    cases: tuple[PreparedCase, ...]


@dataclass(frozen=True)
class CaseGroups:
    """All groups in the dataset's order, and the ids of cases that are too long for the model."""

    groups: tuple[CaseGroup, ...]
    skipped: tuple[str, ...]


class TooLongError(InputError):
    """A case that does not fit the model's positions."""


def group_cases(model: Model, cases: Iterable[Case], options: SpecOptions) -> CaseGroups:
    """Tokenize the cases; consecutive ones with the same documents make a group.

    Raises:
        InputError: names the case, and what is wrong with it, unless it is too long for the model.
    """
    groups: list[CaseGroup] = []
    skipped: list[str] = []
    for _, consecutive in itertools.groupby(cases, key=lambda case: case.documents):
        several = list(consecutive)
        prepared = list[PreparedCase]()
        chunks: tuple[Chunk, ...] = ()
        with suppress(TooLongError):
            chunks = tuple(_chunks(model, several[0], options.chunk_tokens))
            for case in several:
                with suppress(TooLongError):
                    prepared.append(_prepare(model, case, chunks, options))
        fitting = {case.id for case in prepared}
        skipped.extend(case.id for case in several if case.id not in fitting)
        if prepared:
            groups.append(CaseGroup(chunks, tuple(prepared)))
    return CaseGroups(tuple(groups), tuple(skipped))


def _chunks(model: Model, case: Case, chunk_tokens: int | None) -> Iterator[Chunk]:
    earlier: list[Chunk] = []
    for i, text in enumerate(case.documents, 1):
        source = f"case {case.id}: document {i}"
        try:
            first, *rest = make_chunks(model, text, source, chunk_tokens)
            if case.is_one_text:
                first = replace(first, continues=True, before=last_tokens(earlier))
            earlier += (first, *rest)
            yield from (first, *rest)
        except InputError as error:
            if len(model.encode(text)) <= model.max_positions:
                raise
            raise TooLongError(source) from error


def _prepare(model: Model, case: Case, chunks: tuple[Chunk, ...], options: SpecOptions) -> PreparedCase:
    with prefixed_errors(f"case {case.id}"):
        spec = Spec(
            query=case.query,
            documents=chunks,
            policy=make_policy(BASELINE),
            head=case.head if options.head is None else options.head,
            query_template=case.query_template if options.query_template is None else options.query_template,
            max_new_tokens=options.max_new_tokens or case.max_new_tokens,
            sampling=Sampling(stop=options.stop or case.stop),
            codec=options.codec,
            separator=case.separator if options.separator is None else options.separator,
        )
        frame, separator = spec.frame(model), spec.separator_for(model)
        parts = separated(model, [Part(chunk) for chunk in chunks], separator)
        num_context = sum(len(part.chunk) for part in parts) + len(model.encode(frame.head))
        tail = frame.tail_after(chunks[-1].text, separator) if chunks else frame.tail
        num_tokens = num_context + len(model.encode(tail))
        _require_room(model, num_tokens, spec.max_new_tokens)
    return PreparedCase(case, spec, frame, num_context, num_tokens)


def _require_room(model: Model, num_tokens: int, new_tokens: int) -> None:
    """The prompt and all but the last token of the answer have positions, under one set of RoPE frequencies."""
    end, switch = num_tokens + new_tokens - 1, rope_switch(model.config)
    if end > model.max_positions or (switch is not None and num_tokens <= switch < end):
        raise TooLongError(f"has {num_tokens} tokens of prompt and up to {new_tokens} of answer")


@contextmanager
def prefixed_errors(prefix: str) -> Iterator[None]:
    """Put a prefix before the message of every PicError that is raised within."""
    try:
        yield
    except PicError as error:
        raise type(error)(f"{prefix}: {error}") from error
