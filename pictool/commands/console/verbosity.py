"""How much a command says on stderr: `pic -q` only errors, `pic -v` also what it reads and loads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from pictool.escapes import unguarded, visible


class Verbosity(IntEnum):
    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


_level = Verbosity.NORMAL
_PATIENCE_S = 0.5
_num_bars = 0


def set_verbosity(level: Verbosity) -> None:
    global _level
    _level = level


def is_verbose() -> bool:
    return _level is Verbosity.VERBOSE


def note(text: str) -> None:
    """Print a line for the user on stderr."""
    if _level >= Verbosity.NORMAL:
        print(f"pic: {visible(text)}", file=sys.stderr)


def detail(text: str) -> None:
    """The same, with --verbose only."""
    if is_verbose():
        note(text)


@contextmanager
def showing_bar() -> Iterator[None]:
    """While a progress bar is shown, `waiting` shows nothing: the bar redraws the lines of the terminal."""
    global _num_bars
    _num_bars += 1
    try:
        yield
    finally:
        _num_bars -= 1


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what is waited for, once it takes longer than half a second; the line goes when it is done."""
    screen = unguarded(sys.stderr)
    if _level is Verbosity.QUIET or _num_bars or not screen.isatty():
        yield
        return
    shown = threading.Event()

    def show() -> None:
        shown.set()
        print(f"\r\x1b[Kpic: {visible(what)} …", end="", file=screen, flush=True)

    timer = threading.Timer(_PATIENCE_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            print("\r\x1b[K", end="", file=screen, flush=True)
