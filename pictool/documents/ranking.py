"""Which texts concern a query most, by BM25."""

from __future__ import annotations

import logging
from collections.abc import Sequence

_WORDS = r"(?u)\w+"


class TextIndex:
    """Texts that are ranked by BM25."""

    def __init__(self, texts: Sequence[str]) -> None:
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets its own level to DEBUG
        words = _words(texts)
        self._order: Sequence[int] = range(len(texts))
        self._index = None
        if any(words):
            self._index = bm25s.BM25()
            self._index.index(words, show_progress=False)

    def ranked(self, query: str) -> Sequence[int]:
        """The indices of all texts, the best first; of equal ones the earlier."""
        return [at for at, _ in self.scored(query)]

    def scored(self, query: str) -> list[tuple[int, float]]:
        """Index and score of all texts, the best first; of equal ones the earlier. A text without a word of the query
        has 0.
        """
        import numpy as np

        (words,) = _words([query])
        if self._index is None or not words:
            return [(at, 0.0) for at in self._order]
        scores = self._index.get_scores(words)
        return [(int(at), float(scores[at])) for at in np.argsort(-scores, kind="stable")]


def _words(texts: Sequence[str]) -> list[list[str]]:
    import bm25s

    words: list[list[str]] = bm25s.tokenize(
        list(texts), token_pattern=_WORDS, stopwords=None, return_ids=False, show_progress=False
    )
    return words
