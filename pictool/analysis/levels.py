"""Levels from 0 to 1 as nine steps: the colours and the characters that every picture on a terminal uses."""

from __future__ import annotations

RAMP = ".:-=+*#%@"
# Viridis, from dark to light: even steps to the eye, also for the colour-blind.
VIRIDIS = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
_FIRST_LIGHT = 5  # the steps from here on need dark ink


def step_of(level: float) -> int:
    """The step of a level: 0 to 8."""
    return min(len(VIRIDIS) - 1, max(0, int(level * len(VIRIDIS))))


def style_of(level: float) -> str:
    """Ink and background of a level from 0 to 1."""
    return style_of_step(step_of(level))


def style_of_step(step: int) -> str:
    return f"{'#ffffff' if step < _FIRST_LIGHT else '#000000'} on {VIRIDIS[step]}"
