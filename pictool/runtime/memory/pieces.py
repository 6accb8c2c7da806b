"""Pieces: the text of each token of a prompt. Joined, they are what the tokenizer decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # the bytes of an incomplete character decode to it
_CHARACTER_BYTES = 4  # at most, and a token has one or more of them
_MAX_PENDING = 8  # tokens that wait for their character; those that cannot be of one are then no text


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds, special tokens included. A character of several tokens belongs to the last one."""
    pieces: list[str] = []
    before, done = 0, 0  # tokens [before, done) are decoded again with what follows, for the spaces between
    for end in range(1, len(tokens) + 1):
        pieces.append("")
        old, new = (_decode(tokenizer, tokens[before:to]) for to in (done, end))
        cut, text = end, new
        if new.endswith(_REPLACEMENT) and end < len(tokens):
            if end - done < _MAX_PENDING:
                continue
            cut = end - _CHARACTER_BYTES + 1  # the tokens after it may begin a character
            text = _decode(tokenizer, tokens[before:cut])
            if not new.startswith(text):  # it would cut a character in two
                continue
        pieces[cut - 1] = text[len(old) :]
        before, done = done, cut
    return tuple(pieces)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
