"""Pseudo-terminals, which not every machine lends: containers and sandboxes may have none."""

from __future__ import annotations

import os

import pytest


def open_terminal() -> tuple[int, int]:
    """A pseudo-terminal, its leader and its follower. Where there is none, the test is skipped; in CI it fails."""
    try:
        return os.openpty()
    except OSError as error:
        if "REQUIRE_TERMINAL" in os.environ:
            raise
        pytest.skip(f"no pseudo-terminal can be opened here ({error})")
