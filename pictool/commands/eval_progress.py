"""A bar of answers with an estimate of the time left, on a terminal; elsewhere a line at the start."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pictool.commands.common import note


@contextmanager
def answers_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to be told how many answers are done, of how many."""
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
        is_begun = False

        def show(done: int, total: int) -> None:
            nonlocal is_begun
            if not is_begun:  # what stands in the results file already says nothing about the speed
                bar.reset(task, total=total, completed=done)
            is_begun = True
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
