"""Styles of steps; where there is no colour, steps are told by weight, underline and reverse, or by characters."""

from __future__ import annotations

from functools import cache

from rich.cells import cell_len
from rich.style import Style

from pictool.analysis.levels import RAMP, VIRIDIS, style_of_step

CURSOR = Style(reverse=True, bold=True, underline=True)
MATCH = Style(underline=True, bold=True, italic=True)
DIM = Style(dim=True)
BOLD = Style(bold=True)


def cells(text: str) -> int:
    """Cells that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


@cache
def token_style(step: int, has_color: bool) -> Style:
    """Of a token's step: 0 is plain, 9 the most."""
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
