"""How much of a step is spent on links: a share of what an ordinary step takes, in pieces that fit in what is left."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from pictool.runtime.device import synchronize

SHARE = 0.6  # of an ordinary step, that a step with other work spends on links
MOST_S = 0.1  # and no more than this
IDLE_S = 0.05  # what a step without other work spends, so that a request that arrives does not wait longer
_UNKNOWN_S = 0.01  # an ordinary step, before any was measured
_STEPS = 64  # that are remembered
_GROWTH = 4  # times the last piece, that the next one is at most
_WORTH_IT = 0.5  # of a step's time: with less left it begins no further piece


class DeviceClock:
    """Seconds, after all work of the device that was begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


class StepTimeLimit:
    """The time that a step may spend on links.

    An ordinary step is the time from the end of one step's links to the beginning of the next one's, the lower quartile
    of those that were seen last: steps that prefill, and pauses between requests, do not count.

    Args:
        step_s: seconds that a step with other work may spend; 0: a share of an ordinary step.
    """

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._ordinary: deque[float] = deque(maxlen=_STEPS)
        self._ended: float | None = None

    def begin(self, is_idle: bool) -> StepDeadline:
        """The links of a step begin."""
        now = time.perf_counter()
        if self._ended is not None:
            self._ordinary.append(now - self._ended)
        return StepDeadline(IDLE_S if is_idle else self._step_s or self._share())

    def end(self, is_idle: bool) -> None:
        """The links of a step end; its other work begins, or has been begun, if it is not idle."""
        self._ended = None if is_idle else time.perf_counter()

    def _share(self) -> float:
        ordinary = sorted(self._ordinary)[len(self._ordinary) // 4] if self._ordinary else _UNKNOWN_S
        return min(MOST_S, SHARE * ordinary)


class StepDeadline:
    """The end of the time of a step, or of a part of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, time.perf_counter() + seconds

    @property
    def left_s(self) -> float:
        return self._end - time.perf_counter()

    @property
    def is_near(self) -> bool:
        """Whether too little time is left to begin anything."""
        return self.left_s < _WORTH_IT * self._seconds

    def half(self) -> StepDeadline:
        """A part of the time: half of what is left."""
        return StepDeadline(self.left_s / 2)


class PieceSize:
    """How large the next piece of one kind of work may be, to end in a given time.

    The first piece is small. A piece costs something, and something per unit, which changes: with the length of the
    context, with the number of runs. So each size follows from the last one and from how long that took, up to
    `_GROWTH` times as much.

    Args:
        first: units of the first piece.
    """

    def __init__(self, first: int) -> None:
        self._first, self._proposed = first, 0
        self._last: tuple[int, float] | None = None  # units, seconds

    def within(self, left_s: float) -> int:
        """Units, at least 1. If there was time left, it is at least one more than the last."""
        if self._last is None:
            self._proposed = self._first
        else:
            size, seconds = self._last
            factor = max(0.0, left_s) / seconds
            self._proposed = math.ceil(size * min(factor, _GROWTH)) if factor > 1 else max(1, int(size * factor))
        return self._proposed

    def took(self, size: int, seconds: float) -> None:
        """A piece of `size` units took `seconds`. One much smaller than proposed, a rest, says little."""
        if self._last is None or _GROWTH * size >= self._proposed:
            self._last = size, max(seconds, 1e-9)
