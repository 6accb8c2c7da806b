"""Which texts concern a query most, by BM25 (Lucene's form of it).

Of each text it is enough to know which words it has how often, as numbers that can be kept: a query compares its own
words with all of them, so no index has to be made again when a text is added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_WORD, _JOINED = re.compile(r"\w+"), re.compile(r"\w+(?:[-.:/+]\w+)+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+|[A-Z]")
_K1, _B = 1.2, 0.5  # chosen on real questions (benchmarks/retrieval.py)
# Questions are made of these, and answers hardly have them: BM25 takes them for rare words.
OF_QUESTIONS = frozenset(
    "a am an and are as at be been but by can could did do does for from had has have how i if in into is it its may "
    "me might must my no not of on or our should so such than that the their them then there these they this those to "
    "us was we were what when where which who whom whose why will with would you your".split()
)


@dataclass(frozen=True, eq=False)
class WordCounts:
    """How often texts have which words: an entry of the three arrays is a word of a text.

    Fields:
        lengths: of each text, in words. words: by 64 bits of a hash. texts: their indices. counts: how often.
    """

    lengths: NDArray[np.uint32]
    words: NDArray[np.uint64]
    texts: NDArray[np.uint32]
    counts: NDArray[np.uint32]


def count_words(texts: Sequence[str]) -> WordCounts:
    """Entries are in the order of their words, so that they can be stored in little space."""
    import numpy as np

    counted = [Counter(words(text)) for text in texts]
    hashed = np.array([_hashed(word) for counter in counted for word in counter], np.uint64)
    order = np.argsort(hashed, kind="stable")
    indices = np.repeat(np.arange(len(texts), dtype=np.uint32), list(map(len, counted)))
    counts = np.array([count for counter in counted for count in counter.values()], np.uint32)
    lengths = np.array([counter.total() for counter in counted], np.uint32)
    return WordCounts(lengths, hashed[order], indices[order], counts[order])


def joined(groups: Sequence[WordCounts], headings: Sequence[str]) -> WordCounts:
    """The texts of groups, one group after the other; each text also has the words of its group's heading."""
    import numpy as np

    sizes = np.array([len(group.lengths) for group in groups], int)
    firsts, of_groups = sizes.cumsum() - sizes, count_words(headings)
    times = sizes[of_groups.texts]  # of each word of a heading: the texts that have it
    within = np.arange(times.sum()) - np.repeat(times.cumsum() - times, times)
    moved = [group.texts + np.uint32(first) for group, first in zip(groups, firsts, strict=True)]
    return WordCounts(
        np.concatenate([group.lengths for group in groups]) + np.repeat(of_groups.lengths, sizes),
        np.concatenate([*(group.words for group in groups), np.repeat(of_groups.words, times)]),
        np.concatenate([*moved, (np.repeat(firsts[of_groups.texts], times) + within).astype(np.uint32)]),
        np.concatenate([*(group.counts for group in groups), np.repeat(of_groups.counts, times)]),
    )


class TextIndex:
    """Texts that are ranked by BM25."""

    def __init__(self, texts: Sequence[str] | WordCounts) -> None:
        self._counts = texts if isinstance(texts, WordCounts) else count_words(texts)

    def ranked(self, query: str) -> Sequence[int]:
        """The indices of all texts, the best first; of equal ones the earlier."""
        return [at for at, _ in self.scored(query)]

    def scored(self, query: str) -> list[tuple[int, float]]:
        """Index and score of all texts, the best first; of equal ones the earlier. A text without a word of the query
        has 0.
        """
        import numpy as np

        texts, lengths = len(self._counts.lengths), self._counts.lengths.astype(float)
        saturation = _K1 * (1 - _B + _B * lengths / max(lengths.sum() / max(texts, 1), 1))
        scores = np.zeros(texts)
        asked = words(query)
        for word, times in Counter([word for word in asked if word not in OF_QUESTIONS] or asked).items():
            here = np.flatnonzero(self._counts.words == np.uint64(_hashed(word)))
            found = np.bincount(self._counts.texts[here], self._counts.counts[here], texts)
            having = np.count_nonzero(found)
            rarity = np.log1p((texts - having + 0.5) / (having + 0.5))
            scores += times * rarity * found / (found + saturation)
        return [(int(at), float(scores[at])) for at in np.argsort(-scores, kind="stable")]


def words(text: str) -> list[str]:
    """The words of a text in lower case, without the endings of plurals.

    Names count whole and in parts: `png_set_gamma` is also `png`, `set` and `gamma`, `readHeader` `read` and `header`,
    `libfoo-dev` `libfoo` and `dev`.
    """
    found = list[str]()
    for name in _WORD.findall(text):
        parts = _PART.findall(name)
        found += [*parts, name] if len(parts) > 1 else [name]
    return [_singular(word.lower()) for word in found + _JOINED.findall(text)]


def _singular(word: str) -> str:
    """Harman's S-stemmer."""
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("us", "ss")) else word


@lru_cache(1 << 16)
def _hashed(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(errors="replace"), digest_size=8).digest(), "little")
