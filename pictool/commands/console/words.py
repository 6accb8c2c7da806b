"""Numbers and names in sentences."""

from __future__ import annotations


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number of things: `1 chunk`, `2 chunks`."""
    return f"{number:,d} {noun if number == 1 else plural or noun + 's'}"
