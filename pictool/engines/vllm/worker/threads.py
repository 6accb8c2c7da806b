"""Threads beside the engine's: they read, check and plan, and must not take its processors."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10
_REST, _MOST_REST_S = 8, 0.01  # times what a thread took, that it rests while the engine steps; at a time at most
_BUSY_S = 0.5  # after the last step that had work, the engine has none


def background_threads(most: int, name: str) -> ThreadPoolExecutor:
    """At most so many threads: one for two processors, but two, so that a slow disk does not hold all that is read.

    Their priority is below the engine's, on Linux.
    """
    count = min(most, max(2, (os.cpu_count() or 1) // 2))
    return ThreadPoolExecutor(count, name, initializer=_lower_priority)


def _lower_priority() -> None:
    """Of the calling thread. Linux alone knows threads by these numbers."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class BackgroundThrottle:
    """Leaves the interpreter to the engine's thread while threads beside it run Python code.

    The engine gives the interpreter's lock away with every operation of a step, and waits until it has it back from
    whoever took it. So a thread that opens many objects rests between them, while the engine has other work.
    """

    def __init__(self) -> None:
        self._last = -_BUSY_S  # when a step had other work
        self._thread = threading.local()

    @property
    def is_busy(self) -> bool:
        return time.monotonic() - self._last < _BUSY_S

    def note(self, is_idle: bool) -> None:
        """A step of the engine has other work, or none."""
        self._last = -_BUSY_S if is_idle else time.monotonic()

    def pause(self) -> None:
        """Rest, in a thread, by what it took since it called this last, which may be more than it is to rest for."""
        now = time.thread_time()
        took, self._thread.last = now - getattr(self._thread, "last", now), now
        if self.is_busy:
            time.sleep(min(_REST * took, _MOST_REST_S))
