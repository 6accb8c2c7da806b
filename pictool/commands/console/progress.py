"""Progress on stderr: bars on a terminal, without one a note now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, cast

from pictool.commands.console.verbosity import note, showing_bar
from pictool.commands.console.words import show_size
from pictool.escapes import GuardedStream

if TYPE_CHECKING:
    from pictool.compiler.compile import Compiled

_NOTE_S = 30.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show how many of `total` steps are done; nothing of a single one.

    Yields a function that counts one step and, if it has them, the tokens computed and the bytes written in it.
    """
    if total <= 1:
        yield lambda tokens=0, num_bytes=0: None
        return
    began, done, all_tokens, all_bytes = time.monotonic(), 0, 0, 0
    with work_bar(what) as show:

        def advance(tokens: int = 0, num_bytes: int = 0) -> None:
            nonlocal done, all_tokens, all_bytes
            done, all_tokens, all_bytes = done + 1, all_tokens + tokens, all_bytes + num_bytes
            rate = all_tokens / max(time.monotonic() - began, 1e-9)
            more = f", {rate:,.0f} tokens/s" if all_tokens else ""
            more += f", {show_size(all_bytes)}" if num_bytes else ""
            show(done, total, f"{done:,d} of {total:,d}{more}")

        yield advance


def new_work(done: Compiled) -> tuple[int, int]:
    """Tokens that were computed, and bytes that were written."""
    return (len(done.chunk), done.path.stat().st_size) if done.is_new and done.path.exists() else (0, 0)


@contextmanager
def answers_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many answers are done, and say at first how many are to come.

    Yields a function that takes the number of answers that are done, and of all.
    """
    is_begun = False
    with work_bar(what) as show:

        def show_answers(done: int, total: int) -> None:
            nonlocal is_begun
            if not is_begun and done < total:
                note(f"{what}: {total - done} answers" + (f" to go, {done} are done already" if done else ""))
            is_begun = True
            show(done, total, f"{done}/{total} answers")

        yield show_answers


@contextmanager
def work_bar(what: str) -> Iterator[Callable[[float, float, str], None]]:
    """Show a bar of work with the time left, and a text after it; without a terminal, a note now and then.

    Yields a function that takes the work done, the total and the text. What is done at its first call says nothing
    about the speed.
    """
    if not sys.stderr.isatty():
        yield _Notes(what)
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from pictool.commands.console.terminal import open_screen

    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[more]}", markup=False),
        console=open_screen(on_stderr=True), transient=True, speed_estimate_period=300, redirect_stdout=False,
    )  # fmt: skip
    task = bar.add_task(what, total=None, more="")

    def show(done: float, total: float, more: str) -> None:
        if bar.tasks[0].total is None:
            bar.reset(task, total=total, completed=int(done))
        bar.update(task, completed=done, total=total, more=more)

    with bar, showing_bar():
        above = sys.stderr  # rich would read styles and links from what is written to it
        sys.stderr = cast("TextIO", GuardedStream(above))
        try:
            yield show
        finally:
            sys.stderr = above


class _Notes:
    """Says how far work is, at most every half minute."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + _NOTE_S

    def __call__(self, done: float, total: float, more: str) -> None:
        if time.monotonic() >= self._next:
            note(f"{self._what}: {done / max(total, 1):.0%}, {more}")
            self._next = time.monotonic() + _NOTE_S
