"""Styles of steps; where there is no colour, steps are told by weight, underline and reverse, or by characters."""

from __future__ import annotations

from functools import cache

from rich.cells import cell_len
from rich.style import Style

from pictool.trace.heatmap import RAMP, VIRIDIS, style_of_step

CURSOR = Style(reverse=True, bold=True, underline=True)
MATCH = Style(underline=True, bold=True, italic=True)
DIM = Style(dim=True)
BOLD = Style(bold=True)
# Marks in place of steps: which of several links computed a token. Colour, and what stands for it without.
BY_ALL, HERE, ELSEWHERE = 10, 11, 12
_MARKS = {
    BY_ALL: (Style.parse("#ffffff on #2c728e"), Style(underline=True)),
    HERE: (Style.parse("#000000 on #fde725"), Style(reverse=True)),
    ELSEWHERE: (Style.parse("#ffffff on #440154"), Style(bold=True, italic=True)),
}


def cells(text: str) -> int:
    """Cells that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


@cache
def token_style(step: int, has_color: bool) -> Style:
    """Of a token's step: 0 is plain, 9 the most; or of its mark."""
    if step in _MARKS:
        return _MARKS[step][0 if has_color else 1]
    if step <= 0:
        return Style.null()
    if has_color:
        return Style.parse(style_of_step(min(step, len(VIRIDIS)) - 1))
    return Style(underline=True, bold=step > 3, reverse=step > 6)


@cache
def cell_of(step: int, has_color: bool) -> tuple[str, Style]:
    """Character and style of a map's cell, steps 0 to 8; below 0 is blank."""
    if step < 0:
        return " ", Style.null()
    return (" ", Style.parse(style_of_step(step))) if has_color else (RAMP[step], Style.null())
