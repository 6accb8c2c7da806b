"""Units of work: the cases that stand on the same documents, tokenized once, and known to fit the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks
from pictool.compiler.compile import CODEC
from pictool.core import Chunk
from pictool.errors import InputError, PicError
from pictool.eval.case import Case
from pictool.runtime.support import rope_switch
from pictool.runtime.template import Frame, make_frame
from pictool.store.codecs import require_codec

if TYPE_CHECKING:
    from pictool.runtime.model import Model


@dataclass(frozen=True)
class Settings:
    """How every case is asked; None: as the case says. `pic.yaml` has no part in it: a dataset brings its prompts.

    chunk_tokens: documents are cut into chunks of at most so many tokens. codec: how the KV of documents is kept.
    """

    chunk_tokens: int | None = None
    head: str | None = None
    query_template: str | None = None
    max_new_tokens: int | None = None
    codec: str = CODEC

    def __post_init__(self) -> None:
        if self.query_template is not None and "{query}" not in self.query_template:
            raise InputError(f"query template {self.query_template!r}: must contain {{query}}")
        require_codec(self.codec)
        for name in ("chunk_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: must be 1 or more")


@dataclass(frozen=True)
class Question:
    """One case as it is asked."""

    case: Case
    head: str | None
    query_template: str | None
    frame: Frame
    max_new_tokens: int
    num_context: int  # tokens of head and documents
    num_tokens: int  # of the whole prompt


@dataclass(frozen=True)
class Unit:
    """Questions over the same chunks."""

    chunks: tuple[Chunk, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Units:
    """All units in the dataset's order, and the ids of cases that are too long for the model."""

    units: tuple[Unit, ...]
    skipped: tuple[str, ...]


class TooLongError(InputError):
    """A case that does not fit the model's positions."""


def make_units(model: Model, cases: Iterable[Case], settings: Settings, skip_long: bool = False) -> Units:
    """Tokenize the cases; consecutive ones with the same documents make a unit.

    Args:
        skip_long: leave out cases that do not fit the model, instead of refusing them.

    Raises:
        InputError: names the case, and what is wrong with it.
    """
    units: list[Unit] = []
    skipped: list[str] = []
    for _, group in itertools.groupby(cases, key=lambda case: case.documents):
        unit, too_long = _make_unit(model, list(group), settings)
        if too_long and not skip_long:
            raise too_long[0][1]
        skipped.extend(case.id for case, _ in too_long)
        if unit.questions:
            units.append(unit)
    return Units(tuple(units), tuple(skipped))


def _make_unit(model: Model, cases: Sequence[Case], settings: Settings) -> tuple[Unit, list[tuple[Case, TooLongError]]]:
    too_long: list[tuple[Case, TooLongError]] = []
    questions = []
    try:
        chunks = tuple(_chunks(model, cases[0], settings.chunk_tokens))
    except TooLongError as error:
        return Unit((), ()), [(case, error) for case in cases]
    num_tokens = sum(map(len, chunks))
    for case in cases:
        try:
            questions.append(_question(model, case, settings, num_tokens))
        except TooLongError as error:
            too_long.append((case, error))
    return Unit(chunks, tuple(questions)), too_long


def _chunks(model: Model, case: Case, chunk_tokens: int | None) -> Iterator[Chunk]:
    for i, text in enumerate(case.documents, 1):
        source = f"case {case.id}: document {i}"
        try:
            yield from make_chunks(model, text, source, chunk_tokens)
        except InputError as error:
            count = len(model.encode(text))
            if count <= model.max_positions:
                raise
            raise TooLongError(
                f"{source}: {count} tokens, but {model.name} takes {model.max_positions} positions; cut documents with "
                "--chunk-tokens, or leave such cases out with --skip-long"
            ) from error


def _question(model: Model, case: Case, settings: Settings, num_tokens: int) -> Question:
    head = case.head if settings.head is None else settings.head
    template = case.query_template if settings.query_template is None else settings.query_template
    new_tokens = settings.max_new_tokens or case.max_new_tokens
    with naming(f"case {case.id}"):
        frame = make_frame(model, case.query, head, template)
        num_context = num_tokens + len(model.encode(frame.head))
        num_tokens = num_context + len(model.encode(frame.tail))
        _require_room(model, num_tokens, new_tokens)
    return Question(case, head, template, frame, new_tokens, num_context, num_tokens)


def _require_room(model: Model, num_tokens: int, new_tokens: int) -> None:
    """The prompt and all but the last token of the answer have positions, under one set of RoPE frequencies."""
    end, switch = num_tokens + new_tokens - 1, rope_switch(model.config)
    if end > model.max_positions:
        problem = f"but {model.name} takes {model.max_positions} positions"
    elif switch is not None and num_tokens <= switch < end:
        problem = f"which cross {switch}, where the RoPE of {model.name} changes every key"
    else:
        return
    raise TooLongError(
        f"has {num_tokens} tokens of prompt and up to {new_tokens} of answer, {problem}; leave such cases out with "
        "--skip-long"
    )


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of what is done within name it."""
    try:
        yield
    except PicError as error:
        raise type(error)(f"{what}: {error}") from error
