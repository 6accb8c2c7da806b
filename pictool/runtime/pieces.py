"""Pieces: the text of each token of a prompt. Joined, they are what the tokenizer decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # the bytes of an incomplete character decode to it
_MAX_PENDING = 8  # tokens of one character; after so many, the bytes are no text


def pieces_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, ...]:
    """The text that each token adds, special tokens included. A character of several tokens belongs to the last one."""
    pieces: list[str] = []
    before, done = 0, 0  # tokens [before, done) are decoded again with what follows, for the spaces between
    for end in range(1, len(tokens) + 1):
        old, new = (_decode(tokenizer, tokens[before:to]) for to in (done, end))
        is_whole = not new.endswith(_REPLACEMENT) or end - done >= _MAX_PENDING
        pieces.append(new[len(old) :] if is_whole else "")
        if is_whole:
            before, done = done, end
    if done < len(tokens):  # ends within a character
        old, new = (_decode(tokenizer, tokens[before:to]) for to in (done, len(tokens)))
        pieces[-1] = new[len(old) :]
    return tuple(pieces)


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
