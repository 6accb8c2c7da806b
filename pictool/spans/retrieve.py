"""Retrieval: fragments of files and folders, and those of them that concern a query most, by BM25."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pictool.compiler.chunking import make_chunks, read_text
from pictool.errors import InputError
from pictool.spans.query import Augment, Fragment, Join, Message, Query, Retrieve

if TYPE_CHECKING:
    from pictool.runtime.model import Model

MAX_FILES = 10_000
_WORDS = r"(?u)\w+"

# Called with a query's text, the fragments and k: the fragments to take, at most k, the best first.
Retriever = Callable[[str, Sequence[Fragment], int], Sequence[Fragment]]


def bm25(query: str, fragments: Sequence[Fragment], k: int) -> list[Fragment]:
    """The k fragments with the highest BM25 scores; of equal ones the earlier."""
    import bm25s
    import numpy as np

    words = bm25s.tokenize([fragment.text or "" for fragment in fragments], token_pattern=_WORDS, stopwords=None,
                           return_ids=False, show_progress=False)  # fmt: skip
    (asked,) = bm25s.tokenize([query], token_pattern=_WORDS, stopwords=None, return_ids=False, show_progress=False)
    if not any(words) or not asked:
        return list(fragments[:k])
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    order = np.argsort(-index.get_scores(asked), kind="stable")
    return [fragments[at] for at in order[:k]]


def find_fragments(
    node: Retrieve | Augment, query: str, base: Path, model: Model, retriever: Retriever = bm25
) -> list[Fragment]:
    """What an R takes: all fragments of its sources in their order, or the `k` that concern the query's text.

    Args:
        base: the folder that its sources are relative to.
        model: whose tokens `chunk_tokens` counts.

    Raises:
        InputError: a source that cannot be read.
    """
    if isinstance(node, Augment):
        return [Fragment(node.name, node.text)]
    fragments = [
        Fragment(chunk.source, chunk.text)
        for path in source_files(node.sources, base)
        for chunk in make_chunks(model, read_text(path), str(path), node.chunk_tokens)
    ]
    if node.k is None or node.k >= len(fragments):
        return fragments
    return list(retriever(query, fragments, node.k))


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
    """The regular files of a folder and all below it, but for hidden ones; links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(root, name) for name in names if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


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
