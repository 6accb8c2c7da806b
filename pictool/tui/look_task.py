"""Asking the model about a trace: in a thread that waits for another process, with notes, and cancelled by escape."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from textual.widgets import Static

from pictool.analysis.labels import visible
from pictool.errors import PicError
from pictool.tui.services import Cancelled

if TYPE_CHECKING:
    from pictool.analysis.look import Look
    from pictool.tui.trace_screen import TraceScreen


class LookTask:
    """At most one question of a screen at a time."""

    def __init__(self, screen: TraceScreen) -> None:
        self._screen, self.is_running = screen, False

    def start(self, layer: int | None) -> None:
        if not self._screen.pic.take_job():
            return
        self.is_running = True
        self.note("asking the model (escape cancels) …")
        self._screen.run_worker(partial(self._run, layer), thread=True, group="look")

    def cancel(self) -> bool:
        """Whether there was something to cancel."""
        if self.is_running:
            self._screen.pic.services.job.cancel()
        return self.is_running

    def note(self, text: str) -> None:
        self._screen.query_one("#legend", Static).update(visible(text))

    def _run(self, layer: int | None) -> None:
        """In the thread; everything that is shown goes through the app's own."""
        screen, app = self._screen, self._screen.pic
        look: Look | None = None
        problem = ""
        try:
            look = app.services.job.look(screen.opened.trace, screen.opened.name, layer, _Forward(self))
        except Cancelled:
            problem = "cancelled"
        except PicError as error:
            problem = str(error)
        app.call_from_thread(self._done, look, problem)

    def _done(self, look: Look | None, problem: str) -> None:
        self.is_running = False
        self._screen.pic.free_job()
        if not self._screen.is_attached:
            return
        if look is not None:
            self._screen.set_look(look)
            return
        self._screen.recompute()
        self._screen.pic.tell(problem, is_error=problem != "cancelled")


class _Forward:
    """A listener in the thread: hands on to the screen."""

    def __init__(self, task: LookTask) -> None:
        self._task = task

    def note(self, text: str) -> None:
        self._task._screen.app.call_from_thread(self._task.note, f"{text} (escape cancels) …")

    def text(self, piece: str) -> None:
        """Nothing streams."""
