"""Documents that a request names by a query: those of its tenant's that concern it most, by BM25."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pictool.documents.ranking import TextIndex
from pictool.errors import InputError
from pictool.serve.errors import not_found
from pictool.store.folders import read_folders
from pictool.store.sources import read_sources

if TYPE_CHECKING:
    from pictool.recognition.index import ContentIndex
    from pictool.runtime.model import Model
    from pictool.serve.schema import DocumentQuery
    from pictool.store.store import Store

_KEPT = 8  # tenants whose documents are ranked without reading them again
_MARGIN, _PER_TEXT = 64, 16  # tokens that a template may add to a chat, and to each message


@dataclass(frozen=True)
class RetrievedDocument:
    """A stored document that concerns a query. `source` is what it was called, as far as the store says."""

    key: str
    num_tokens: int
    score: float
    source: str = ""

    def report(self) -> dict[str, Any]:
        named = {"source": self.source} if self.source else {}
        return {"key": self.key[:12], "tokens": self.num_tokens, "score": self.score} | named


class StoredTexts:
    """The texts of a store's documents, ranked. Thread-safe.

    Args:
        index: of the store; it says whose a document is.
        model: whose tokenizer is copied: one thread at a time may use it.
    """

    def __init__(self, store: Store, index: ContentIndex, model: Model, num_positions: int) -> None:
        self._store, self._index, self._num_positions = store, index, num_positions
        self._encoder, self._using = type(model.encoder)(deepcopy(model.tokenizer)), threading.Lock()
        self._separator = model.separator
        self._known: OrderedDict[str, tuple[int, dict[str, int], TextIndex]] = OrderedDict()

    def find(
        self, query: DocumentQuery, salt: str, texts: Iterable[str], max_new_tokens: int
    ) -> tuple[RetrievedDocument, ...]:
        """The documents of a salt for a query, the best first, as far as they fit beside a chat's texts and its answer.

        Raises:
            ApiError: 404, no such folder. InputError: no document has a word of the query.
        """
        with self._using:
            lengths, ranking = self._documents(salt)
            sizes = [len(self._encoder.encode(text)) + _PER_TEXT for text in texts]
            apart = len(self._encoder.encode(self._separator))
        room, keys = self._num_positions - max_new_tokens - _MARGIN - sum(sizes), list(lengths)
        allowed = None if query.folder is None else self._folder(query.folder, salt)
        found = list[tuple[str, float]]()
        for at, score in ranking.scored(query.query):
            if score <= 0 or len(found) == query.k:
                break
            is_there = (allowed is None or keys[at] in allowed) and self._store.path(keys[at]).exists()
            if is_there and lengths[keys[at]] + apart <= room:
                room -= lengths[keys[at]] + apart
                found.append((keys[at], score))
        if not found:
            raise InputError("documents: no stored document that fits contains a word of the query; use other words")
        names = {} if salt else read_sources(self._store.root)
        return tuple(
            RetrievedDocument(key, lengths[key], score, names[key].source if key in names else "")
            for key, score in found
        )

    def _documents(self, salt: str) -> tuple[dict[str, int], TextIndex]:
        """The number of tokens of each document of a salt, by key, and their ranking in this order."""
        version = self._index.version
        known = self._known.pop(salt, None)
        if known is None or known[0] != version:
            found = {key: tokens.tolist() for key, tokens in self._index.documents_of(salt).items()}
            documents = {key: ids for key, ids in found.items() if self._encoder.find_control(ids) is None}
            texts = [str(self._encoder.tokenizer.decode(ids)) for ids in documents.values()]
            known = version, {key: len(tokens) for key, tokens in documents.items()}, TextIndex(texts)
        self._known[salt] = known
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return known[1:]

    def _folder(self, name: str, salt: str) -> set[str]:
        """The keys of a folder that `pic sync` keeps. A tenant with a salt has none. Raises ApiError 404."""
        keys = set() if salt else {row.key for row in read_folders(self._store.root) if row.folder == name}
        if not keys:
            raise not_found(f"folder {name[:80]!r}", "documents", "folder_not_found")
        return keys
