"""Names of tokens and positions for people."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.trace.attention import AttentionMap
    from pictool.trace.format import Trace


def short(text: str, width: int) -> str:
    """Return a visible text of at most `width` characters; a longer one ends in two dots."""
    text = visible(text)
    return text if len(text) <= width else text[: width - 2] + ".."


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
