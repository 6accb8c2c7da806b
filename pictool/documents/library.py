"""A library: the passages of files and folders, and those of them that concern a question."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.documents.passages import PASSAGE_TOKENS, Passage, Passages, cut_document, unpacked
from pictool.documents.ranking import TextIndex, joined
from pictool.documents.reading import Document, FileReader, digest
from pictool.errors import InputError
from pictool.runtime.fingerprint import tokenizer_fingerprint
from pictool.runtime.machine import installed
from pictool.store.readings import Readings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pictool.runtime.model import Model
    from pictool.store.store import Store

_BATCH = 500  # files of which at once is asked what is kept


@dataclass(frozen=True)
class Found:
    """A passage that concerns a question, by its BM25 score; `at` is its index in the library."""

    passage: Passage
    score: float
    at: int

    def report(self) -> dict[str, Any]:
        passage = self.passage
        return {"path": passage.path, "place": passage.place, "tokens": passage.num_tokens, "score": self.score}


@dataclass(frozen=True, eq=False)
class Library:
    """What was read (`LibraryReader`): the passages of files, one file after the other.

    Fields:
        load: gives the passages of one of the files with their texts, which may be kept on disk.
        problems: the files that could not be read, each with why. partial: those of which only a part was.
    """

    files: tuple[Passages, ...]
    load: Callable[[Passages], Sequence[Passage]]
    problems: tuple[Document, ...] = ()
    partial: tuple[Document, ...] = ()

    @property
    def passages(self) -> Iterator[Passage]:
        """All of them."""
        return (passage for file in self.files for passage in self.load(file))

    @property
    def num_documents(self) -> int:
        return len(self.files) - len(self.problems)

    @cached_property
    def sizes(self) -> list[int]:
        """The tokens of each passage."""
        return [size for file in self.files for size in file.spans[:, 3].tolist()]

    @cached_property
    def _index(self) -> TextIndex:
        return TextIndex(joined([file.words for file in self.files], [str(file.document.path) for file in self.files]))

    def find(self, question: str, most: int, max_tokens: int) -> list[Found]:
        """The passages with words of a question, the best first: at most `most`, of `max_tokens` in all."""
        firsts = list(accumulate(map(len, self.files), initial=0))
        found, left, loaded = list[Found](), max_tokens, dict[int, Sequence[Passage]]()
        for at, score in self._index.scored(question):
            if score <= 0 or len(found) == most:
                break
            if self.sizes[at] <= left:
                file = bisect_right(firsts, at) - 1
                if file not in loaded:
                    loaded[file] = self.load(self.files[file])
                found.append(Found(loaded[file][at - firsts[file]], score, at))
                left -= self.sizes[at]
        return found


class LibraryReader:
    """Reads files to libraries; one that has not changed since it was last read is not read again. A context manager.

    Args:
        model: whose tokens are counted.
        passage_tokens: of a passage at most.
        command: reads what no reader knows (`FileReader`).
        store: keeps what was read for the next process; nothing for a model with a salt, or where only what is signed
            may be linked.
    """

    def __init__(
        self, model: Model, passage_tokens: int = PASSAGE_TOKENS, command: str | None = None, store: Store | None = None
    ) -> None:
        is_kept = store is not None and not model.salt and not store.requires_signed
        self._readings = Readings(store.root if store is not None and is_kept else None)
        self._model, self._passage_tokens = model, passage_tokens
        self._reader, self._command = FileReader(command, readings=self._readings), command
        self._known: dict[Path, tuple[str, Passages]] = {}
        self._held: dict[Path, tuple[Document, NDArray[np.uint32]]] = {}  # what has no name to be kept under
        self._library = Library((), self._load)

    def __enter__(self) -> LibraryReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def connected(self) -> AbstractContextManager[None]:
        """While many passages are loaded."""
        return self._readings.connected()

    def read(self, files: Sequence[Path], on_read: Callable[[Document], None] = lambda _: None) -> Library:
        """The library of files (`find_files`).

        Args:
            on_read: called for each file, also one that cannot be read.

        Raises:
            InputError: none of them can be read.
        """
        found = list[Passages]()
        with self.connected():
            for start in range(0, len(files), _BATCH):
                for file in self._read(files[start : start + _BATCH]):
                    found.append(file)
                    on_read(file.document)
        self._readings.flush()
        if self._library.files != tuple(found):
            documents = [file.document for file in found]
            problems = tuple(document for document in documents if document.problem)
            partial = tuple(document for document in documents if document.notes)
            self._library = Library(tuple(found), self._load, problems, partial)
        if not any(found):
            problems = self._library.problems
            raise InputError(f"none of {len(problems)} files can be read; the first: {problems[0]}")
        return self._library

    def _read(self, paths: Sequence[Path]) -> Iterator[Passages]:
        names = dict(zip(paths, self._reader.names_of(paths), strict=True))
        new = {path for path, name in names.items() if not name or self._known.get(path, ("",))[0] != name}
        kept = self._readings.get(self._name(names[path]) for path in new)
        for path in paths:
            if path in new:
                file = self._kept(path, names[path], kept)
                self._known[path] = file.document.name or names[path], file
            yield self._known[path][1]

    def _kept(self, path: Path, name: str, kept: Mapping[str, bytes]) -> Passages:
        with suppress(LookupError, ValueError, TypeError, RecursionError):
            return unpacked(path, name, kept[self._name(name)])
        return self._cut(path)[0]

    def _cut(self, path: Path) -> tuple[Passages, Document, NDArray[np.uint32]]:
        """The passages of a file that is read, the document that they were cut from, and the tokens of all."""
        document = self._reader.read(path)
        file, tokens = cut_document(self._model, document, self._passage_tokens)
        if name := document.name:
            self._readings.add(self._name(name), file.packed())
            self._readings.add(self._name(name, "tokens"), tokens.tobytes())
        else:
            self._held[path] = document, tokens
        return file, document, tokens

    def _load(self, file: Passages) -> list[Passage]:
        """A file's passages with their texts. Raises InputError: they are kept no more, and the file was changed."""
        import numpy as np

        path, name = file.document.path, file.document.name
        if not name:
            return file.of(*self._held[path])
        document, key = self._reader.kept(path, name), self._name(name, "tokens")
        if document is not None:
            with suppress(LookupError, ValueError):
                return file.of(document, np.frombuffer(self._readings.get([key])[key], np.uint32))
        _, document, tokens = self._cut(path)
        if document.name != name:
            raise InputError(f"{path}: was changed since it was read; ask again")
        return file.of(document, tokens)

    def _name(self, name: str, what: str = "passages") -> str:
        """The name of what is kept of a document of this name."""
        return digest(what, name, *self._splitter)

    @cached_property
    def _splitter(self) -> list[object]:
        """What passages and their tokens follow from, beside the document."""
        tokenizer, positions = tokenizer_fingerprint(self._model.tokenizer), self._model.max_positions
        versions = map(installed, ("pictool", "tokenizers", "transformers"))
        return [tokenizer, positions, self._passage_tokens, self._command is not None, sys.byteorder, *versions]
