"""Questions over a library, one after the other: retrieve, link, answer, and name the sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pictool.core import Chunk, Message
from pictool.documents.library import Found, Library
from pictool.engines.base import Answer, Engine
from pictool.errors import InputError
from pictool.linker.spec import Spec

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled
    from pictool.documents.reading import Document
    from pictool.runtime.model import Model

NUM_PASSAGES = 8
_MARGIN = 16  # tokens that a chat's frame may have more than its parts alone
_HISTORY = 4  # the earlier messages have at most this part of the positions


@dataclass(frozen=True)
class Reply:
    """An answer, the passages that were linked for it (the best first), and the files that could not be read."""

    answer: Answer
    sources: tuple[Found, ...]
    problems: tuple[Document, ...] = ()

    @property
    def text(self) -> str:
        return self.answer.text

    def __repr__(self) -> str:
        return f"Reply({self.text!r}, {', '.join(found.passage.source for found in self.sources)})"

    def _repr_html_(self) -> str:
        from pictool.trace.html import list_html

        return self.answer._repr_html_() + list_html("sources", (found.passage.source for found in self.sources))

    def report(self) -> dict[str, Any]:
        """The JSON of `pic ask --json`: that of `pic link`, its sources, and what could not be read."""
        objects = self.answer.origin()["objects"]  # in the order of the prompt
        keys = {found.at: named["key"] for found, named in zip(in_order(self.sources), objects, strict=True)}
        sources = [found.report() | {"key": keys[found.at]} for found in self.sources]
        problems = [{"path": str(document.path), "problem": document.problem} for document in self.problems]
        return self.answer.report() | {"sources": sources, "unreadable": problems}


def in_order(found: Sequence[Found]) -> list[Found]:
    """Passages as the prompt has them: in the order of the library, so that what follows on something still does."""
    return sorted(found, key=lambda one: one.at)


def _chunks(model: Model, found: Sequence[Found]) -> Iterator[Chunk]:
    """The chunks of passages in their order; one that follows on another continues it."""
    for before, one in pairwise([None, *found]):
        assert one is not None
        follows = before is not None and before.at + 1 == one.at and before.passage.source == one.passage.source
        yield replace(one.passage.chunk(model), continues=follows)


class Conversation:
    """Asks a library. A model with a chat template is told the earlier questions and answers; others take each alone.

    Args:
        spec: how to link and answer; its query and documents are those of each question.
        num_passages: that are linked for a question at most.
    """

    def __init__(self, engine: Engine, library: Library, spec: Spec = Spec(), num_passages: int = NUM_PASSAGES) -> None:
        self._engine, self._library, self._spec, self._most = engine, library, spec, num_passages
        self._messages = list[Message]()
        self._last: Sequence[Found] = ()
        self._asked = ""  # the last question

    def ask(
        self, question: str, *, compare: bool = False, on_text: Callable[[str], None] | None = None,
        on_compile: Callable[[Compiled], None] | None = None,
    ) -> Reply:  # fmt: skip
        """Answer a question from the passages that concern it, then, as far as they fit, those of the last question.

        Args:
            compare: also run full recompute.

        Raises:
            InputError: no passage has a word of it. PicError: see `Engine.answer`.
        """
        spec, found = self.prepare(question)
        answer = self._engine.answer(spec, compare=compare, on_text=on_text, on_compile=on_compile)
        self._messages += [Message("user", question), Message("assistant", answer.text)]
        self._last, self._asked = found, question
        return self.reply(answer, found)

    def reply(self, answer: Answer, found: Sequence[Found]) -> Reply:
        """An answer from passages, with what could not be read."""
        return Reply(answer, tuple(found), self._library.problems)

    def prepare(self, question: str) -> tuple[Spec, list[Found]]:
        """What is linked for a question, and its passages, the best first. Raises InputError as `ask` does."""
        self._forget_oldest()
        found = self._find(question)
        return replace(self._with_query(question), documents=[*_chunks(self._engine.model, in_order(found))]), found

    def _find(self, question: str) -> list[Found]:
        """The passages with words of a question or the last one, then those of that one. Raises InputError."""
        model = self._engine.model
        frame = self._with_query(question).frame(model)
        room = model.max_positions - self._spec.max_new_tokens - _MARGIN
        room -= len(model.encode(frame.head)) + len(model.encode(frame.tail))
        room -= self._most * len(model.encode(self._spec.separator_for(model)))
        found = self._library.find(f"{self._asked} {question}", self._most, room)
        room -= sum(one.passage.num_tokens for one in found)
        for one in self._last:
            if len(found) < self._most and one.passage.num_tokens <= room and one.at not in {own.at for own in found}:
                found.append(one)
                room -= one.passage.num_tokens
        if not found:
            raise InputError("no passage contains any word of the question; use other words")
        return found

    def _with_query(self, question: str) -> Spec:
        if self._messages and self._engine.model.tokenizer.chat_template:
            return replace(self._spec, messages=(*self._messages, Message("user", question)))
        return replace(self._spec, query=question)

    def _forget_oldest(self) -> None:
        """Drop the earliest questions and answers if all are long: so many that the rest stays a prefix for a while."""
        model = self._engine.model
        sizes = [len(model.encode(one.content)) for one in self._messages]
        most = model.max_positions // _HISTORY
        while sizes and sum(sizes) > most:
            del self._messages[:2], sizes[:2]
            most = model.max_positions // _HISTORY // 2
