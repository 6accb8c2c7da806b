"""How much of a step is spent on links inside vLLM: on a clock of the test's own."""

from __future__ import annotations

import itertools
import os
import sys
import threading

import pytest

from pictool.engines.vllm.worker.pace import IDLE_S, SHARE, PieceSize, StepTimeLimit
from pictool.engines.vllm.worker.threads import NICENESS, background_threads


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in seconds."""
    time = [100.0]
    monkeypatch.setattr("pictool.engines.vllm.worker.pace.time.perf_counter", lambda: time[0])
    return time


def steps(own: StepTimeLimit, now: list[float], *ordinary_s: float, is_idle: bool = False) -> None:
    for seconds in ordinary_s:
        own.begin(is_idle)
        now[0] += 5.0  # what the links take is no part of an ordinary step
        own.end(is_idle)
        now[0] += seconds


def test_a_step_spends_a_share_of_an_ordinary_one(now: list[float]) -> None:
    """Prefills among them, and pauses without requests, change nothing."""
    own = StepTimeLimit(0)
    steps(own, now, *[0.02, 0.02, 0.5, 0.02, 0.02, 30.0] * 20)
    assert own.begin(False).left_s == pytest.approx(SHARE * 0.02)
    own.end(False)
    steps(own, now, *[0.04] * 200)
    assert own.begin(False).left_s == pytest.approx(SHARE * 0.04)


def test_what_is_set_is_kept_and_idle_steps_are_not_ordinary(now: list[float]) -> None:
    own = StepTimeLimit(0.003)
    steps(own, now, *[0.02] * 20)
    assert own.begin(False).left_s == pytest.approx(0.003)
    own = StepTimeLimit(0)
    steps(own, now, *[0.02] * 20)
    steps(own, now, *[7.0] * 200, is_idle=True)
    assert own.begin(False).left_s == pytest.approx(SHARE * 0.02)
    assert own.begin(True).left_s == pytest.approx(IDLE_S)


def test_a_deadline_comes_near_before_it_comes(now: list[float]) -> None:
    deadline = StepTimeLimit(0.01).begin(False)
    assert not deadline.is_near and deadline.half().left_s == pytest.approx(0.005)
    now[0] += 0.006
    assert deadline.is_near and deadline.left_s > 0


@pytest.mark.parametrize(("fixed_s", "unit_s"), [(0.0, 1e-4), (2e-3, 1e-4), (2.9e-3, 1e-6), (5e-3, 1e-4)])
def test_pieces_become_as_large_as_fits(fixed_s: float, unit_s: float) -> None:
    """Also where most of what a piece costs does not depend on its size."""
    size, sizes = PieceSize(16), []
    for _ in range(200):
        sizes.append(size.within(3e-3))
        size.took(sizes[-1], fixed_s + sizes[-1] * unit_s)
    fits = max(1, round((3e-3 - fixed_s) / unit_s))
    assert sizes[0] == 16 and fits / 2 <= sizes[-1] <= fits + 1
    assert all(after <= 4 * before for before, after in itertools.pairwise(sizes))


def test_a_rest_does_not_shrink_the_next_piece() -> None:
    size = PieceSize(16)
    size.took(size.within(1.0), 0.1)
    proposed = size.within(0.1)
    size.took(1, 0.09)  # the end of a layer
    assert size.within(0.1) == proposed == 16


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_background_threads_yield_to_the_engine() -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with background_threads(4, "test") as threads:
        assert threads.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result() >= NICENESS
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
