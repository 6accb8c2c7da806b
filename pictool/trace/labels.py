"""Names of tokens and texts for people: on one line, and without characters that steer a terminal."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.format import Trace

_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # turn the direction of what follows


def visible(text: str) -> str:
    """Return a text as one line: line breaks and control characters become escapes."""
    return "".join(
        char if char == " " or not _is_control(char) else char.encode("unicode_escape").decode() for char in text
    )


def visible_lines(text: str) -> str:
    """Return a text of several lines with all other control characters as escapes."""
    return "".join(char if char == "\n" or not _is_control(char) else visible(char) for char in text)


def short(text: str, width: int) -> str:
    """Return a visible text of at most `width` characters; a longer one ends in two dots."""
    text = visible(text)
    return text if len(text) <= width else text[: width - 2] + ".."


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _BIDI_CONTROLS


def row_labels(trace: Trace, attention: AttentionMap) -> list[str]:
    """Return the text of the token of each row of an attention map."""
    tail = trace.pieces[trace.layout.num_context :]
    return [*tail, *(token.text for token in trace.generated)][: len(attention.positions)]


def position_label(trace: Trace, position: int) -> str:
    """Name a position by its part: `head+0`, `3+12` (token 12 of the third chunk) or `tail+1`."""
    starts = trace.layout.starts
    index = bisect_right(starts, position) - 1
    name = "head" if index == 0 else "tail" if index == len(starts) - 1 else str(index)
    return f"{name}+{position - starts[index]}"
