"""Threads beside the engine's: they rest while it has other work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pictool.engines.vllm.worker import threads
from pictool.engines.vllm.worker.threads import BackgroundThrottle


class Clocks:
    """The clocks of `threads`; each thread has its own processor time."""

    def __init__(self) -> None:
        self.now, self.rests, self._used = 100.0, list[float](), threading.local()

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return getattr(self._used, "seconds", 0.0)

    def work(self, seconds: float) -> None:
        self._used.seconds = self.thread_time() + seconds

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(threads, "time", clocks)
    return clocks


def test_a_thread_rests_for_what_it_took_while_the_engine_has_other_work(clocks: Clocks) -> None:
    throttle = BackgroundThrottle()

    def open_two() -> None:
        for seconds in (0.001, 2.0):  # the second is more than opening: reading, between two requests
            throttle.pause()
            clocks.work(seconds)
        throttle.pause()

    for is_idle, rests in ((True, []), (False, [0, 0.008, 0.01])):
        clocks.rests.clear()
        throttle.note(is_idle)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(open_two).result()
        assert clocks.rests == pytest.approx(rests)


def test_an_engine_that_does_not_step_any_more_is_not_busy(clocks: Clocks) -> None:
    throttle = BackgroundThrottle()
    assert not throttle.is_busy
    throttle.note(is_idle=False)
    assert throttle.is_busy
    clocks.now += 1
    assert not throttle.is_busy
