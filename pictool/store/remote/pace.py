"""How long a transfer may take, and what ends one for good."""

from __future__ import annotations

from dataclasses import dataclass

MIN_RATE = 8192.0  # bytes per second


@dataclass(frozen=True)
class RequestTimeout:
    """The time that a request may take: `timeout_s` until the first byte, and 1 / `min_rate` more for every byte."""

    timeout_s: float = 30.0
    min_rate: float = MIN_RATE

    def allowed_s(self, num_bytes: int) -> float:
        return self.timeout_s + num_bytes / self.min_rate


class BadAnswer(ValueError):
    """An answer that no attempt makes better."""


class TooSlow(OSError):
    """A body that falls behind the slowest rate."""
