"""How a time grows with the length of a prompt: the exponent of the power law that fits best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Growth:
    """seconds ~ tokens ^ exponent. `error` is the exponent's standard error; None for two points, which say nothing of
    it.
    """

    exponent: float
    error: float | None

    @classmethod
    def fit(cls, tokens: Sequence[int], seconds: Sequence[float]) -> Growth | None:
        """The least-squares line through (log tokens, log seconds); None for less than two lengths."""
        if len(tokens) < 2:
            return None
        x, y = np.log(tokens), np.log(seconds)
        x, y = x - x.mean(), y - y.mean()
        square = float(x @ x)
        exponent = float(x @ y) / square
        left = y - exponent * x
        error = math.sqrt(float(left @ left) / (len(x) - 2) / square) if len(x) > 2 else None
        return cls(exponent, error)

    def __str__(self) -> str:
        return f"{self.exponent:.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")


def upper_half(count: int) -> slice:
    """The longer half of `count` lengths, the middle one with them: what is fixed per prompt weighs least there."""
    return slice(count // 2, count)
