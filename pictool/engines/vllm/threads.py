"""Threads beside the engine's: they read, check and plan, and must not take its processors."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

NICENESS = 10


def background_threads(most: int, name: str) -> ThreadPoolExecutor:
    """At most so many threads, and one for two processors; where threads have a priority, it is below the engine's."""
    count = max(1, min(most, len(os.sched_getaffinity(0)) // 2 if hasattr(os, "sched_getaffinity") else most))
    return ThreadPoolExecutor(count, name, initializer=_lower_priority)


def _lower_priority() -> None:
    """Of the calling thread. Linux alone knows threads by these numbers."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
