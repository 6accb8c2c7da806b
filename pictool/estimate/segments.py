"""What prompts are made of: messages, the documents that separators mark in them, and blocks cut by their content.

A cut comes where the last units have a certain hash, and not before `min_units`. So equal text is cut alike wherever it
begins, after the first cut (content-defined chunking; Muthitacharoen et al. 2001).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, Rolling

KINDS = ("template", "system", "user", "assistant", "tool", "document", "prompt")
BYTES_PER_TOKEN = 4  # where no tokenizer says it: English text has 4 to 5, code 3 to 4
BLOCK_TOKENS = 16  # of a prefix cache, as in vLLM
MIN_TOKENS = 16  # of a repeat, and of a block that content cuts
MAX_TOKENS = 512  # of a block that content cuts
_CUT_TOKENS = 8  # whose hash cuts
_MEAN_TOKENS = 64  # from the least length of a block to its cut, in the mean

# What marks documents in a message. A heading with a number is no part of its document: the number is its place.
_TAG = r"</?(?i:document|doc|passage|context|source|file|search_result)\b[^<>\n]{0,300}>"
_RULE = r"\n(?:-{3,}|={3,}|\*{3,}|#{3,})[ \t]*(?=\n)"
_HEADING = (
    r"[\[(#*]{0,3}(?i:document|doc|passage|source|context|chunk|result|page)[ \t]{0,3}[\[(#]{0,2}\d{1,4}[\])]?"
    r"[*:.)\]]{0,3}[ \t]*\n?"
)
_SEPARATORS = re.compile(rf"{_TAG}|{_RULE}|\n{_HEADING}")  # each begins with one character, so a search is quick
_FIRST = re.compile(_HEADING)


@dataclass(frozen=True)
class HashedBlocks:
    """A text of which a log has only hashes: of blocks, and their lengths."""

    hashes: Hashes  # [blocks]
    lengths: NDArray[np.int64]  # [blocks] in bytes, or `BYTES_PER_TOKEN` for a token


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. `is_marked`: the client said that it is a document, so `pic serve` links it as such."""

    kind: str
    content: str | NDArray[np.int32] | HashedBlocks
    is_marked: bool = False


@dataclass(frozen=True)
class LoggedPrompt:
    """One prompt of a log. `time` is in seconds since 1970."""

    segments: tuple[Segment, ...]
    time: float | None = None
    tenant: str = ""


@dataclass(frozen=True)
class TokenScale:
    """How units become tokens: `per_token` bytes (an estimate), or 1 token id."""

    per_token: int

    @property
    def window(self) -> int:
        """The shortest repeat in units."""
        return MIN_TOKENS * self.per_token

    def cut(self, text: Rolling, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ends of the blocks of some parts [start, end) of a text, in units, one part after another."""
        reach = _CUT_TOKENS * self.per_token
        candidates = text.places_below((1 << 64) // (_MEAN_TOKENS * self.per_token), reach) + reach
        lows = np.searchsorted(candidates, starts + reach).tolist()
        highs = np.searchsorted(candidates, ends).tolist()
        places, found = candidates.tolist(), list[int]()
        for start, end, low, high in zip(starts.tolist(), ends.tolist(), lows, highs, strict=True):
            found += bounded_cuts(places[low:high], start, end, self.window, MAX_TOKENS * self.per_token)
        return np.asarray(found, dtype=np.int64)


def bounded_cuts(candidates: Sequence[int], start: int, end: int, least: int, most: int) -> list[int]:
    """The first candidate at least `least` after each cut, at most `most` after it; the last cut is the end."""
    cuts, at, most = list[int](), start, max(most, least)
    for place in (*candidates, end):
        while place - at > most:
            at += most
            cuts.append(at)
        if place - at >= least and place < end:
            at = place
            cuts.append(at)
    return [*cuts, end] if end > start else cuts


def split_text(kind: str, text: str) -> list[tuple[str, str]]:
    """A message's text at its separators: (kind, text) in order, which are all of it."""
    if kind == "template" or not text:
        return [(kind, text)]
    parts, at, inner = list[tuple[str, str]](), 0, kind
    first = _FIRST.match(text)
    for found in itertools.chain((first,) if first else (), _SEPARATORS.finditer(text, first.end() if first else 0)):
        if found.start() > at:
            parts.append((inner, text[at : found.start()]))
        parts.append((kind, found[0]))
        inner = kind if found[0].startswith("</") else "document"
        at = found.end()
    return [*parts, (inner, text[at:])] if at < len(text) else parts
