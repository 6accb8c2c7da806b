"""A library: the passages of files and folders, and those of them that concern a question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.documents.passages import PASSAGE_TOKENS, Passage, passages_of
from pictool.documents.ranking import TextIndex
from pictool.documents.reading import Document, FileReader
from pictool.errors import InputError
from pictool.reading import file_state
from pictool.store.readings import Readings

if TYPE_CHECKING:
    from pictool.runtime.model import Model
    from pictool.store.store import Store


@dataclass(frozen=True)
class Found:
    """A passage that concerns a question, by its BM25 score; `at` is its index in the library."""

    passage: Passage
    score: float
    at: int

    def report(self) -> dict[str, Any]:
        passage = self.passage
        return {"path": passage.path, "place": passage.place, "tokens": passage.num_tokens, "score": self.score}


@dataclass(frozen=True)
class Library:
    """What was read (`LibraryReader`). `problems` are the files that could not be, each with why."""

    passages: tuple[Passage, ...]
    num_documents: int
    problems: tuple[Document, ...] = ()

    @cached_property
    def _index(self) -> TextIndex:
        return TextIndex([f"{passage.source}\n{passage.text}" for passage in self.passages])

    def find(self, question: str, most: int, max_tokens: int) -> list[Found]:
        """The passages with words of a question, the best first: at most `most`, of `max_tokens` in all."""
        found, left = list[Found](), max_tokens
        for at, score in self._index.scored(question):
            if score <= 0 or len(found) == most:
                break
            if (passage := self.passages[at]).num_tokens <= left:
                found.append(Found(passage, score, at))
                left -= passage.num_tokens
        return found


class LibraryReader:
    """Reads files to libraries; one that has not changed since it was last read is not read again. A context manager.

    Args:
        model: whose tokens are counted.
        passage_tokens: of a passage at most.
        command: reads what no reader knows (`FileReader`).
        store: keeps what was read for the next process; nothing for a model with a salt.
    """

    def __init__(
        self, model: Model, passage_tokens: int = PASSAGE_TOKENS, command: str | None = None, store: Store | None = None
    ) -> None:
        readings = None if store is None or model.salt else Readings(store.root)
        self._model, self._passage_tokens = model, passage_tokens
        self._reader = FileReader(command, readings=readings)
        self._known: dict[Path, tuple[object, Document, tuple[Passage, ...]]] = {}

    def __enter__(self) -> LibraryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, files: Sequence[Path], on_read: Callable[[Document], None] = lambda _: None) -> Library:
        """The library of files (`find_files`).

        Args:
            on_read: called for each file, also one that cannot be read.

        Raises:
            InputError: none of them can be read.
        """
        passages, problems = list[Passage](), list[Document]()
        for path in files:
            document, of_file = self._read(path)
            passages += of_file
            problems += [document] if document.problem else []
            on_read(document)
        if not passages:
            raise InputError(f"none of {len(problems)} files can be read; the first: {problems[0]}")
        return Library(tuple(passages), len(files) - len(problems), tuple(problems))

    def _read(self, path: Path) -> tuple[Document, tuple[Passage, ...]]:
        try:
            state: object = file_state(path)
        except OSError:  # reading it says why
            state = object()
        if path not in self._known or self._known[path][0] != state:
            document = self._reader.read(path)
            found = tuple(passages_of(self._model, document, self._passage_tokens))
            self._known[path] = state, replace(document, sections=()), found
        return self._known[path][1:]
