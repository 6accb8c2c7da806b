"""Sizes and ages as people write them."""

from __future__ import annotations

import pytest

from pictool.commands.console.words import show_age, show_size
from pictool.commands.settings.types import parse_age, parse_size
from pictool.errors import InputError


@pytest.mark.parametrize(
    ("given", "size"), [("0", 0), ("10B", 10), ("1.5k", 1500), ("2KiB", 2048), ("3 GB", 3 * 10**9), ("1Ti", 1 << 40)]
)
def test_sizes(given: str, size: int) -> None:
    assert parse_size("--max-size", given) == size


@pytest.mark.parametrize("given", ["", "x", "-1", "1X", "1e9", "1i", "10 000", "٣"])
def test_what_is_no_size_or_age(given: str) -> None:
    with pytest.raises(InputError, match=r"^--max-size "):
        parse_size("--max-size", given)
    with pytest.raises(InputError, match=r"^--older-than "):
        parse_age("--older-than", given)


def test_ages_and_shown_sizes() -> None:
    assert [parse_age("", age) for age in ("90s", "2m", "1.5h", "1d", "2w")] == [90, 120, 5400, 86400, 1209600]
    assert [show_size(size) for size in (0, 999, 1500, 10**10, 10**13)] == [
        "0 bytes",
        "999 bytes",
        "1.5 KB",
        "10.0 GB",
        "10.0 TB",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "now"), (0.2, "now"), (59, "59s"), (61, "1m"), (7300, "2h"), (9e5, "10d"), (8e7, "3y")]
)
def test_ages_for_people(seconds: float, shown: str) -> None:
    assert show_age(seconds) == shown
