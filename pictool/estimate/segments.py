"""What prompts are made of: messages, the documents that separators mark in them, and blocks cut by their content.

A cut comes where the last units have a certain hash, and not before `min_units`. So equal text is cut alike wherever it
begins, after the first cut (content-defined chunking; Muthitacharoen et al. 2001).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.estimate.hashing import Hashes, Rolling, Units

KINDS = ("template", "system", "user", "assistant", "tool", "document", "prompt")
BYTES_PER_TOKEN = 4  # where no tokenizer says it: English text has 4 to 5, code 3 to 4
BLOCK_TOKENS = 16  # of a prefix cache, as in vLLM
MAX_TOKENS = 512  # of a block that content cuts
_CUT_TOKENS = 8  # whose hash cuts
_MEAN_TOKENS = 64  # from the least length of a block to its cut, in the mean

# What marks documents in a message. A heading with a number is no part of its document: the number is its place.
_NAMES = "document|doc|passage|source|context|chunk|result|page"
_SEPARATORS = re.compile(
    r"</?(?:document|doc|passage|context|source|file|search_result)\b[^<>\n]{0,300}>"
    r"|\n(?:-{3,}|={3,}|\*{3,}|#{3,})[ \t]*(?=\n)"
    rf"|(?:^|(?<=\n))[\[(#*]{{0,3}}(?:{_NAMES})[ \t]{{0,3}}[\[(#]{{0,2}}\d{{1,4}}[\])]?[*:.)\]]{{0,3}}[ \t]*\n?",
    re.IGNORECASE,
)
_MAY_SEPARATE = re.compile(rf"<|\n[-=*#]{{3}}|(?:{_NAMES})[ \t\[(#]", re.IGNORECASE)


@dataclass(frozen=True)
class HashedBlocks:
    """A text of which a log has only hashes: of blocks, and their lengths. `is_chained`: each hash is of all before."""

    hashes: Hashes  # [blocks]
    lengths: NDArray[np.int64]  # [blocks] in bytes, or `BYTES_PER_TOKEN` for a token
    is_chained: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. `is_marked`: the client said that it is a document, so `pic serve` links it as such."""

    kind: str
    content: str | NDArray[np.int32] | HashedBlocks
    is_marked: bool = False


@dataclass(frozen=True)
class Prompt:
    """One prompt of a log. `time` is in seconds since 1970; `body` is what a server can be sent again."""

    segments: tuple[Segment, ...]
    time: float | None = None
    tenant: str = ""
    outputs: tuple[str, ...] = ()
    body: dict[str, object] | None = None


@dataclass(frozen=True)
class Scale:
    """How units become tokens: `per_token` bytes (an estimate), or 1 token id."""

    per_token: int
    min_tokens: int

    @property
    def window(self) -> int:
        """The shortest repeat in units."""
        return self.min_tokens * self.per_token

    def cut(self, units: Units, seed: int = 0) -> NDArray[np.int64]:
        """The ends of the blocks of a text, in units; the last is its length."""
        reach = _CUT_TOKENS * self.per_token
        if len(units) <= self.window:
            return np.asarray([len(units)] if len(units) else [], dtype=np.int64)
        hashes = Rolling(units, seed).windows(reach)
        is_cut = hashes & np.uint64(_MEAN_TOKENS * self.per_token - 1) == 0
        return bounded_cuts(np.flatnonzero(is_cut) + reach, len(units), self.window, MAX_TOKENS * self.per_token)


def bounded_cuts(candidates: NDArray[np.int64], size: int, least: int, most: int) -> NDArray[np.int64]:
    """The first candidate at least `least` after each cut, at most `most` after it; the last cut is at `size`."""
    ends, at, most = list[int](), 0, max(most, least)
    for place in candidates.tolist():
        while place - at > most:
            at += most
            ends.append(at)
        if place - at >= least and place < size:
            at = place
            ends.append(at)
    while size - at > most:
        at += most
        ends.append(at)
    return np.asarray([*ends, size], dtype=np.int64)


def split_text(kind: str, text: str) -> list[tuple[str, str]]:
    """A message's text at its separators: (kind, text) in order, which are all of it."""
    if kind == "template" or _MAY_SEPARATE.search(text) is None:
        return [(kind, text)]
    parts, at, inner = list[tuple[str, str]](), 0, kind
    for found in _SEPARATORS.finditer(text):
        if found.start() > at:
            parts.append((inner, text[at : found.start()]))
        parts.append((kind, found[0]))
        inner = kind if found[0].startswith("</") else "document"
        at = found.end()
    if at < len(text):
        parts.append((inner, text[at:]))
    return parts
