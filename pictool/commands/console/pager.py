"""A pager, as git has it: on a terminal, long output goes through $PAGER, or less; what fits the screen is printed."""

from __future__ import annotations

import io
import os
import pydoc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from pictool.escapes import GuardedStream

_LESS = "FRX"  # ends if all fits, keeps colours, leaves the screen as it is


class _Collected(io.StringIO):
    """Output for a terminal, kept until it is whole."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def paged() -> Iterator[None]:
    """Send what is printed through the pager, if standard output is a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    collected = _Collected()
    try:
        with redirect_stdout(GuardedStream(collected)):
            yield
    finally:
        os.environ.setdefault("LESS", _LESS)
        pydoc.pager(collected.getvalue())
