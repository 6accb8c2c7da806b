"""Progress on stderr: bars on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TextIO, cast

from pictool.commands.console.verbosity import note, showing_bar
from pictool.commands.console.words import show_size
from pictool.escapes import GuardedStream

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_NOTE_S = 30.0


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar of `total` steps; without a terminal, a note now and then.

    Yields a function that counts one step and, if it has them, the tokens computed and the bytes written in it.
    """
    steps = _Steps(total)
    with work_bar(what) if total > 1 else nullcontext(lambda done, total, more: None) as show:

        def advance(tokens: int = 0, num_bytes: int = 0) -> None:
            show(steps.done + 1, total, steps.count(tokens, num_bytes))

        yield advance


class _Steps:
    """What is done, and how fast."""

    def __init__(self, total: int) -> None:
        self._total, self._began = total, time.monotonic()
        self.done = self._tokens = self._num_bytes = 0

    def count(self, tokens: int, num_bytes: int = 0) -> str:
        """Count a step; returns how far the work is."""
        self.done, self._tokens = self.done + 1, self._tokens + tokens
        self._num_bytes += num_bytes
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        more = f", {rate:,.0f} tokens/s" if self._tokens else ""
        return f"{self.done:,d} of {self._total:,d}{more}" + (f", {show_size(self._num_bytes)}" if num_bytes else "")


@contextmanager
def answers_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of answers with an estimate of the time left; without a terminal, a line at the start.

    Yields a function that is called with the number of answers that are done, and of all.
    """
    if not sys.stderr.isatty():
        yield _Start(what)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("answers"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with _bars(*columns, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=None)
        is_started = False

        def show(done: int, total: int) -> None:
            nonlocal is_started
            if not is_started:  # answers that the results file has already say nothing about the speed
                bar.reset(task, total=total, completed=done)
            is_started = True
            bar.update(task, completed=done, total=total)

        yield show


@contextmanager
def work_bar(what: str) -> Iterator[Callable[[float, float, str], None]]:
    """Show a bar of work with the time left, and a text after it; without a terminal, a note now and then.

    Yields a function that takes the work done, the total and the text.
    """
    if not sys.stderr.isatty():
        yield _Notes(what)
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[more]}", markup=False),
    )  # fmt: skip
    with _bars(*columns, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=None, more="")
        yield lambda done, total, more: bar.update(task, completed=done, total=total, more=more)


class _Notes:
    """Says how far work is, at most every half minute."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + _NOTE_S

    def __call__(self, done: float, total: float, more: str) -> None:
        if time.monotonic() >= self._next:
            note(f"{self._what}: {done / max(total, 1):.0%}, {more}")
            self._next = time.monotonic() + _NOTE_S


@contextmanager
def _bars(*columns: ProgressColumn, speed_estimate_period: float = 30) -> Iterator[Progress]:
    """Show bars on stderr until the end; what is written to stderr meanwhile is printed above them, guarded too."""
    from rich.progress import Progress

    from pictool.commands.console.terminal import open_screen

    bars = Progress(
        *columns, console=open_screen(on_stderr=True), transient=True, speed_estimate_period=speed_estimate_period,
        redirect_stdout=False,
    )  # fmt: skip
    with bars, showing_bar():
        above = sys.stderr  # rich would read styles and links from what is written to it
        sys.stderr = cast("TextIO", GuardedStream(above))
        try:
            yield bars
        finally:
            sys.stderr = above


class _Start:
    """Says once how much there is to do."""

    def __init__(self, what: str) -> None:
        self._what, self._is_said = what, False

    def __call__(self, done: int, total: int) -> None:
        if not self._is_said and done < total:
            note(f"{self._what}: {total - done} answers" + (f" to go, {done} are done already" if done else ""))
        self._is_said = True
