"""Asking the model: in a thread that waits for another process, with notes, and cancelled by escape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from pictool.errors import PicError
from pictool.trace.labels import visible
from pictool.tui.services import Cancelled, Listener

if TYPE_CHECKING:
    from pictool.tui.base import PicScreen

T = TypeVar("T")


class Asking(Generic[T]):
    """At most one question of a screen at a time.

    Args:
        on_note: shows what goes on. on_answer: shows the answer. on_none: shows again what was there before.
    """

    def __init__(
        self,
        screen: PicScreen,
        on_note: Callable[[str], None],
        on_answer: Callable[[T], None],
        on_none: Callable[[], None],
    ) -> None:
        self._screen, self.is_running = screen, False
        self._on_note, self._on_answer, self._on_none = on_note, on_answer, on_none

    def start(self, ask: Callable[[Listener], T]) -> None:
        """`ask` runs in the thread, and may raise PicError or Cancelled."""
        if not self._screen.pic.take_job():
            return
        self.is_running = True
        self._say("asking the model")
        self._screen.run_worker(partial(self._run, ask), thread=True, group="asking")

    def cancel(self) -> bool:
        """Whether there was something to cancel."""
        if self.is_running:
            self._screen.pic.services.job.cancel()
        return self.is_running

    def note(self, text: str) -> None:
        """From the thread: a step."""
        self._screen.app.call_from_thread(self._say, text)

    def text(self, piece: str) -> None:
        """Nothing streams."""

    def _say(self, text: str) -> None:
        self._on_note(f"{visible(text)} (escape cancels) …")

    def _run(self, ask: Callable[[Listener], T]) -> None:
        """In the thread; everything that is shown goes through the app's own."""
        answer: T | None = None
        problem = ""
        try:
            answer = ask(self)
        except Cancelled:
            problem = "cancelled"
        except PicError as error:
            problem = str(error)
        self._screen.app.call_from_thread(self._done, answer, problem)

    def _done(self, answer: T | None, problem: str) -> None:
        self.is_running = False
        self._screen.pic.free_job()
        if not self._screen.is_attached:
            return
        if answer is not None:
            self._on_answer(answer)
            return
        self._on_none()
        self._screen.pic.tell(problem, is_error=problem != "cancelled")
