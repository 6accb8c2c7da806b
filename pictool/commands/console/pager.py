"""A pager, as git has it: on a terminal, long output goes through $PAGER, or less; what fits the screen is printed."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

from pictool.escapes import GuardedStream

_LESS = "FRX"  # ends if all fits, keeps colours, leaves the screen as it is


class _Collected(io.StringIO):
    """Output for a terminal, kept until it is whole."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextmanager
def paged() -> Iterator[None]:
    """Send what is printed through the pager, if standard output is a terminal. PAGER=cat, or an empty one, is none."""
    pager = shlex.split(os.environ.get("PAGER", "less"))
    if not sys.stdout.isatty() or pager in ([], ["cat"]):
        yield
        return
    collected = _Collected()
    try:
        with redirect_stdout(GuardedStream(collected)):
            yield
    finally:
        _show(pager, collected.getvalue())


def _show(pager: list[str], text: str) -> None:
    """Let the pager show a text; print it if there is none. Ctrl-C is the pager's while it runs."""
    environment = {"LESS": _LESS, "LESSCHARSET": "utf-8"} | os.environ
    try:
        process = subprocess.Popen(pager, stdin=subprocess.PIPE, env=environment)
    except OSError:
        sys.stdout.write(text)
        return
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with suppress(BrokenPipeError):  # it was left before the end
            process.communicate(text.encode())
    finally:
        process.wait()
        signal.signal(signal.SIGINT, ours)
