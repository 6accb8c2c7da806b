"""How tokens and texts are named where people read them: on one line, and nothing in them steers a terminal."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.format import Trace

_TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # turn the direction of what follows


def visible(text: str) -> str:
    """Text as one line: white space and controls written as escapes, so that nothing steers the terminal."""
    return "".join(one if one == " " or not _is_control(one) else one.encode("unicode_escape").decode() for one in text)


def harmless(text: str) -> str:
    """Text of several lines, without controls."""
    return "".join(one if one == "\n" or not _is_control(one) else visible(one) for one in text)


def short(text: str, width: int) -> str:
    """A visible text of at most `width` characters; what is longer ends in two dots."""
    text = visible(text)
    return text if len(text) <= width else text[: width - 2] + ".."


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in _TURNS


def row_labels(trace: Trace, seen: AttentionMap) -> list[str]:
    """The text of the token that stands in each row of a map."""
    prompt = trace.pieces[trace.layout.num_context :]
    return [*prompt, *(one.text for one in trace.generated)][: len(seen.positions)]


def part_at(trace: Trace, position: int) -> str:
    """Where a position is: `head+0`, `3+12` (token 12 of the third chunk) or `tail+1`."""
    starts = trace.layout.starts
    index = bisect_right(starts, position) - 1
    name = "head" if index == 0 else "tail" if index == len(starts) - 1 else str(index)
    return f"{name}+{position - starts[index]}"
