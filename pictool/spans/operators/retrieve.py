"""R and F: fragments of files and folders, those of them that concern a query most, and a file's text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.compiler.chunking import make_chunks, read_text
from pictool.documents.ranking import TextIndex
from pictool.errors import InputError
from pictool.reading import file_state, is_within
from pictool.spans.operators.calls import Generate
from pictool.spans.operators.flow import Monad
from pictool.spans.operators.joins import Plus, Seq
from pictool.spans.operators.messages import FileText, as_query
from pictool.spans.query import DEFAULT_MODEL, Options, Over, Query, Rule, text_of
from pictool.spans.query import Path as NodePath
from pictool.spans.reader import QueryReader
from pictool.spans.running import QueryTask, Retriever, RunningQuery

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_FILES = 10_000


@dataclass(frozen=True)
class Fragment(Query):
    """F: `{"file": "path"}`, a fragment of a corpus as a user's message. `text` is None for a file not read yet."""

    kind: ClassVar[str] = "file"
    symbol: ClassVar[str] = "F"
    source: str
    text: str | None = None

    @classmethod
    def of(cls, path: str | PathLike[str]) -> Fragment:
        """The text of a file."""
        return cls(fspath(path))

    @classmethod
    def of_text(cls, text: str, source: str = "text") -> Fragment:
        """A fragment whose text is at hand."""
        return cls(source, text)

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: NodePath, depth: int) -> Fragment:
        return cls(reader.text(value, path))

    def to_data(self) -> dict[str, Any]:
        return {"file": self.source} if self.text is None else {"user": self.text}

    @property
    def texts(self) -> tuple[str, ...]:
        return () if self.text is None else (self.text,)

    def run(self, run: RunningQuery, path: NodePath) -> Query:
        text = read_text(run.options.base / self.source) if self.text is None else self.text
        return FileText("user", text, self.source)


@dataclass(frozen=True)
class _Retrieval(Over):
    """What R and spnl's R have in common."""

    symbol: ClassVar[str] = "R"

    def desugar(self, options: Options) -> Query | None:
        """R → + of its fragments, after each has been prepared by a G¹ of its own (Span queries fig. 7b)."""
        found = None if options.retrieve is None else options.retrieve(self)
        if found is None:
            return None
        fragments = Plus(tuple(found))
        if options.call is None or not fragments.parts:
            return fragments
        call = replace(options.call, max_tokens=1, temperature=0.0)
        prepared = Plus(tuple(Generate(fragment, call) for fragment in fragments.parts))
        return Seq((Monad(prepared), fragments))

    rules = (Rule("desugar R", desugar),)

    def run(self, run: RunningQuery, path: NodePath) -> QueryTask:
        (found,) = yield from run.children(self, path)
        return Plus(tuple(fragment.run(run, path) for fragment in run.retrieve(self, text_of(found))))


@dataclass(frozen=True)
class Augment(_Retrieval):
    """spnl's retrieval: `{"augment": {"embedding_model": "…", "body": …, "doc": ["name", {"Text": "…"}]}}`.

    The document, given by its name and text, is one fragment.
    """

    kind: ClassVar[str] = "augment"
    key: ClassVar[str | None] = "body"
    embedding_model: str
    name: str
    text: str

    @classmethod
    def of(cls, query: Query | str, name: str, text: str, embedding_model: str = DEFAULT_MODEL) -> Augment:
        """Fragments of one document that concern a query."""
        return cls(as_query(query), embedding_model, name, text)

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: NodePath, depth: int) -> Augment:
        value = reader.fields(value, path, ("embedding_model", "body", "doc"))
        doc, at = value["doc"], (*path, "doc")
        if not isinstance(doc, list) or len(doc) != 2:
            raise reader.fail(at, 'must be a pair: a name and {"Text": "…"}')
        if not isinstance(doc[1], dict) or list(doc[1]) != ["Text"]:
            raise reader.fail((*at, 1), 'must be {"Text": "…"}; convert binary documents first')
        body = reader.query(value["body"], (*path, "body"), depth)
        model = reader.text(value["embedding_model"], (*path, "embedding_model"))
        return cls(body, model, reader.text(doc[0], (*at, 0)), reader.text(doc[1]["Text"], (*at, 1, "Text")))

    def to_data(self) -> dict[str, Any]:
        doc = [self.name, {"Text": self.text}]
        return {"augment": {"embedding_model": self.embedding_model, "body": self.input.to_data(), "doc": doc}}

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)


@dataclass(frozen=True)
class Retrieve(_Retrieval):
    """R: `{"retrieve": {"from": …, "query": …}}`, ours: the `k` fragments of `sources` that concern `input` most.

    Fields:
        sources: files, or folders of text files; relative to the query's file.
        k: fragments at most; None: all, in the order of the files.
        chunk_tokens: files are cut into fragments of at most so many tokens; None: one fragment a file.
    """

    kind: ClassVar[str] = "retrieve"
    key: ClassVar[str | None] = "query"
    sources: tuple[str, ...]
    k: int | None = None
    chunk_tokens: int | None = None

    @classmethod
    def of(
        cls, query: Query | str, *sources: str | PathLike[str], k: int | None = None, chunk_tokens: int | None = None
    ) -> Retrieve:
        """The `k` fragments of files and folders that concern a query most."""
        return cls(as_query(query), tuple(fspath(source) for source in sources), k, chunk_tokens)

    @classmethod
    def read(cls, reader: QueryReader, value: Any, path: NodePath, depth: int) -> Retrieve:
        value = reader.fields(value, path, ("from", "query"), ("k", "chunk_tokens"))
        sources = value["from"] if isinstance(value["from"], list) else [value["from"]]
        if not sources:
            raise reader.fail((*path, "from"), "is empty; specify files or a folder")
        names = reader.texts(sources, (*path, "from"))
        k, chunk_tokens = (
            None if value.get(key) is None else reader.whole(value[key], (*path, key), 1)
            for key in ("k", "chunk_tokens")
        )
        return cls(reader.query(value["query"], (*path, "query"), depth), names, k, chunk_tokens)

    def to_data(self) -> dict[str, Any]:
        more = {"k": self.k, "chunk_tokens": self.chunk_tokens}
        stated = {key: value for key, value in more.items() if value is not None}
        return {"retrieve": {"from": list(self.sources), "query": self.input.to_data(), **stated}}


def bm25(query: str, fragments: Sequence[Fragment], k: int) -> list[Fragment]:
    """The k fragments with the highest BM25 scores; of equal ones the earlier."""
    ranked = TextIndex([fragment.text or "" for fragment in fragments]).ranked(query)
    return [fragments[at] for at in ranked[:k]]


class NoTextError(InputError):
    """A file that has no text, or none that can be read."""


class Retrieval:
    """Finds the fragments of an R. A file that has not changed is not read and cut again.

    Args:
        base: the folder that sources are relative to.
        model: gives the one whose tokens `chunk_tokens` counts.
        retriever: chooses from all fragments; None: `bm25`.
        on_skip: called with why a file of a folder is left out: it is no text.
    """

    def __init__(
        self, base: Path, model: Callable[[], Model], retriever: Retriever | None = None,
        on_skip: Callable[[InputError], None] = lambda error: None,
    ) -> None:  # fmt: skip
        self._base, self._model, self._retriever, self._on_skip = base, model, retriever or bm25, on_skip
        self._cached = lru_cache(MAX_FILES)(self._read)

    def find(self, node: Retrieve | Augment, query: str) -> Sequence[Fragment]:
        """All fragments of its sources in their order, or the `k` that concern the query's text.

        Raises:
            InputError: a source that cannot be read.
        """
        if isinstance(node, Augment):
            return [Fragment(node.name, node.text)]
        fragments = [
            fragment for path in source_files(node.sources, self._base) for fragment in self._fragments(path, node)
        ]
        if not fragments:
            raise InputError(
                f"{', '.join(node.sources)}: none of the files is text; specify text files, or folders of them"
            )
        if node.k is None or node.k >= len(fragments):
            return fragments
        return list(self._retriever(query, fragments, node.k))

    def _fragments(self, path: Path, node: Retrieve) -> list[Fragment]:
        """The fragments of a file. What is no text is skipped in a folder, and refused by name."""
        try:
            with suppress(OSError):
                return self._cached(path, node.chunk_tokens, file_state(path))
            return self._read(path, node.chunk_tokens)  # says what is wrong
        except NoTextError as error:
            if path in {self._base / source for source in node.sources}:
                raise
            self._on_skip(error)
            return []

    def _read(self, path: Path, chunk_tokens: int | None, *_: object) -> list[Fragment]:
        try:
            text = read_text(path)
        except InputError as error:
            raise NoTextError(str(error)) from error
        chunks = make_chunks(self._model(), text, str(path), chunk_tokens)
        return [Fragment(chunk.source, chunk.text) for chunk in chunks]


def source_files(sources: Sequence[str], base: Path) -> list[Path]:
    """The files that sources name; of a folder all that are not hidden, in the order of their paths.

    Raises:
        InputError: a source that does not exist, an empty folder, or too many files.
    """
    files: list[Path] = []
    for source in sources:
        path = base / source
        if not path.is_dir():
            files.append(path)
            continue
        found = list(islice(_files_below(path), MAX_FILES + 1))
        if not found:
            raise InputError(f"{path}: the folder has no files to retrieve from")
        files.extend(sorted(found))
    if len(files) > MAX_FILES:
        raise InputError(f"{', '.join(sources)}: more than {MAX_FILES} files to retrieve from; specify fewer")
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """The regular files of a folder and all below it, but for hidden ones; links to folders, or out of it, are not
    followed.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and is_within(path, folder))
