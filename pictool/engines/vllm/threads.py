"""Threads beside the engine's: they read, check and plan, and must not take its processors."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10


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
