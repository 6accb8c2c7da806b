"""Alignment of two tokenizers: which tokens of one cover the text of which tokens of the other (SpecCache §2.4).

Tokens are aligned by the characters that they share. A fast tokenizer's offsets are nearly the characters of a token,
except that

- byte-level post-processors may trim spaces off a token (`trim_offsets`), and a token of only spaces to nothing;
- BERT's normalizer and pre-tokenizer drop whitespace, controls and accents, SentencePiece's collapse runs of spaces;
- where NFC composes characters, the offsets name the first one only;
- a space that the tokenizer inserts may have no character.

So characters that no token covers are assigned to a token: trimmed spaces to the one whose piece has them, marks and
controls to the one before, everything else to the one after (the last token takes the rest). A token that the tokenizer
inserted without a character shares the character before it, or the first of its part. The library itself does the same
for an inserted "▁", and assigns a character that is split into bytes to all of its pieces. Special tokens have no text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pictool.core import PromptText, TokenIds
from pictool.errors import InputError
from pictool.runtime.encoder import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spans = NDArray[np.int64]
Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]


@dataclass(frozen=True)
class TokenizedParts:
    """Token ids of the parts of a prompt, and the characters of each token in their joined text.

    Attributes:
        tokens: [m].
        spans: [m, 2], half-open characters of the joined text; empty (start == end) for tokens without text. Spans
            overlap where tokens share a character.
        starts: first token of every part.
    """

    tokens: TokenIds
    spans: Spans
    starts: tuple[int, ...]


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | PromptText]) -> TokenizedParts:
    """Tokens and spans of parts, each tokenized on its own, without special tokens (docs/design.md §2 rule 1).

    Every token has text but the special ones. The unknown token has text, unless the text names it; a special token
    that the text names has none. Whitespace between two special tokens, or alone in a part, may belong to no token.

    Raises:
        InputError: the tokenizer gives no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"{_name_of(tokenizer)}: provides no character offsets, so its tokens cannot be aligned with another "
            "tokenizer's; use a model with a fast tokenizer (tokenizer.json)"
        )
    special = _special_ids(tokenizer)
    encoder = Encoder(tokenizer)
    parts = [_tokenize_part(encoder, text, special) for text in texts]
    ends = np.cumsum([len(text) for text in texts])
    starts = np.cumsum([0, *(len(tokens) for tokens, _ in parts)])[:-1]
    spans = [part + end - len(text) for (_, part), end, text in zip(parts, ends, texts, strict=True)]
    return TokenizedParts(
        np.concatenate([np.zeros(0, np.int32), *(tokens for tokens, _ in parts)]),
        np.concatenate([np.zeros((0, 2), np.int64), *spans]),
        tuple(starts.tolist()),
    )


def map_selection(selected: Mask, source: TokenizedParts, target: TokenizedParts) -> Mask:
    """The target's tokens [n] that share a character with a selected source token [m] (SpecCache eq. 7)."""
    assert len(selected) == len(source.tokens)
    spans = source.spans[selected]
    steps = np.zeros(_num_characters(source, target) + 1, np.int64)
    np.add.at(steps, spans[:, 0], 1)
    np.subtract.at(steps, spans[:, 1], 1)
    is_painted = np.cumsum(steps)[:-1] > 0
    before = np.concatenate([[0], np.cumsum(is_painted)])  # [characters + 1], painted characters before each
    result: Mask = before[target.spans[:, 1]] > before[target.spans[:, 0]]
    return result


def map_scores(scores: Scores, source: TokenizedParts, target: TokenizedParts) -> Scores:
    """For every target token [n] the highest score of the source tokens [m] that share a character with it, else 0."""
    assert len(scores) == len(source.tokens)
    widths = source.spans[:, 1] - source.spans[:, 0]
    first = np.repeat(source.spans[:, 0] - (np.cumsum(widths) - widths), widths)
    highest = np.full(_num_characters(source, target) + 1, -np.inf, np.float32)  # of every character; the last is none
    np.maximum.at(highest, first + np.arange(len(first)), np.repeat(scores, widths))
    result = np.maximum.reduceat(highest, target.spans.ravel())[::2]  # the odd ones are from a token's end to the next
    is_aligned = map_selection(np.ones(len(scores), bool), source, target)
    return np.where(is_aligned, result, np.float32(0))


def _num_characters(*sides: TokenizedParts) -> int:
    return max(int(side.spans.max(initial=0)) for side in sides)


def _name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    added = tokenizer.added_tokens_decoder.items()
    return np.asarray([token for token, entry in added if entry.special], np.int64)


def _tokenize_part(
    encoder: Encoder, text: str | PromptText, special: NDArray[np.int64]
) -> tuple[TokenIds, Spans]:  # fmt: skip
    """Tokens [m] and spans [m, 2] of one text."""
    ids, offsets = encoder.encode_with_offsets(text)
    text, tokens = str(text), np.asarray(ids, np.int32)
    pieces = encoder.tokenizer.convert_ids_to_tokens(ids)
    spans = np.asarray(offsets, np.int64).reshape(-1, 2)
    has_text = ~np.isin(tokens, special)
    for i in np.flatnonzero(~has_text).tolist():
        has_text[i] = _is_unknown(pieces[i], text[slice(*spans[i])])
    _place_inserted(spans, has_text)
    _close_gaps(text, pieces, spans, has_text)
    spans[~has_text, 1] = spans[~has_text, 0]
    return tokens, spans


def _is_unknown(piece: str, covered: str) -> bool:
    """Whether a special token replaces text that the tokenizer does not know, rather than its own name."""
    return covered.strip().casefold() != piece.strip().casefold()


def _place_inserted(spans: Spans, has_text: Mask) -> None:
    """Let tokens with no character, and none free before them, share that before (or the first), in place."""
    covered = np.concatenate([[0], spans[:, 1]])[:-1]
    inserted = has_text & (spans[:, 0] >= spans[:, 1]) & (covered >= spans[:, 0])
    spans[inserted, 0] = np.maximum(spans[inserted, 0] - 1, 0)
    spans[inserted, 1] = spans[inserted, 0] + 1


def _close_gaps(text: str, pieces: Sequence[str], spans: Spans, has_text: Mask) -> None:
    """Assign the characters that no token covers to the tokens beside them, in place."""
    covered = np.concatenate([[0], spans[:, 1]])  # [m + 1], end of the tokens before: ends never decrease
    begins = np.append(spans[:, 0], len(text))  # [m + 1], with the end of the text
    is_open = np.concatenate([[False], has_text, [False]])  # [m + 2], whether tokens i - 1 and i may take characters
    for i in np.flatnonzero(covered < begins).tolist():
        start, end = int(covered[i]), int(begins[i])
        cut = start
        if is_open[i]:
            own = _trimmed_at_start(text, pieces[i], spans[i]) if is_open[i + 1] else 0
            cut = start + _share_before(text[start:end], pieces[i - 1], own) if is_open[i + 1] else end
            first = _first_piece(spans, i - 1) if _is_dropped_mark(text[start]) else i - 1
            spans[first:i, 1] = cut
        if is_open[i + 1]:
            spans[i, 0] = cut


def _first_piece(spans: Spans, last: int) -> int:
    """The first of the tokens that end where `last` does: the pieces of one character."""
    first = last
    while first and spans[first - 1, 1] == spans[last, 1]:
        first -= 1
    return first


def _trimmed_at_start(text: str, piece: str, span: Spans) -> int:
    """Spaces that the token's piece begins with and its span does not; an empty span lacks at least one character."""
    start, end = span
    if start == end:
        return max(1, _count_spaces(piece, str.lstrip))
    return 0 if text[start].isspace() else _count_spaces(piece, str.lstrip)


def _share_before(gap: str, before: str, own: int) -> int:
    """How many characters of the gap belong to the token before it, if the last `own` are those of the token after."""
    most = max(0, len(gap) - own)
    share = min(_count_spaces(before, str.rstrip), most)
    while share < most and _is_dropped_mark(gap[share]):
        share += 1
    return share


def _count_spaces(piece: str, strip: Callable[[str], str]) -> int:
    """Spaces at one end of a byte-level piece, which writes them as Ġ; added tokens write them as they are."""
    return len(piece) - len(strip(piece.replace("Ġ", " ")))


def _is_dropped_mark(character: str) -> bool:
    """Accents, joiners, controls: what normalizers drop after a character that they keep."""
    return unicodedata.category(character)[0] in "MC" and not character.isspace()
