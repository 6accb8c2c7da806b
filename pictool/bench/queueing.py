"""A queue with Poisson arrivals and one server on a virtual clock: first come, first served. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pictool.errors import InputError

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """How many requests arrive: `rate` a second on average, for `duration` seconds or, if not None, just `requests`."""

    rate: float
    duration: float = 40.0
    requests: int | None = None

    def __post_init__(self) -> None:
        for option, value in (("rate", self.rate), ("duration", self.duration), ("requests", self.requests)):
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"--{option} {value:g}: must be above 0")

    def draw_arrivals(self, draw: np.random.Generator) -> Seconds:
        """Draw the ascending times of a Poisson process of this rate, from 0 on; float64 [requests]."""
        if self.requests is not None:
            return np.cumsum(draw.exponential(1 / self.rate, self.requests))
        return np.sort(draw.uniform(0, self.duration, draw.poisson(self.rate * self.duration)))


@dataclass(frozen=True)
class QueueTimes:
    """When requests arrived, and were served, in order of arrival; seconds of the virtual clock, float64 [requests]."""

    arrival: Seconds
    start: Seconds
    first_token: Seconds
    end: Seconds

    @property
    def waiting(self) -> Seconds:
        return self.start - self.arrival

    @property
    def ttft(self) -> Seconds:
        return self.first_token - self.arrival

    @property
    def latency(self) -> Seconds:
        """Until the last token."""
        return self.end - self.arrival

    @property
    def duration(self) -> float:
        """H: from 0 until the last request is done."""
        return float(self.end[-1])

    @property
    def throughput(self) -> float:
        return len(self.end) / self.duration

    @property
    def utilisation(self) -> float:
        """The share of H in which a request was being served."""
        return float((self.end - self.start).sum()) / self.duration


def serve_in_order(
    arrivals: Seconds, ttft: Sequence[float] | Seconds, service: Sequence[float] | Seconds
) -> QueueTimes:  # fmt: skip
    """Serve one request at a time in order of arrival: each starts when it has arrived and the one before it is done.

    Args:
        ttft: seconds from each request's start to its first token.
        service: seconds from its start to its last.
    """
    assert len(arrivals) == len(ttft) == len(service) > 0
    starts, free = [], 0.0
    for arrival, seconds in zip(arrivals, service, strict=True):
        starts.append(max(float(arrival), free))
        free = starts[-1] + seconds
    start = np.asarray(starts)
    return QueueTimes(np.asarray(arrivals), start, start + np.asarray(ttft), start + np.asarray(service))
