"""Text styles of the widgets: steps of the colour ramp and marks, with attributes or characters where colour is off."""

from __future__ import annotations

from functools import cache

from rich.cells import cell_len
from rich.style import Style

from pictool.trace.heatmap import ASCII_RAMP, VIRIDIS, step_style

CURSOR = Style(reverse=True, bold=True, underline=True)
MATCH = Style(underline=True, bold=True, italic=True)
DIM = Style(dim=True)
BOLD = Style(bold=True)
# Marks in place of steps: which of several links computed a token. Each with its style in colour and without.
BY_ALL, HERE, ELSEWHERE = 10, 11, 12
_MARKS = {
    BY_ALL: (Style.parse("#ffffff on #2c728e"), Style(underline=True)),
    HERE: (Style.parse("#000000 on #fde725"), Style(reverse=True)),
    ELSEWHERE: (Style.parse("#ffffff on #440154"), Style(bold=True, italic=True)),
}


def cell_width(text: str) -> int:
    """Return how many cells a text takes."""
    return len(text) if text.isascii() else cell_len(text)


@cache
def token_style(step: int, has_color: bool) -> Style:
    """Return the style of a token's step, from 0 (plain) to 9, or of its mark."""
    if step in _MARKS:
        return _MARKS[step][0 if has_color else 1]
    if step <= 0:
        return Style.null()
    if has_color:
        return Style.parse(step_style(min(step, len(VIRIDIS)) - 1))
    return Style(underline=True, bold=step > 3, reverse=step > 6)


@cache
def map_cell(step: int, has_color: bool) -> tuple[str, Style]:
    """Return the character and style of a heat map's cell, for steps 0 to 8; a step below 0 is blank."""
    if step < 0:
        return " ", Style.null()
    return (" ", Style.parse(step_style(step))) if has_color else (ASCII_RAMP[step], Style.null())
