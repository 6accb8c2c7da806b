"""Progress on stderr: bars on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pictool.commands.outputs import note


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps. Yields a function that counts one step."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def answers_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of answers with an estimate of the time left; without a terminal, a line at the start.

    Yields a function that is called with the number of answers that are done, and of all.
    """
    if not sys.stderr.isatty():
        yield _Start(what)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("answers"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=None)
        is_started = False

        def show(done: int, total: int) -> None:
            nonlocal is_started
            if not is_started:  # answers that the results file has already say nothing about the speed
                bar.reset(task, total=total, completed=done)
            is_started = True
            bar.update(task, completed=done, total=total)

        yield show


class _Start:
    """Says once how much there is to do."""

    def __init__(self, what: str) -> None:
        self._what, self._is_said = what, False

    def __call__(self, done: int, total: int) -> None:
        if not self._is_said and done < total:
            note(f"{self._what}: {total - done} answers" + (f" to go, {done} are done already" if done else ""))
        self._is_said = True
