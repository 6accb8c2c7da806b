"""Retrieval: fragments of files and folders, and those of them that concern a query most, by BM25."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, read_text
from pictool.documents.ranking import TextIndex
from pictool.errors import InputError
from pictool.reading import file_state, is_within
from pictool.spans.query import Augment, Fragment, Join, Message, Query, Retrieve

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_FILES = 10_000

# Called with a query's text, the fragments and k: the fragments to take, at most k, the best first.
Retriever = Callable[[str, Sequence[Fragment], int], Sequence[Fragment]]


def bm25(query: str, fragments: Sequence[Fragment], k: int) -> list[Fragment]:
    """The k fragments with the highest BM25 scores; of equal ones the earlier."""
    ranked = TextIndex([fragment.text or "" for fragment in fragments]).ranked(query)
    return [fragments[at] for at in ranked[:k]]


class NoTextError(InputError):
    """A file that has no text, or none that can be read."""


class FileFragments:
    """Fragments of files. A file that has not changed is not read and cut again."""

    def __init__(self) -> None:
        self._cached = lru_cache(MAX_FILES)(self._read)

    def of(self, path: Path, model: Model, chunk_tokens: int | None) -> list[Fragment]:
        """The fragments of a file, of at most `chunk_tokens` of the model's tokens. Raises InputError."""
        with suppress(OSError):
            return self._cached(path, model, chunk_tokens, file_state(path))
        return self._read(path, model, chunk_tokens)  # says what is wrong

    def _read(self, path: Path, model: Model, chunk_tokens: int | None, *_: object) -> list[Fragment]:
        try:
            text = read_text(path)
        except InputError as error:
            raise NoTextError(str(error)) from error
        chunks = make_chunks(model, text, str(path), chunk_tokens)
        return [Fragment(chunk.source, chunk.text) for chunk in chunks]


def find_fragments(
    node: Retrieve | Augment, query: str, base: Path, model: Model, retriever: Retriever = bm25,
    files: FileFragments | None = None, on_skip: Callable[[InputError], None] = lambda error: None,
) -> list[Fragment]:  # fmt: skip
    """What an R takes: all fragments of its sources in their order, or the `k` that concern the query's text.

    Args:
        base: the folder that its sources are relative to.
        model: whose tokens `chunk_tokens` counts.
        files: remembers the fragments of files for the next R.
        on_skip: called with why a file of a folder is left out: it is no text.

    Raises:
        InputError: a source that cannot be read.
    """
    if isinstance(node, Augment):
        return [Fragment(node.name, node.text)]
    fragments = [
        fragment
        for path in source_files(node.sources, base)
        for fragment in _fragments_of(path, node, base, model, files or FileFragments(), on_skip)
    ]
    if not fragments:
        raise InputError(f"{', '.join(node.sources)}: none of the files is text; name files or folders of text")
    if node.k is None or node.k >= len(fragments):
        return fragments
    return list(retriever(query, fragments, node.k))


def _fragments_of(
    path: Path, node: Retrieve, base: Path, model: Model, files: FileFragments, on_skip: Callable[[InputError], None]
) -> list[Fragment]:  # fmt: skip
    """The fragments of a file. What is no text is skipped in a folder, and refused by name."""
    try:
        return files.of(path, model, node.chunk_tokens)
    except NoTextError as error:
        if path in {base / source for source in node.sources}:
            raise
        on_skip(error)
        return []


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
        raise InputError(f"{', '.join(sources)}: more than {MAX_FILES} files to retrieve from; name fewer")
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """The regular files of a folder and all below it, but for hidden ones; links to folders, or out of it, are not
    followed.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file() and is_within(path, folder))


def query_text(query: Query) -> str:
    """The text of a query's messages, in their order."""
    match query:
        case Message(_, text):
            return text
        case Join(parts):
            return "\n".join(filter(None, map(query_text, parts)))
        case Fragment(_, text):
            return text or ""
    return ""
